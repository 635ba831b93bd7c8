// The fixed-point code of pre-activations: a warp handles 256 elements at a time, a lane one of each block of 32.

#include "common/fixed_point.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tile.h"

namespace fewbit::cuda {
namespace {

constexpr int kRounds = kDrawBlock / kBlock;

__host__ __device__ inline int64_t part_count(int64_t n) { return n / kDrawBlock + (n % kDrawBlock != 0); }

// The type in which gradients are multiplied.
__device__ inline float wide_of(float x) { return x; }
__device__ inline double wide_of(double x) { return x; }
__device__ inline float wide_of(Float16 x) { return as_float(x); }
__device__ inline float wide_of(Bfloat16 x) { return as_float(x); }
__device__ inline void store_wide(float x, float* to) { *to = x; }
__device__ inline void store_wide(double x, double* to) { *to = x; }
__device__ inline void store_wide(float x, Float16* to) { store_one(x, to); }
__device__ inline void store_wide(float x, Bfloat16* to) { store_one(x, to); }

// Returns the code of a lane's element of a block. All lanes read the same words.
__device__ inline int32_t code_at(const uint32_t* packed, int64_t block, int bits, int lane) {
  const uint32_t* words = packed + word_index(block, 0, bits);
  uint32_t code = 0;
  for (int plane = 0; plane < bits; ++plane) code |= (words[plane] >> lane & 1u) << plane;
  return static_cast<int32_t>(code);
}

__global__ void __launch_bounds__(kThreads)
    grid_fixed_kernel(const float* gamma, const float* beta, int64_t n, int bits, float* grid) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += threads) {
    make_column(gamma[i], beta[i], bits, grid, i, n);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    encode_fixed_kernel(const __grid_constant__ Grid grid, const __grid_constant__ Normalization normalization,
                        const T* x, const T* y, int64_t n, int bits, uint32_t* packed) {
  const int lane = threadIdx.x % 32, levels = 1 << bits;
  const float per_unit = steps_per_unit(bits);
  for (int64_t part = first_group_of_warp(); part < part_count(n); part += groups_apart()) {
    const int64_t begin = part * kDrawBlock;
    const Entries channels(grid.index, begin), entries(normalization.index, begin);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int i = round * kBlock + lane;
      if (begin + round * kBlock >= n) break;  // the same for all lanes
      uint32_t code = 0;
      if (begin + i < n) {
        float value = as_float(x[begin + i]);
        if (normalization.exists()) {
          const int64_t entry = entries.of(i);
          value = (value - mean_at(normalization, entry)) * normalization.rstd[entry];
        }
        const bool is_positive = !(wide_of(y[begin + i]) <= 0);
        const int64_t channel = channels.of(i);
        code = static_cast<uint32_t>(fixed_code(value, is_positive, grid.start()[channel], grid.first()[channel],
                                                grid.sign()[channel], per_unit, levels));
      }
      uint32_t own = 0;
      for (int plane = 0; plane < bits; ++plane) {
        const uint32_t word = __ballot_sync(kAllLanes, code >> plane & 1);
        if (lane == plane) own = word;
      }
      if (lane < bits) packed[word_index(block_of(begin) + round, lane, bits)] = own;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decode_fixed_kernel(const __grid_constant__ Grid grid, const __grid_constant__ Scale scale, const uint32_t* packed,
                        int64_t n, int bits, bool activated, float slope, T* out) {
  const int lane = threadIdx.x % 32;
  const float step = fixed_step(bits);
  for (int64_t part = first_group_of_warp(); part < part_count(n); part += groups_apart()) {
    const int64_t begin = part * kDrawBlock;
    const Entries channels(grid.index, begin), entries(scale.index, begin);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int i = round * kBlock + lane;
      if (begin + i >= n) break;
      const int32_t code = code_at(packed, block_of(begin) + round, bits, lane);
      const int64_t channel = channels.of(i);
      const float first = grid.first()[channel];
      float value = fixed_value(code, grid.start()[channel], first, grid.low()[channel], grid.high()[channel], step);
      if (activated) {
        value = fixed_activated(code, value, first, grid.scale()[channel], grid.shift()[channel], slope);
      } else {
        value = grid.sign()[channel] * value;
        if (scale.values) value = value * scale.values[entries.of(i)];
      }
      store_one(value, out + begin + i);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    mask_fixed_kernel(const __grid_constant__ Grid grid, const uint32_t* packed, int64_t n, int bits, Wide<T> slope,
                      const T* grad, T* out) {
  const int lane = threadIdx.x % 32;
  for (int64_t part = first_group_of_warp(); part < part_count(n); part += groups_apart()) {
    const int64_t begin = part * kDrawBlock;
    const Entries channels(grid.index, begin);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int i = round * kBlock + lane;
      if (begin + i >= n) break;
      const int32_t code = code_at(packed, block_of(begin) + round, bits, lane);
      const float first = grid.first()[channels.of(i)];
      store_wide(fixed_masked<Wide<T>>(code, wide_of(grad[begin + i]), first, slope), out + begin + i);
    }
  }
}

}  // namespace

void grid_fixed(const float* gamma, const float* beta, int64_t n, int bits, float* grid, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  launch(grid_fixed_kernel, device, stream, n / 32 + 1, kWaves, gamma, beta, n, bits, grid);
}

void encode_fixed(const Grid& grid, const Normalization& normalization, const void* x, const void* y, int dtype,
                  int64_t n, int bits, int32_t* packed, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(encode_fixed_kernel<T>, device, stream, part_count(n), kWaves, grid, normalization,
           static_cast<const T*>(x), static_cast<const T*>(y), n, bits, reinterpret_cast<uint32_t*>(packed));
  });
}

void decode_fixed(const Grid& grid, const Scale& scale, const int32_t* packed, int64_t n, int bits, bool activated,
                  float slope, void* out, int dtype, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(decode_fixed_kernel<T>, device, stream, part_count(n), kWaves, grid, scale,
           reinterpret_cast<const uint32_t*>(packed), n, bits, activated, slope, static_cast<T*>(out));
  });
}

void mask_fixed(const Grid& grid, const int32_t* packed, int64_t n, int bits, double slope, const void* grad,
                void* out, int dtype, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(mask_fixed_kernel<T>, device, stream, part_count(n), kWaves, grid,
           reinterpret_cast<const uint32_t*>(packed), n, bits, static_cast<Wide<T>>(slope),
           static_cast<const T*>(grad), static_cast<T*>(out));
  });
}

}  // namespace fewbit::cuda
