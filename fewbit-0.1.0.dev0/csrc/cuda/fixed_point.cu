// The fixed-point code of pre-activations. A lane has runs of neighboring elements, whose channels it finds together.

#include <type_traits>

#include "common/fixed_point.h"
#include "cuda/dispatch.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/lookup.h"
#include "cuda/tile.h"

namespace fewbit::cuda {
namespace {

constexpr int kResident = 3;  // blocks that fit on a multiprocessor with 80 registers a thread

// -- the arithmetic of common/fixed_point.h in fewer instructions ------------------------------------------
//
// The results are the same, because products with a sign or with the width of a cell are exact, and because the first positive
// code is a whole number, the start of the cells is finite, and no bound is 0.

// The numbers with which a channel encodes.
struct Encoder {
  float start, factor;  // a value has number (value - start) * factor in cells
  int least, most;      // one more than the least code of a positive element, and than the greatest code of another

  __device__ Encoder(float start, float first, float sign, float per_unit, int levels)
      : start(sign * start), factor(sign * per_unit) {
    const int m = static_cast<int>(first);
    least = m < levels ? m + 1 : levels;
    most = m > 1 ? m : 1;
  }

  // Returns one more than the code. NaN is converted to 0, and numbers beyond the range of int to its ends.
  __device__ int code(float x, bool is_positive, int levels) const {
    const int cell = __float2int_ru((x - start) * factor);
    const int low = is_positive ? least : 1, high = is_positive ? levels : most;
    const int above = cell > low ? cell : low;
    return above < high ? above : high;
  }
};

// Returns the i-th code plus 0.5. The code replaces the lowest byte of the float 2^23.
__device__ inline float middle_of_cell(const Octet& codes, int i) {
  return float_of(__byte_perm(i < 4 ? codes.low : codes.high, 0x4B000000u, 0x7650u | i % 4)) - 8388607.5f;
}

__device__ inline float value_of_cell(float middle, bool is_positive, float start, float low, float high, float step) {
  const float value = fmaf(middle, step, start);
  return is_positive ? fmaxf(value, low) : fminf(value, high);
}

// The rows of a grid. Their addresses are constants of a kernel, which saves their computation.
struct Rows {
  const float *start, *first, *low, *high, *sign, *scale, *shift;

  explicit Rows(const Grid& grid)
      : start(grid.start()),
        first(grid.first()),
        low(grid.low()),
        high(grid.high()),
        sign(grid.sign()),
        scale(grid.scale()),
        shift(grid.shift()) {}
};

// -- kernels -----------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    grid_fixed_kernel(const float* gamma, const float* beta, int64_t n, int bits, float* grid) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += threads) {
    make_column(gamma[i], beta[i], bits, grid, i, n);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident)
    encode_fixed_kernel(const __grid_constant__ Rows grid, const __grid_constant__ Lookup by_channel,
                        const __grid_constant__ Normalization normalization, const __grid_constant__ Lookup by_entry,
                        const T* x, const T* y, int64_t n, bool aligned, int bits, uint32_t* packed) {
  const int levels = 1 << bits;
  const float per_unit = steps_per_unit(bits);
  for (Place<T> place(n, aligned); place.exists(); place.advance()) {
    Fragment<T> inputs, results;
    load_tile<Cache::normal>(inputs, x, place);
    load_tile<Cache::normal>(results, y, place);
    RunEntries<T> channels(by_channel, place), statistics(by_entry, place);
    Octet planes[Tile<T>::kGroups];
#pragma unroll
    for (int g = 0; g < Tile<T>::kGroups; ++g) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = static_cast<float>(value<T>(inputs.group(g), i));
      Octet codes = {0, 0};
#pragma unroll
      for (int run = 0; run < 8; run += kRun<T>) {
        if (normalization.exists()) {
          statistics.next([&](const auto& entries, int from) {
            constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
            float means[kCount] = {}, rstds[kCount];
            if (normalization.mean) entries.read(means, normalization.mean);
            entries.read(rstds, normalization.rstd);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
              float& value = values[run + from + i];
              value = (value - means[i]) * rstds[i];
            }
          });
        }
        channels.next([&](const auto& entries, int from) {
          constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
          float starts[kCount], firsts[kCount], signs[kCount];
          entries.read(starts, grid.start);
          entries.read(firsts, grid.first);
          entries.read(signs, grid.sign);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int j = run + from + i;
            const bool is_positive = !(value<T>(results.group(g), j) <= 0);
            const Encoder encoder(starts[i], firsts[i], signs[i], per_unit, levels);
            const uint32_t code = static_cast<uint32_t>(encoder.code(values[j], is_positive, levels));
            (j < 4 ? codes.low : codes.high) += code << (j % 4 * 8);
          }
        });
      }
      planes[g] = transposed({codes.low - 0x01010101u, codes.high - 0x01010101u});
    }
    store_planes<T>(planes, packed, bits, place);
  }
}

