// The means and scales of a tensor's channels, operation for operation as in docs/concepts/quantizer.md.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "host_device.h"

namespace fewbit {

constexpr int kChannelBlock = 256;  // channels whose variances are averaged
constexpr int kMostRows = 256;      // from which the numbers of a channel are estimated
constexpr int kRowRuns = 4;         // whose sums are computed one after the other, or by as many threads

// The numbers of channels as a copy keeps them: (count, 2) bfloat16, the mean and the scale of each channel.
struct StoredChannels {
  const uint16_t* numbers;  // null if there are no channels
  int64_t count;

  FEWBIT_HD bool exists() const { return numbers != nullptr; }
};

// The numbers of channels, (count,) each. Element number e of a tensor, in storage order, has channel e mod count. A tensor is
// quantized as (x - mean) * inverse, and dequantized as value * scale + mean. Without a mean there are no channels.
struct Channels {
  const float* mean;
  const float* scale;
  const float* inverse;  // 1 / scale
  int64_t count;

  FEWBIT_HD bool exists() const { return mean != nullptr; }
};

// The numbers of one channel, as they are stored in bfloat16.
struct ChannelNumbers {
  float mean, scale;
};

inline namespace FEWBIT_NAMESPACE {

// Returns how many of `rows` rows the numbers of channels are estimated from.
FEWBIT_HD constexpr int64_t estimated_rows(int64_t rows) {
  return rows < kMostRows ? rows : kMostRows;
}

// Returns number `index` of these `count` rows, which are evenly distributed.
FEWBIT_HD constexpr int64_t estimated_row(int64_t index, int64_t count, int64_t rows) { return index * rows / count; }

// Returns where run number `run` of the chosen rows begins. kRowRuns: their end.
FEWBIT_HD constexpr int64_t run_begin(int run, int64_t count) { return run * count / kRowRuns; }

// Returns the variance of a channel, from the sums of its elements and of their squares in n rows. It is at least the square of
// the error of the stored mean.
FEWBIT_HD inline float channel_variance(float sum, float squares, float n) {
  const float mean = sum / n, difference = squares / n - mean * mean, error = mean * 0x1p-8f;
  return (difference > 0.0f ? difference : 0.0f) + error * error;
}

FEWBIT_HD inline float square_root(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// Returns the numbers of a channel. sum: of its elements in n rows. average: the mean variance of the block's channels. The channel is
// taken for one of n + 1 rows of which one has this variance, so that a channel that is 0 in these rows, but not in all, has a scale.
FEWBIT_HD inline ChannelNumbers channel_numbers(float sum, float variance, float average, float n) {
  const float mean = widen_bfloat16(narrow_bfloat16(sum / n)), smooth = variance + average / n;
  const bool has_scale = smooth >= 1e-30f && smooth <= 1e30f;
  if (!has_scale) return {0.0f, 1.0f};
  return {mean, widen_bfloat16(narrow_bfloat16(square_root(square_root(smooth))))};
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
