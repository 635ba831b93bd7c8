// The float32 arithmetic of the fixed-point code of pre-activations. fewbit/runtime/ops/fixed_point.py defines it, and
// reference_fixed_point.py does the same operations in torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "quantize.h"

namespace fewbit {

constexpr int kGridRows = 7;

// The constants that map codes to values in each channel: kGridRows rows of index.count entries, one after the other.
struct Grid {
  const float* rows;
  VectorIndex index;

  FEWBIT_HD const float* start() const { return rows; }
  FEWBIT_HD const float* first() const { return rows + index.count; }
  FEWBIT_HD const float* low() const { return rows + 2 * index.count; }
  FEWBIT_HD const float* high() const { return rows + 3 * index.count; }
  FEWBIT_HD const float* sign() const { return rows + 4 * index.count; }
  FEWBIT_HD const float* scale() const { return rows + 5 * index.count; }
  FEWBIT_HD const float* shift() const { return rows + 6 * index.count; }
};

// A vector over a tensor, or null.
struct Scale {
  const float* values;
  VectorIndex index;
};

inline namespace FEWBIT_NAMESPACE {

FEWBIT_HD inline float steps_per_unit(int bits) { return static_cast<float>(static_cast<double>(1 << bits) / 6.0); }
FEWBIT_HD inline float fixed_step(int bits) { return 6.0f / static_cast<float>(1 << bits); }

// Computes column `channel` of a grid of `count` columns from its gamma and beta.
FEWBIT_HD inline void make_column(float gamma, float beta, int bits, float* rows, int64_t channel, int64_t count) {
  const float levels = static_cast<float>(1 << bits), step = fixed_step(bits), infinity = float_of(0x7F800000u);
  const float scale = float_of(bits_of(gamma) & 0x7FFFFFFFu);
  const float zero = -beta / scale;
  const bool constant = !is_finite(zero), inside = zero >= -3.0f && zero <= 3.0f;
  const bool clamped = !inside && !constant;
  const float number = levels * 0.5f + floorf(zero * steps_per_unit(bits));
  float first = number > 1.0f ? number : 1.0f;
  first = first < levels - 1.0f ? first : levels - 1.0f;
  rows[channel] = inside ? zero - first * step : -3.0f;
  rows[channel + count] = constant ? (beta > 0.0f ? 0.0f : levels) : first;
  rows[channel + 2 * count] = clamped ? zero + step * 0.5f : -infinity;
  rows[channel + 3 * count] = clamped ? zero - step * 0.5f : infinity;
  rows[channel + 4 * count] = gamma < 0.0f ? -1.0f : 1.0f;
  rows[channel + 5 * count] = scale;
  rows[channel + 6 * count] = beta;
}

// Returns the code of a normalized x. A NaN gets the code of the first level, or of the first positive level.
FEWBIT_HD inline int32_t fixed_code(float x, bool is_positive, float start, float first, float sign, float per_unit,
                                    int levels) {
  const float most = static_cast<float>(levels);
  float steps = (sign * x - start) * per_unit;
  steps = steps > 0.0f ? steps : 0.0f;
  steps = steps < most ? steps : most;
  const int32_t whole = static_cast<int32_t>(steps), m = static_cast<int32_t>(first);
  int32_t code = whole + (static_cast<float>(whole) < steps) - 1;
  code = code > 0 ? code : 0;
  const int32_t above = code > m ? code : m, below = code < m - 1 ? code : m - 1;
  code = is_positive ? above : below;
  code = code > 0 ? code : 0;
  return code < levels - 1 ? code : levels - 1;
}

// Returns the normalized value that a code stands for.
FEWBIT_HD inline float fixed_value(int32_t code, float start, float first, float low, float high, float step) {
  const float number = static_cast<float>(code);
  const float value = start + (number + 0.5f) * step;
  const float above = value < low ? low : value, below = value > high ? high : value;
  return number >= first ? above : below;
}

// Returns LeakyReLU(y), y = scale * value + shift; y itself with slope 1. Rounding must not move y across zero, so y is
// clamped to the side of zero that the code is on. is_positive: code >= first.
FEWBIT_HD inline float fixed_activated(bool is_positive, float value, float scale, float shift, float slope) {
  const float y = scale * value + shift;
  const float above = y < 0.0f ? 0.0f : y, below = y > 0.0f ? 0.0f : y;
  const float scaled = slope == 0.0f ? 0.0f : below * slope;
  return is_positive ? above : scaled;
}

// Returns grad if the code is positive, else grad * slope.
template <class Wide>
FEWBIT_HD inline Wide fixed_masked(bool is_positive, Wide grad, Wide slope) {
  const Wide below = slope == Wide(0) ? Wide(0) : grad * slope;
  return is_positive ? grad : below;
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