template <class T, bool Activated>
__global__ void __launch_bounds__(kThreads, kResident)
    decode_fixed_kernel(const __grid_constant__ Rows grid, const __grid_constant__ Lookup by_channel,
                        const __grid_constant__ Scale scale, const __grid_constant__ Lookup by_entry,
                        const uint32_t* packed, int64_t n, bool aligned, int bits, float slope, T* out) {
  const float step = fixed_step(bits);
  for (Place<T> place(n, aligned); place.exists(); place.advance()) {
    Octet octets[Tile<T>::kGroups];
    load_planes<T>(octets, packed, bits, place);
    RunEntries<T> channels(by_channel, place), scales(by_entry, place);
    Fragment<T> fragment;
#pragma unroll
    for (int g = 0; g < Tile<T>::kGroups; ++g) {
      const Octet codes = transposed(octets[g]);
      float values[8];
#pragma unroll
      for (int run = 0; run < 8; run += kRun<T>) {
        channels.next([&](const auto& entries, int from) {
          constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
          float starts[kCount], firsts[kCount], lows[kCount], highs[kCount], factors[kCount], shifts[kCount];
          entries.read(starts, grid.start);
          entries.read(firsts, grid.first);
          entries.read(lows, grid.low);
          entries.read(highs, grid.high);
          entries.read(factors, Activated ? grid.scale : grid.sign);
          if (Activated) entries.read(shifts, grid.shift);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int j = run + from + i;
            const float middle = middle_of_cell(codes, j);
            const bool is_positive = middle >= firsts[i];
            const float x = value_of_cell(middle, is_positive, starts[i], lows[i], highs[i], step);
            values[j] = Activated ? fixed_activated(is_positive, x, factors[i], shifts[i], slope) : factors[i] * x;
          }
        });
        if (Activated || !scale.values) continue;
        scales.next([&](const auto& entries, int from) {
          constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
          float by[kCount];
          entries.read(by, scale.values);
#pragma unroll
          for (int i = 0; i < kCount; ++i) values[run + from + i] *= by[i];
        });
      }
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        set_pair<T>(fragment.group(g), i, static_cast<Wide<T>>(values[i]), static_cast<Wide<T>>(values[i + 1]));
      }
    }
    store_tile<Cache::normal>(fragment, out, place);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident)
    mask_fixed_kernel(const __grid_constant__ Rows grid, const __grid_constant__ Lookup by_channel, const uint32_t* packed,
                      int64_t n, bool aligned, int bits, Wide<T> slope, const T* grad, T* out) {
  for (Place<T> place(n, aligned); place.exists(); place.advance()) {
    Fragment<T> fragment;
    load_tile<Cache::streaming>(fragment, grad, place);
    Octet octets[Tile<T>::kGroups];
    load_planes<T>(octets, packed, bits, place);
    RunEntries<T> channels(by_channel, place);
#pragma unroll
    for (int g = 0; g < Tile<T>::kGroups; ++g) {
      const Octet codes = transposed(octets[g]);
      uint32_t* words = fragment.group(g);
#pragma unroll
      for (int run = 0; run < 8; run += kRun<T>) {
        channels.next([&](const auto& entries, int from) {
          constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
          float firsts[kCount];
          entries.read(firsts, grid.first);
          const auto masked = [&](int i) {
            const int j = run + from + i;
            return fixed_masked(middle_of_cell(codes, j) >= firsts[i], value<T>(words, j), slope);
          };
#pragma unroll
          for (int i = 0; i < kCount; i += 2) set_pair<T>(words, run + from + i, masked(i), masked(i + 1));
        });
      }
    }
    store_tile<Cache::normal>(fragment, out, place);
  }
}

// The lookup of a grid's columns.
template <class T>
Lookup lookup_of_columns(const Grid& grid) {
  return lookup_of<T>(grid.index, {grid.start(), grid.first()});
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
    const T *from = static_cast<const T*>(x), *result = static_cast<const T*>(y);
    launch(encode_fixed_kernel<T>, device, stream, tile_count<T>(n), kWaves, Rows(grid), lookup_of_columns<T>(grid),
           normalization, lookup_of<T>(normalization.index, {normalization.mean, normalization.rstd}), from, result, n,
           is_aligned(from) && is_aligned(result), bits, reinterpret_cast<uint32_t*>(packed));
  });
}

void decode_fixed(const Grid& grid, const Scale& scale, const int32_t* packed, int64_t n, int bits, bool activated,
                  float slope, void* out, int dtype, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* to = static_cast<T*>(out);
    launch(activated ? decode_fixed_kernel<T, true> : decode_fixed_kernel<T, false>, device, stream, tile_count<T>(n), kWaves,
           Rows(grid), lookup_of_columns<T>(grid), scale, lookup_of<T>(scale.index, {scale.values}),
           reinterpret_cast<const uint32_t*>(packed), n, is_aligned(to), bits, slope, to);
  });
}

void mask_fixed(const Grid& grid, const int32_t* packed, int64_t n, int bits, double slope, const void* grad,
                void* out, int dtype, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(grad);
    T* to = static_cast<T*>(out);
    launch(mask_fixed_kernel<T>, device, stream, tile_count<T>(n), kWaves, Rows(grid), lookup_of_columns<T>(grid),
           reinterpret_cast<const uint32_t*>(packed), n, is_aligned(from) && is_aligned(to), bits,
           static_cast<Wide<T>>(slope), from, to);
  });
}

}  // namespace fewbit::cuda
