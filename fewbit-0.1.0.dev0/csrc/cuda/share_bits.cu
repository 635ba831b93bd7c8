// The division of a tensor's bits among its samples, and the order of the samples by bits. One block does the work, in
// place of many small kernels, so this is for some thousands of samples.

#include "common/dtype.h"
#include "common/planes.h"
#include "common/quantize.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tile.h"

namespace fewbit::cuda {
namespace {

constexpr int kDigits = 256;
constexpr int kWidths = kMaxBits + 1;  // from 0 bits on

// Returns a number that grows with the variance that the `level`-th further bit of a sample removes. The patterns of positive
// numbers are in the order of the numbers.
__device__ inline uint32_t key_of(const Gains& gains, const float* squares, int64_t sample, int level) {
  const float square = squares[sample];
  const float key = is_finite(square) ? gains.of[level] * square : 0.0f;
  return key > 0 ? bits_of(key) : 0u;
}

// Counts the threads of the block that pass true, before this one and in all. All threads call it.
struct Rank {
  int before, total;
};

__device__ inline Rank rank_of(bool is_counted, int* of_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t vote = __ballot_sync(kAllLanes, is_counted);
  if (lane == 0) of_warps[warp] = __popc(vote);
  __syncthreads();
  Rank rank = {__popc(vote & ((1u << lane) - 1u)), 0};
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) rank.before += of_warps[i];
    rank.total += of_warps[i];
  }
  __syncthreads();
  return rank;
}

// Finds the least of the `extra` greatest keys digit by digit, and adds a bit for each of these keys. Of equal keys, those of
// lower levels and then of lower samples come first.
__global__ void __launch_bounds__(kThreads)
    share_bits_kernel(const __grid_constant__ Gains gains, const float* squares, int64_t samples, int64_t extra,
                      uint8_t* widths) {
  __shared__ uint32_t digits[kDigits];
  __shared__ uint32_t least;
  __shared__ int64_t left;  // the keys with the present beginning of `least` that are among the greatest
  __shared__ int of_warps[kWarps];
  if (threadIdx.x == 0) least = 0, left = extra;
  for (int shift = 24; shift >= 0; shift -= 8) {
    digits[threadIdx.x] = 0;
    __syncthreads();
    for (int level = 0; level < kMaxBits - 1; ++level) {
      for (int64_t n = threadIdx.x; n < samples; n += kThreads) {
        const uint32_t key = key_of(gains, squares, n, level);
        const uint64_t above = static_cast<uint64_t>(key ^ least) >> (shift + 8);
        if (above == 0) atomicAdd(digits + (key >> shift & 0xFFu), 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigits - 1;
      for (; digit > 0 && digits[digit] < left; --digit) left -= digits[digit];
      least |= static_cast<uint32_t>(digit) << shift;
    }
    __syncthreads();
  }
  int64_t taken = 0;  // of the keys that equal `least`
  for (int64_t begin = 0; begin < samples; begin += kThreads) {
    if (begin + threadIdx.x < samples) widths[begin + threadIdx.x] = 1;
  }
  for (int level = 0; level < kMaxBits - 1; ++level) {
    for (int64_t begin = 0; begin < samples; begin += kThreads) {
      const int64_t n = begin + threadIdx.x;
      const bool exists = n < samples && extra > 0;
      const uint32_t key = exists ? key_of(gains, squares, n, level) : 0u;
      const bool is_least = exists && key == least;
      const Rank rank = rank_of(is_least, of_warps);
      if (exists && (key > least || (is_least && taken + rank.before < left))) ++widths[n];
      taken += rank.total;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    order_samples_kernel(const uint8_t* widths, int64_t samples, int64_t* order, int64_t* counts) {
  __shared__ uint32_t found[kWidths];
  __shared__ int of_warps[kWarps];
  if (threadIdx.x < kWidths) found[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t n = threadIdx.x; n < samples; n += kThreads) {
    if (widths[n] < kWidths) atomicAdd(found + widths[n], 1u);
  }
  __syncthreads();
  if (threadIdx.x < kWidths) counts[threadIdx.x] = found[threadIdx.x];
  int64_t place = 0;
  for (int width = 0; width < kWidths; ++width) {
    if (found[width] == 0) continue;
    for (int64_t begin = 0; begin < samples; begin += kThreads) {
      const int64_t n = begin + threadIdx.x;
      const bool is_one = n < samples && widths[n] == width;
      const Rank rank = rank_of(is_one, of_warps);
      if (is_one) order[place + rank.before] = n;
      place += rank.total;
    }
  }
}

}  // namespace

void share_bits(const Gains& gains, const float* squares, int64_t samples, int64_t extra, uint8_t* widths, int device,
                void* stream) {
  if (samples <= 0) return;
  const DeviceScope scope(device);
  launch(share_bits_kernel, device, stream, 1, 1, gains, squares, samples, extra, widths);
}

void order_samples(const uint8_t* widths, int64_t samples, int64_t* order, int64_t* counts, int device, void* stream) {
  const DeviceScope scope(device);
  launch(order_samples_kernel, device, stream, 1, 1, widths, samples, order, counts);
}

}  // namespace fewbit::cuda
