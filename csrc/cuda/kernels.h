// The interface of the CUDA kernels: plain C++ that needs no CUDA header.
//
// Pointers are device pointers. A call launches on `stream` (a cudaStream_t) of `device` and returns without waiting for it.
// It leaves the calling thread's current device as it is. Sizes are 64-bit. With n = 0 nothing is launched. dtypes are
// numbered as in common/dtype.h. Errors are std::runtime_error with CUDA's own text. Tables are passed by value as kernel
// parameters, so nothing is cached on a device and a launch can be captured.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/channels.h"
#include "common/fixed_point.h"
#include "common/planes.h"
#include "common/quantize.h"
#include "common/streams.h"
#include "common/table.h"

namespace fewbit::cuda {

// Returns the number of devices that CUDA finds when this is first called; 0 without a driver.
int device_count() noexcept;

// Returns the CUDA version that the kernels were built with, 1000 * major + 10 * minor.
int runtime_version();

// Returns the compute capabilities that the kernels were built for, 10 * major + minor, ascending. The newest is also built as
// PTX, which later devices can run.
std::vector<int> architectures();

// Returns true if kernels can run on `device` (-1: on any device), else false and the reason. It never throws and leaves no
// CUDA error behind.
std::pair<bool, std::string> available(int device = -1) noexcept;

// Pack codes (n,) to (bits * ceil(n / 32),), and unpack them.
void pack(const uint8_t* codes, int64_t n, int bits, int32_t* packed, int device, void* stream);
void unpack(const int32_t* packed, int64_t n, int bits, uint8_t* codes, int device, void* stream);

// Encodes x (n,) to packed codes. `seed`: one int64 in device memory, for unbiased tables; else null.
void encode(const Table& table, const void* x, int dtype, int64_t n, int32_t* packed, const int64_t* seed,
            int device, void* stream);

// Computes out (n,) = lut[code] * grad, in grad's dtype. `grad_is_scalar`: grad has one element, which is used for all. `out`
// may be `grad`.
void decode_mul(const Table& table, const void* grad, int dtype, int64_t n, const int32_t* packed, void* out,
                bool grad_is_scalar, int device, void* stream);

// Draws `count` seeds from a counter, and advances it (common/seeds.h). Both are device memory.
void draw_seeds(int64_t* counter, int64_t count, int64_t* out, int device, void* stream);

// Computes y (n,) = f(x) and the packed codes of x. y may be x. `function` is the position in FEWBIT_FUNCTIONS, p0 and p1 are
// its parameters. x is float32, float16 or bfloat16.
void forward(int function, double p0, double p1, const Table& table, const void* x, int dtype, int64_t n,
             void* y, int32_t* packed, const int64_t* seed, int device, void* stream);

// The shape of a quantized tensor (docs/concepts/quantizer.md): samples of `features` features, all of `bits`, or each with a width of
// its own. The widths are then in device memory: order, the samples by ascending width, and counts, the number of samples of
// each width from 0 to 8. Both are null if there is one width. words and groups are the available int32 words of packed codes
// and rows of ranges. For several widths there may be more than needed. The device checks that they suffice, since the host
// would have to wait; if not, the kernel stops with an error (__trap).
struct Quantized {
  int64_t samples, features;
  int group_size;
  int bits;
  const int64_t* order;
  const int64_t* counts;
  int64_t words, groups;
};

// A seed: the address of a number in device memory, which a captured launch reads anew in each replay, or the number itself.
struct Seed {
  const int64_t* address;  // null: the seed is `number`
  int64_t number;          // 0 if there is an address
};

// Quantizes x to packed codes and ranges. Words and groups beyond those needed become zeros. x is float32, float16 or bfloat16, as
// are all tensors of the group quantizer.
void quantize(const Quantized& of, const void* x, int dtype, const Normalization& normalization, const Seed& seed,
              int32_t* packed, uint16_t* ranges, int device, void* stream);

// Estimates the numbers of the channels of a tensor of `rows` rows. normalization: without channels. out: (channels, 2).
void channel_statistics(const void* x, int dtype, const Normalization& normalization, int64_t rows, int64_t channels, uint16_t* out,
                        int device, void* stream);

// By how much each bit of a sample beyond the first lowers the variance of rounding, in units of that at 1 bit.
struct Gains {
  float of[kMaxBits - 1];
};

// Divides samples + extra bits among the samples, so that rounding adds the least variance: widths (samples,), each 1 to 8. One block does this; for many
// samples, sorting is faster.
// squares (samples,): the numbers to which the variances are proportional; those that are not finite count as 0.
void share_bits(const Gains& gains, const float* squares, int64_t samples, int64_t extra, uint8_t* widths, int device,
                void* stream);

// Computes order (samples,), the samples by ascending width, those of one width in their order, and counts (9,), the number of
// samples of each width from 0 to 8.
void order_samples(const uint8_t* widths, int64_t samples, int64_t* order, int64_t* counts, int device, void* stream);

// Computes length * range^2 of each group of x, whose samples are in order and in one stream, with the range that is stored.
// out: (streams.groups,).
void squares(const Streams& streams, const void* x, int dtype, const Normalization& normalization, float* out,
             int device, void* stream);

// Dequantizes to `out`. Values are rounded once, to their dtype. value_map: no mask, and not affine if samples of several
// widths share groups.
void dequantize(const Quantized& of, const int32_t* packed, const uint16_t* ranges, const ValueMap& value_map, void* out,
                int dtype, int device, void* stream);

// Do the same for rotated copies, and for masked ones. The ranges have kSeedRows more rows, which Quantized::groups does not
// count. squares_rotated computes the energy of each group minus its stored mean, times the share of elements that are not masked, and
// times the mean square of the scales of channels. Masked copies are dequantized as rotated ones, with a mask in value_map.
// channels: empty for masked copies, and if samples of several widths share groups.
void quantize_rotated(const Quantized& of, bool is_masked, const void* x, int dtype, const Normalization& normalization,
                      const StoredChannels& channels, const Seed& seed, int32_t* packed, uint16_t* ranges, int device, void* stream);
void squares_rotated(const Streams& streams, bool is_masked, const void* x, int dtype, const Normalization& normalization,
                     const StoredChannels& channels, float* out, int device, void* stream);
void dequantize_rotated(const Quantized& of, const int32_t* packed, const uint16_t* ranges, const ValueMap& value_map,
                        const StoredChannels& channels, void* out, int dtype, int device, void* stream);

// Computes y (n,) = relu(x), the mask (1 bit for each element, packed: 0 where y is 0) and the masked copy of y in one pass over
// memory. Returns false, and does nothing, unless x and y are aligned, the groups lie side by side and have 256 elements, and all
// samples have the same width, up to 4 bits. y may be x.
bool relu_quantized(const Quantized& of, const void* x, int dtype, const Seed& seed, void* y, int32_t* mask, int32_t* packed,
                    uint16_t* ranges, int device, void* stream);

// A batch norm whose input is in channels-last order: element e has channel e % channels. All pointers are to device memory, and all
// numbers are float32.
struct BatchNorm {
  int64_t channels;
  const float* rstd;                // (channels,) the reciprocal standard deviations
  const float* weight;              // (channels,) or null
  float *grad_weight, *grad_bias;   // (channels,) results
  float* memory;                    // batch_norm_floats(channels) numbers, which the kernels use
};

constexpr int64_t kMostBatchNormBlocks = 512;
int64_t batch_norm_floats(int64_t channels);

// Computes the gradients of a batch norm from the rotated copy of its normalized input, and from the gradient of its result. out: the
// gradient of the input, or null. The results are the same in each run. Returns false, and does nothing, unless all groups have 256
// elements and lie side by side, there are fewer than 2^24 of them, all samples have the same width, up to 4 bits, channels is a
// multiple of 8, channels / gcd(channels, 256) is at most 512, and packed, ranges, grad and out are aligned to 16 bytes.
bool batch_norm_backward(const Quantized& of, const BatchNorm& norm, const int32_t* packed, const uint16_t* ranges, const void* grad,
                         int dtype, void* out, int device, void* stream);

// Computes the grid (kGridRows, n) of gamma and beta (n,).
void grid_fixed(const float* gamma, const float* beta, int64_t n, int bits, float* grid, int device, void* stream);

// Encodes n pre-activations in fixed point (fewbit/runtime/ops/fixed_point.py), with the sign of y. y: of x's dtype. For fixed
// point, the columns of a grid and the entries of a vector are fewer than 2^30.
void encode_fixed(const Grid& grid, const Normalization& normalization, const void* x, const void* y, int dtype,
                  int64_t n, int bits, int32_t* packed, int device, void* stream);

// Decodes. With `activated` it returns y, times slope unless positive, else x~, times scale unless null.
void decode_fixed(const Grid& grid, const Scale& scale, const int32_t* packed, int64_t n, int bits, bool activated,
                  float slope, void* out, int dtype, int device, void* stream);

// Computes out (n,) = grad, times slope unless y is positive. `out` may be `grad`.
void mask_fixed(const Grid& grid, const int32_t* packed, int64_t n, int bits, double slope, const void* grad,
                void* out, int dtype, int device, void* stream);

}  // namespace fewbit::cuda
