// The interface of the CUDA kernels: plain C++ that needs no CUDA header.
//
// Pointers are device pointers. A call launches on `stream` (a cudaStream_t) of `device` and returns without
// waiting for it; the calling thread's current device is the same afterwards. Sizes are 64-bit, n = 0 does
// nothing, dtypes are numbered as in common/dtype.h. Errors are std::runtime_error with CUDA's own text.
// Tables travel by value as kernel parameters: nothing is cached on a device and a launch can be captured.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/fixed_point.h"
#include "common/quantize.h"
#include "common/streams.h"
#include "common/table.h"

namespace fewbit::cuda {

// The CUDA version that the kernels were built with, 1000 * major + 10 * minor.
int runtime_version();

// The compute capabilities that they were built for, 10 * major + minor, ascending. The newest is also there
// as PTX, which later devices can run.
std::vector<int> architectures();

// Returns whether kernels can run on `device` (-1: on any), and the reason if not. Never throws, leaves no CUDA error behind.
std::pair<bool, std::string> available(int device = -1) noexcept;

// codes (n,) -> packed (bits * ceil(n / 32),), and back.
void pack(const uint8_t* codes, int64_t n, int bits, int32_t* packed, int device, void* stream);
void unpack(const int32_t* packed, int64_t n, int bits, uint8_t* codes, int device, void* stream);

// x (n,) -> packed codes. `seed`: one int64 in device memory, for unbiased tables; else null.
void encode(const Table& table, const void* x, int dtype, int64_t n, int32_t* packed, const int64_t* seed,
            int device, void* stream);

// out (n,) = lut[code] * grad, in grad's dtype. `grad_is_scalar`: grad is one element, taken for all.
// `out` may be `grad`.
void decode_mul(const Table& table, const void* grad, int dtype, int64_t n, const int32_t* packed, void* out,
                bool grad_is_scalar, int device, void* stream);

// y (n,) = f(x) and the packed codes of x; y may be x. `function` is the position in FEWBIT_FUNCTIONS,
// p0 and p1 its parameters. float32, float16 and bfloat16.
void forward(int function, double p0, double p1, const Table& table, const void* x, int dtype, int64_t n,
             void* y, int32_t* packed, const int64_t* seed, int device, void* stream);

// The shape of a quantized tensor (docs/quantizer.md): samples of `features` features, all of `bits`, or each with a width of
// its own. The widths are then in device memory: order, the samples by ascending width, and counts, the number of samples of
// each width from 0 to 8. Both are null if there is one width. words and groups are the available int32 words of packed codes
// and rows of ranges. For several widths there may be more than needed. The device checks that they suffice, since the host
// would have to wait; if not, the kernel stops with an error (__trap).
struct Quantized {
  int64_t samples, features;
  int group_size;
  bool fp32_min;
  int bits;
  const int64_t* order;
  const int64_t* counts;
  int64_t words, groups;
};

// x -> packed codes and ranges; words and groups beyond those needed become zeros. `seed`: one int64 in device memory.
void quantize(const Quantized& of, const void* x, int dtype, const Normalization& normalization, const int64_t* seed,
              int32_t* packed, uint16_t* ranges, int device, void* stream);

// out: (streams.groups,), length * range^2 of each group of x, whose samples are in order, in one stream. NaN if an element
// is not finite.
void squares(const Streams& streams, const void* x, int dtype, const Normalization& normalization, float* out,
             int device, void* stream);

// out = the values, rounded once to their dtype. affine: null if samples of several widths share groups.
void dequantize(const Quantized& of, const int32_t* packed, const uint16_t* ranges, const Affine& affine, void* out,
                int dtype, int device, void* stream);

// gamma and beta (n,) -> grid (kGridRows, n).
void grid_fixed(const float* gamma, const float* beta, int64_t n, int bits, float* grid, int device, void* stream);

// The fixed-point code of n pre-activations (fewbit/runtime/ops/fixed_point.py). y: of x's dtype; its
// sign is encoded.
void encode_fixed(const Grid& grid, const Normalization& normalization, const void* x, const void* y, int dtype,
                  int64_t n, int bits, int32_t* packed, int device, void* stream);

// activated: restores y, times slope unless positive; otherwise the normalized input, times scale unless null.
void decode_fixed(const Grid& grid, const Scale& scale, const int32_t* packed, int64_t n, int bits, bool activated,
                  float slope, void* out, int dtype, int device, void* stream);

// out (n,) = grad, times slope unless y is positive. `out` may be `grad`.
void mask_fixed(const Grid& grid, const int32_t* packed, int64_t n, int bits, double slope, const void* grad,
                void* out, int dtype, int device, void* stream);

}  // namespace fewbit::cuda
