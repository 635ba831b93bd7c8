// The fused forward, with the choice of the kernels that a table needs.

#include "cuda/forward.h"

#include "cuda/dispatch.h"

namespace fewbit::cuda {

void forward(int function, double p0, double p1, const Table& table, const void* x, int dtype, int64_t n, void* y,
             int32_t* packed, const int64_t* seed, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  const ForwardArguments arguments{function, p0, p1, x, n, y, packed, device, stream};
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      throw std::runtime_error("expected float32, float16 or bfloat16 for a fused forward, got float64");
    } else {
      Thresholds thresholds;
      if (table.unbiased() || !make_thresholds<T>(table, thresholds)) {
        // Searches and draws are bound by arithmetic, so a second read of x costs little and saves compiling 60 kernels. Codes
        // come first, because y may be x.
        encode(table, x, dtype, n, packed, seed, device, stream);
        thresholds.bits = 0;
      }
      launch_forward<T>(arguments, thresholds);
    }
  });
}

}  // namespace fewbit::cuda
