// The gradient of the input of an activation, from packed codes and the gradient of its output.

#include "cuda/dispatch.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tile.h"

namespace fewbit::cuda {
namespace {

template <class W>
struct Levels {
  W of_code[256];
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    decode_mul_kernel(const __grid_constant__ Levels<Wide<T>> levels, int bits, const T* grad, bool grad_is_scalar,
                      int64_t n, bool aligned, const uint32_t* packed, T* out) {
  // With 5 bits or fewer each level is in another memory bank, so a warp reads 32 of them at once.
  __shared__ Wide<T> of_code[256];
  if (static_cast<int>(threadIdx.x) < 1 << bits) of_code[threadIdx.x] = levels.of_code[threadIdx.x];
  __syncthreads();

  for (Place<T> place(n, aligned); place.exists(); place.advance()) {
    Fragment<T> fragment;
    if (grad_is_scalar) {
      splat(fragment, grad);
    } else {
      load_tile<Cache::streaming>(fragment, grad, place);
    }
    Octet octets[Tile<T>::kGroups];
    load_planes<T>(octets, packed, bits, place);
#pragma unroll
    for (int g = 0; g < Tile<T>::kGroups; ++g) {
      const Octet codes = transposed(octets[g]);
      uint32_t* words = fragment.group(g);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const uint32_t pair = (i < 4 ? codes.low : codes.high) >> (i % 4 * 8);
        set_pair<T>(words, i, of_code[pair & 0xFFu] * value<T>(words, i),
                    of_code[pair >> 8 & 0xFFu] * value<T>(words, i + 1));
      }
    }
    store_tile<Cache::normal>(fragment, out, place);
  }
}

}  // namespace

void decode_mul(const Table& table, const void* grad, int dtype, int64_t n, const int32_t* packed, void* out,
                bool grad_is_scalar, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Levels<Wide<T>> levels = {};
    if constexpr (std::is_same_v<T, double>) {
      std::copy_n(table.lut64, 1 << table.bits, levels.of_code);
    } else {
      std::copy_n(table.lut32, 1 << table.bits, levels.of_code);
    }
    const T* from = static_cast<const T*>(grad);
    T* to = static_cast<T*>(out);
    const bool aligned = is_aligned(to) && (grad_is_scalar || is_aligned(from));
    launch(decode_mul_kernel<T>, device, stream, tile_count<T>(n), kWaves, levels, table.bits, from,
           grad_is_scalar, n, aligned, reinterpret_cast<const uint32_t*>(packed), to);
  });
}

}  // namespace fewbit::cuda
