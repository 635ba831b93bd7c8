// The terms of the variance of quantized groups: length * range^2, one warp for each group.

#include "common/quantize.h"
#include "cuda/dispatch.h"
#include "cuda/extremes.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace fewbit::cuda {
namespace {

template <class T, bool Normalized>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const __grid_constant__ Streams streams, const T* x,
                   const __grid_constant__ Normalization normalization, float* out) {
  const int lane = threadIdx.x % 32;
  const Stream& stream = streams.of[0];
  for (int64_t number = first_group_of_warp(); number < streams.groups; number += groups_apart()) {
    const Group group = group_at(streams, stream, number);
    const GroupPlace place(streams, stream, nullptr, group);
    float values[kPerLane] = {};
    const Extremes extremes = extremes_of<Normalized>(values, x, normalization, place, group.length, lane);
    const float range = limits_of(extremes.least, extremes.greatest, is_finite(extremes.least), 1).range;  // NaN if there is none
    if (lane == 0) out[number] = static_cast<float>(group.length) * (range * range);
  }
}

}  // namespace

void squares(const Streams& streams, const void* x, int dtype, const Normalization& normalization, float* out,
             int device, void* stream) {
  if (streams.groups <= 0) return;
  const DeviceScope scope(device);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = normalization.exists() ? squares_kernel<T, true> : squares_kernel<T, false>;
    launch(kernel, device, stream, streams.groups, kWaves, streams, static_cast<const T*>(x), normalization, out);
  });
}

}  // namespace fewbit::cuda
