// The CPU kernels: the same functions, compiled once for each instruction set.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/dtype.h"
#include "../common/fixed_point.h"
#include "../common/quantize.h"
#include "../common/streams.h"
#include "../common/table.h"

namespace fewbit {

// The number of elements that a kernel handles at a time. Threads divide the work at multiples of it.
constexpr int kChunk = 512;

// The kinds of copies that the group quantizer makes.
enum class CopyKind { uniform, rotated, masked };

// The group quantizer (docs/concepts/quantizer.md), for copies of one kind. Each function works on the groups [begin, end) of all
// streams. order: the samples by stream; null if they are in order already. Pointers are aligned to one element. `ranges` does
// not have the rows of the seed.
struct QuantizerKernels {
  // Quantizes. Words may share blocks with those of other calls (word_writer.h).
  void (*quantize)(const Streams& streams, const int64_t* order, const void* x, DType dtype,
                   const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
                   uint16_t* ranges);
  // Computes out[g], to which the variance of group g is proportional, from the ranges and means that are stored: length * range^2
  // of a uniform copy, the sum of the squares of the elements minus their mean of the other kinds. NaN if these are stored as NaN.
  void (*squares)(const Streams& streams, const void* x, DType dtype, const Normalization& normalization,
                  int64_t begin, int64_t end, float* out);
  // Dequantizes. seed: a uniform copy needs none. value_map: not affine if there is an order and groups run across
  // samples. past_caches: `out` is too large to stay in the caches until it is read.
  void (*dequantize)(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                     uint64_t seed, const ValueMap& value_map, int64_t begin, int64_t end, void* out, DType dtype,
                     bool past_caches);
};

// Estimates the numbers of channels (channels.h) from some of a tensor's rows. It works on the blocks [begin, end) of kChannelBlock
// channels. normalization: without channels. out: (channels, 2), means and scales.
typedef void ChannelStatistics(const void* x, DType dtype, const Normalization& normalization, int64_t rows, int64_t channels,
                               int64_t begin, int64_t end, uint16_t* out);

// The fixed-point code of pre-activations. Each function works on the elements [begin, end), as in `Kernels`.
struct FixedPointKernels {
  // Encodes x~ with the sign of y. y: of x's dtype.
  void (*encode)(const Grid& grid, const Normalization& normalization, const void* x, const void* y, DType dtype,
                 int bits, int64_t begin, int64_t end, uint32_t* packed);
  // Decodes. With `activated` it returns y, times slope unless positive, else x~, times scale unless null.
  void (*decode)(const Grid& grid, const Scale& scale, const uint32_t* packed, int bits, int64_t begin, int64_t end,
                 bool activated, float slope, void* out, DType dtype);
  // Multiplies grad by slope unless y is positive. out may be grad.
  void (*mask)(const Grid& grid, const uint32_t* packed, int bits, int64_t begin, int64_t end, double slope,
               const void* grad, void* out, DType dtype);
};

// The kernels of an instruction set. Each function works on the elements [begin, end) of tensors that start at the pointers.
// begin is a multiple of kChunk, and so is end unless the tensor ends there. Pointers are aligned to one element.
struct Kernels {
  const char* isa;
  void (*pack)(const uint8_t* codes, int64_t begin, int64_t end, int bits, uint32_t* packed);
  void (*unpack)(const uint32_t* packed, int64_t begin, int64_t end, int bits, uint8_t* codes);
  void (*encode)(const Table& table, const void* x, DType dtype, int64_t begin, int64_t end, uint32_t* packed,
                 uint64_t seed);
  // grad_is_scalar: grad has one element, which is used for all.
  void (*decode_mul)(const Table& table, const void* grad, DType dtype, int64_t begin, int64_t end,
                     const uint32_t* packed, void* out, bool grad_is_scalar);
  // There is none for float64. y may be x.
  void (*forward)(int function, double p0, double p1, const Table& table, const void* x, DType dtype,
                  int64_t begin, int64_t end, void* y, uint32_t* packed, uint64_t seed);
  const QuantizerKernels* uniform;
  const QuantizerKernels* rotated;
  const QuantizerKernels* masked;
  const FixedPointKernels* fixed_point;
  ChannelStatistics* channel_statistics;

  const QuantizerKernels& quantizer(CopyKind kind) const {
    switch (kind) {
      case CopyKind::uniform:
        return *uniform;
      case CopyKind::rotated:
        return *rotated;
      default:
        return *masked;
    }
  }
};

// Returns the instruction sets of this build that this processor has, best first.
std::vector<std::string> cpu_isas();

// Returns the kernels of one of these instruction sets; null for any other name.
const Kernels* kernels_of(const std::string& isa);

// Returns the functions with a fused kernel, in the order of their numbers.
struct FunctionInfo {
  const char* name;
  int n_parameters;
};
const std::vector<FunctionInfo>& fused_functions();

// Returns how many of `threads` threads are worth using for n elements.
int threads_for(int64_t n, int threads);

// Returns the range of elements, as the kernels want it, of share number `index` of `count`.
struct Range {
  int64_t begin, end;
};
Range share_of(int64_t n, int index, int count);

}  // namespace fewbit
