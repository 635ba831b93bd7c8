// The seeds of a compiled model's tensors, drawn from a counter in device memory, by one block.

#include "common/seeds.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace fewbit::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) draw_seeds_kernel(int64_t* counter, int64_t count, int64_t* out) {
  const auto start = static_cast<uint64_t>(*counter);
  __syncthreads();  // all threads have read the counter
  for (int64_t i = threadIdx.x; i < count; i += kThreads) out[i] = static_cast<int64_t>(drawn_seed(start, i));
  if (threadIdx.x == 0) *counter = static_cast<int64_t>(advanced(start, count));
}

}  // namespace

void draw_seeds(int64_t* counter, int64_t count, int64_t* out, int device, void* stream) {
  if (count <= 0) return;
  const DeviceScope scope(device);
  launch_blocks(draw_seeds_kernel, stream, 1, kThreads, counter, count, out);
}

}  // namespace fewbit::cuda
