// The elements of a group in the registers of a warp, 256 at a time, and their extremes.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/quantize.h"
#include "cuda/groups.h"
#include "cuda/tile.h"

namespace fewbit::cuda {

// In a part of a group a lane has the elements lane + 32 j. The counter 32 (e div 256) + lane has the random numbers of all of
// them, and the votes of a warp on a plane of its j-th codes are a word.
constexpr int kPerLane = kDrawBlock / 32;

// The extremes of a group. If an element is not finite, `least` is -inf.
struct Extremes {
  float least, greatest;
};

// Normalizes a lane's elements of the part from `begin` on.
__device__ inline void normalize_part(float* values, const Normalization& by, const GroupPlace& place, int begin,
                                      int length, int lane) {
  const Entries entries(by.index, place.contiguous() ? place.of(begin) : 0);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int i = begin + 32 * j + lane;
    if (i >= length) continue;
    const int64_t entry = place.contiguous() ? entries.of(i - begin) : entry_of(by.index, place.of(i));
    values[j] = (values[j] - mean_at(by, entry)) * by.rstd[entry];
  }
}

// Reads a lane's elements of the part from `begin` on and normalizes them. Elements that do not exist are left out.
template <bool Normalized, class T>
__device__ void read_part(float* values, const T* x, const Normalization& by, const GroupPlace& place, int begin,
                          int length, int lane) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int i = begin + 32 * j + lane;
    if (i < length) values[j] = as_float(x[place.of(i)]);
  }
  if (Normalized) normalize_part(values, by, place, begin, length, lane);
}

// Extends a lane's extremes of the group by a part's elements.
__device__ inline void add_part(Extremes& extremes, const float* values, int begin, int length, int lane) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (begin + 32 * j + lane >= length) continue;
    const float value = is_finite(values[j]) ? values[j] : -float_of(0x7F800000u);
    extremes.least = value < extremes.least ? value : extremes.least;
    extremes.greatest = value > extremes.greatest ? value : extremes.greatest;
  }
}

__device__ inline float other_lanes(float own, int step) {
  return float_of(__shfl_xor_sync(kAllLanes, bits_of(own), step));
}

// Returns the extremes of a group in all lanes of its warp. Afterwards `values` are a lane's elements of the last part.
template <bool Normalized, class T>
__device__ Extremes extremes_of(float* values, const T* x, const Normalization& by, const GroupPlace& place,
                                int length, int lane) {
  const float infinity = float_of(0x7F800000u);
  Extremes extremes = {infinity, -infinity};
  for (int begin = 0; begin < length; begin += kDrawBlock) {
    read_part<Normalized>(values, x, by, place, begin, length, lane);
    add_part(extremes, values, begin, length, lane);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float low = other_lanes(extremes.least, step), high = other_lanes(extremes.greatest, step);
    extremes.least = low < extremes.least ? low : extremes.least;
    extremes.greatest = high > extremes.greatest ? high : extremes.greatest;
  }
  return extremes;
}

}  // namespace fewbit::cuda
