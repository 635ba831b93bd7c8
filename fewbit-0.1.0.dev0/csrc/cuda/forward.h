// y = f(x) and the codes of x in one pass, for one element type. One .cu file for each type includes this file, so that they
// compile in parallel.
//
// The bounds of the speed: GELU with 3 bits is 44 instructions an element for float32 and 33 for bfloat16, counted in sm_90
// code (15 are f with its conversions; 23 and 12 the codes; the rest is moving and indexing). 132 multiprocessors
// that start 4 x 32 instructions a clock at 1.98 GHz do 7.6e11 and 1.03e12 elements a second, which is 6.4 and
// 4.5 TB/s of 8.375 and 4.375 bytes an element: memory (4.8 TB/s) bounds float32, both bound bfloat16.

#pragma once

#include "common/functions.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/thresholds.h"
#include "cuda/tile.h"

namespace fewbit::cuda {

template <class F, class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ F f, const __grid_constant__ Thresholds thresholds, const T* x, int64_t n,
                   bool aligned, T* y, uint32_t* packed) {
  for (Place<T> place(n, aligned); place.exists(); place.advance()) {
    // x may be y: a lane has read all its elements before it writes them.
    Fragment<T> in, out;
    load_tile<Cache::streaming>(in, x, place);
#pragma unroll
    for (int g = 0; g < Tile<T>::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        set_pair<T>(out.group(g), i, f(value<T>(in.group(g), i)), f(value<T>(in.group(g), i + 1)));
      }
    }
    store_tile<Cache::normal>(out, y, place);
    if (thresholds.bits == 0) continue;
    Octet planes[Tile<T>::kGroups];
    encode_linear(in, thresholds, planes);
    store_planes<T>(planes, packed, thresholds.bits, place);
  }
}

struct ForwardArguments {
  int function;
  double p0, p1;
  const void* x;
  int64_t n;
  void* y;
  int32_t* packed;
  int device;
  void* stream;
};

// Computes y and the codes, or y alone if thresholds.bits is 0. x and y are arrays of T.
template <class T>
void launch_forward(const ForwardArguments& arguments, const Thresholds& thresholds) {
  const T* x = static_cast<const T*>(arguments.x);
  T* y = static_cast<T*>(arguments.y);
  const auto run = [&](auto f) {
    launch(forward_kernel<decltype(f), T>, arguments.device, arguments.stream, tile_count<T>(arguments.n), kWaves, f,
           thresholds, x, arguments.n, is_aligned(x) && is_aligned(y), y,
           reinterpret_cast<uint32_t*>(arguments.packed));
  };
  int number = 0;
#define FEWBIT_RUN(F) \
  if (arguments.function == number++) return run(F(arguments.p0, arguments.p1));
  FEWBIT_FUNCTIONS(FEWBIT_RUN)
#undef FEWBIT_RUN
  throw std::runtime_error("expected a function number from 0 to " + std::to_string(number - 1) + ", got " +
                           std::to_string(arguments.function));
}

extern template void launch_forward<float>(const ForwardArguments&, const Thresholds&);
extern template void launch_forward<Float16>(const ForwardArguments&, const Thresholds&);
extern template void launch_forward<Bfloat16>(const ForwardArguments&, const Thresholds&);

}  // namespace fewbit::cuda
