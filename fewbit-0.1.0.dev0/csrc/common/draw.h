// The code that an unbiased table draws for an element: the float32 operations of docs/reference/table_schema.md, "A draw".
//
// The code is cut into parts, because the CPU runs each part over a chunk of elements and CUDA all parts for one element.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "philox.h"
#include "table.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

// Does one halving of the search for the number of limits below x, and returns the place that it leads to. padded: 2**steps
// - 1 limits; half: 2**(steps - 1), then half of it, and so on to 1; place: 0 at first, then the last result. NaN is beyond
// all limits.
template <class T>
FEWBIT_HD inline int32_t beyond(const T* padded, int32_t place, int32_t half, T x) {
  return place + (x <= padded[place + half - 1] ? 0 : half);
}

// Does the same for limits that belong to the side above them: x >= limit is beyond.
FEWBIT_HD inline int32_t at_or_beyond(const float* padded, int32_t place, int32_t half, float x) {
  return place + (x < padded[place + half - 1] ? 0 : half);
}

// The stand-in for f' at x, clipped to the levels; segment: the number of points below x.
FEWBIT_HD inline float draw_mean(const Knots& knots, int32_t segment, float x) {
  const int32_t last = knots.count - 1;
  segment = segment < knots.count ? segment : knots.count;
  int32_t i = segment - 1;
  i = i > 0 ? i : 0;
  i = i < last ? i : last - 1;
  const float inside = knots.values[i] + (x - knots.origins[i]) * knots.slopes[i];
  float mean = segment == 0 ? knots.values[0] : inside;
  mean = segment == knots.count ? knots.values[last] : mean;
  const float lowest = knots.levels[0], highest = knots.levels[knots.n_levels - 1];
  mean = mean < lowest ? lowest : mean;
  return mean > highest ? highest : mean;
}

// Returns the packed code: the Gray code of the level that is drawn. place: the number of levels at or below the mean.
FEWBIT_HD inline int32_t draw_code(const Knots& knots, int32_t place, float mean, float uniform) {
  int32_t lower = place - 1;
  lower = lower > 0 ? lower : 0;
  lower = lower < knots.n_levels - 2 ? lower : knots.n_levels - 2;
  const float probability = (mean - knots.levels[lower]) * knots.inverse_gaps[lower];
  const int32_t level = lower + (uniform < probability ? 1 : 0);
  return level ^ (level >> 1);
}

// Does all parts for element number `element`, whose value is x.
FEWBIT_HD inline int32_t draw(const Knots& knots, float x, uint64_t seed, uint64_t element) {
  int32_t segment = 0;
  for (int32_t half = 1 << knots.point_steps >> 1; half > 0; half >>= 1) {
    segment = beyond(knots.padded_points, segment, half, x);
  }
  const float mean = draw_mean(knots, segment, x);
  int32_t place = 0;
  for (int32_t half = 1 << knots.level_steps >> 1; half > 0; half >>= 1) {
    place = at_or_beyond(knots.padded_levels, place, half, mean);
  }
  return draw_code(knots, place, mean, philox_uniform(seed, element));
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
