// The means and scales of channels: one block for each kChannelBlock of them.

#include "common/channels.h"

#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace fewbit::cuda {
namespace {

constexpr int kThreadsOfBlock = kRowRuns * kChannelBlock;  // one for each channel of a run of rows

// The rows from which numbers are estimated. The host divides, because divisions are slow on devices.
class ChosenRows {
 public:
  explicit ChosenRows(int64_t rows)
      : count_(estimated_rows(rows)), apart_(rows / count_), rest_(static_cast<uint32_t>(rows % count_)), by_count_(count_) {}

  __device__ int64_t count() const { return count_; }

  // Returns estimated_row(index, count, rows).
  __device__ int64_t of(int64_t index) const { return index * apart_ + by_count_.quotient(static_cast<uint32_t>(index) * rest_); }

 private:
  int64_t count_, apart_;
  uint32_t rest_;
  Divisor by_count_;
};

// Normalizes any element, without divisions.
class RowNormalizer {
 public:
  explicit RowNormalizer(const Normalization& by) : by_(by), by_inner_(by.index.inner), by_count_(by.index.count) {}

  __device__ float operator()(float x, int64_t element) const {
    if (!by_.exists()) return x;
    const int64_t number = by_inner_.quotient(element), entry = number - by_count_.quotient(number) * by_.index.count;
    return (x - mean_at(by_, entry)) * by_.rstd[entry];
  }

 private:
  Normalization by_;
  Divisor by_inner_, by_count_;
};

// Each thread adds up a channel in a run of rows.
template <class T>
__global__ void __launch_bounds__(kThreadsOfBlock)
    channels_kernel(const T* x, const __grid_constant__ ChosenRows chosen, const __grid_constant__ RowNormalizer normalize,
                    int64_t channels, uint16_t* out) {
  __shared__ float sums[kRowRuns][kChannelBlock], squares[kRowRuns][kChannelBlock], variances[kChannelBlock];
  const int i = threadIdx.x % kChannelBlock, run = threadIdx.x / kChannelBlock;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kChannelBlock, channel = first + i;
  const int m = channels - first < kChannelBlock ? static_cast<int>(channels - first) : kChannelBlock;
  float sum = 0.0f, square = 0.0f;
  if (i < m) {
    const int64_t end = run_begin(run + 1, chosen.count());
#pragma unroll 8
    for (int64_t row = run_begin(run, chosen.count()); row < end; ++row) {
      const int64_t element = chosen.of(row) * channels + channel;
      const float value = normalize(as_float(x[element]), element);
      sum += value;
      square += value * value;
    }
  }
  sums[run][i] = sum, squares[run][i] = square;
  __syncthreads();
  const float n = static_cast<float>(chosen.count());
  float variance = 0.0f;
  if (run == 0) {
    for (int other = 1; other < kRowRuns; ++other) sum += sums[other][i], square += squares[other][i];
    variance = i < m ? channel_variance(sum, square, n) : 0.0f;
    variances[i] = variance;
  }
#pragma unroll 1
  for (int half = kChannelBlock / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) variances[i] += variances[i + half];
  }
  __syncthreads();
  if (run > 0 || i >= m) return;
  const ChannelNumbers numbers = channel_numbers(sum, variance, variances[0] / static_cast<float>(m), n);
  out[2 * channel] = narrow_bfloat16(numbers.mean);
  out[2 * channel + 1] = narrow_bfloat16(numbers.scale);
}

}  // namespace

void channel_statistics(const void* x, int dtype, const Normalization& normalization, int64_t rows, int64_t channels, uint16_t* out,
                        int device, void* stream) {
  const DeviceScope scope(device);
  const int64_t blocks = quotient_up(channels, kChannelBlock);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch_blocks(channels_kernel<T>, stream, blocks, kThreadsOfBlock, static_cast<const T*>(x), ChosenRows(rows),
                  RowNormalizer(normalization), channels, out);
  });
}

}  // namespace fewbit::cuda
