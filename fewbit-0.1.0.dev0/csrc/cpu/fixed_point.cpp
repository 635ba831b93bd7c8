// The kernels of the fixed-point code for one instruction set. The file is compiled as kernels.cpp is: several times, without
// standard library templates. Codes are made and used a chunk at a time, in loops that vectorize.

#include "../common/fixed_point.h"

#include <cstring>

#include "../common/dtype.h"
#include "../common/planes.h"
#include "kernels.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

extern const Kernels kernels;  // kernels.cpp
extern const FixedPointKernels fixed_point_kernels;

namespace {

inline int chunk_size(int64_t first, int64_t end) {
  return end - first < kChunk ? static_cast<int>(end - first) : kChunk;
}

// -- Element types ---------------------------------------------------------------------------------------------

struct Float32 {
  typedef float Type;
  typedef float Wide;
  static Wide widen(float x) { return x; }
  static float narrow(Wide x) { return x; }
};

struct Float64 {
  typedef double Type;
  typedef double Wide;
  static Wide widen(double x) { return x; }
  static double narrow(Wide x) { return x; }
};

struct Float16 {
  typedef uint16_t Type;
  typedef float Wide;
  static Wide widen(uint16_t x) { return widen_float16(x); }
  static uint16_t narrow(Wide x) { return narrow_float16(x); }
};

struct BFloat16 {
  typedef uint16_t Type;
  typedef float Wide;
  static Wide widen(uint16_t x) { return widen_bfloat16(x); }
  static uint16_t narrow(Wide x) { return narrow_bfloat16(x); }
};

// Calls call(number type, pointer to its elements) for a dtype.
#define FEWBIT_WITH_NUMBER(dtype, CALL) \
  switch (dtype) {                      \
    case DType::float32:                \
      return CALL(Float32);             \
    case DType::float64:                \
      return CALL(Float64);             \
    case DType::float16:                \
      return CALL(Float16);             \
    case DType::bfloat16:               \
      return CALL(BFloat16);            \
  }

// -- Vectors over a tensor -------------------------------------------------------------------------------------

// Returns the entries for the elements of a chunk, one for each element. They are reused if the next chunk has the same.
class Along {
 public:
  Along(const float* vector, const VectorIndex& index) : vector_(vector), index_(index) {}

  const float* of(int64_t element, int m) {
    const int64_t number = element / index_.inner;
    int64_t entry = number % index_.count;
    int64_t left = neighbors() ? index_.count - entry : index_.inner - (element - number * index_.inner);
    if (left >= m && neighbors()) return vector_ + entry;
    if (entry == entry_ && (neighbors() || left >= m)) return values_;  // as in the previous chunk
    const bool repeats = left >= m || (neighbors() && kChunk % index_.count == 0);
    entry_ = repeats && m == kChunk ? entry : -1;
    for (int at = 0; at < m;) {
      const int length = left < m - at ? static_cast<int>(left) : m - at;
      if (neighbors()) {
        memcpy(values_ + at, vector_ + entry, length * sizeof(float));
        entry += length;
      } else {
        put(at, length, vector_[entry]);
        ++entry;
      }
      at += length;
      if (entry == index_.count) entry = 0;
      left = neighbors() ? index_.count : index_.inner;
    }
    return values_;
  }

 private:
  bool neighbors() const { return index_.inner == 1; }

  // It writes whole vectors; the next run overwrites the excess.
  void put(int at, int n, float value) {
    const Vector same = Vector{} + value;
    for (int i = 0; i < n; i += kVector) memcpy(values_ + at + i, &same, sizeof same);
  }

  static constexpr int kVector = 16;
  typedef float Vector __attribute__((vector_size(kVector * sizeof(float))));
  const float* vector_;
  const VectorIndex index_;
  int64_t entry_ = -1;  // of the first element in values_, if the next chunk may reuse them
  alignas(64) float values_[kChunk + kVector];
};

// -- encode ----------------------------------------------------------------------------------------------------

template <class Number>
void encode_as(const Grid& grid, const Normalization& normalization, const typename Number::Type* x,
               const typename Number::Type* y, int bits, int64_t begin, int64_t end, uint32_t* packed) {
  typedef typename Number::Type T;
  alignas(64) float values[kChunk];
  alignas(64) uint8_t positive[kChunk], codes[kChunk];
  Along starts(grid.start(), grid.index), firsts(grid.first(), grid.index), signs(grid.sign(), grid.index);
  Along means(normalization.mean, normalization.index), rstds(normalization.rstd, normalization.index);
  const float per_unit = steps_per_unit(bits);
  const int levels = 1 << bits;
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    const T *from = x + i, *result = y + i;
    for (int j = 0; j < m; ++j) values[j] = static_cast<float>(Number::widen(from[j]));
    for (int j = 0; j < m; ++j) positive[j] = !(Number::widen(result[j]) <= 0);
    if (normalization.exists()) {
      const float *mean = means.of(i, m), *rstd = rstds.of(i, m);
#pragma GCC ivdep
      for (int j = 0; j < m; ++j) values[j] = (values[j] - mean[j]) * rstd[j];
    }
    const float *start = starts.of(i, m), *first = firsts.of(i, m), *sign = signs.of(i, m);
#pragma GCC ivdep
    for (int j = 0; j < m; ++j) {
      codes[j] = static_cast<uint8_t>(
          fixed_code(values[j], positive[j], start[j], first[j], sign[j], per_unit, levels));
    }
    kernels.pack(codes, 0, m, bits, packed + word_index(block_of(i), 0, bits));
  }
}

void encode(const Grid& grid, const Normalization& normalization, const void* x, const void* y, DType dtype, int bits,
            int64_t begin, int64_t end, uint32_t* packed) {
#define FEWBIT_ENCODE(Number)                                                          \
  encode_as<Number>(grid, normalization, static_cast<const Number::Type*>(x),          \
                    static_cast<const Number::Type*>(y), bits, begin, end, packed)
  FEWBIT_WITH_NUMBER(dtype, FEWBIT_ENCODE)
}

// -- decode ----------------------------------------------------------------------------------------------------

template <class Number>
void decode_as(const Grid& grid, const Scale& scale, const uint32_t* packed, int bits, int64_t begin, int64_t end,
               bool activated, float slope, typename Number::Type* out) {
  alignas(64) float values[kChunk];
  alignas(64) uint8_t codes[kChunk];
  Along starts(grid.start(), grid.index), firsts(grid.first(), grid.index), lows(grid.low(), grid.index);
  Along highs(grid.high(), grid.index), signs(grid.sign(), grid.index), factors(grid.scale(), grid.index);
  Along shifts(grid.shift(), grid.index), scales(scale.values, scale.index);
  const float step = fixed_step(bits);
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    kernels.unpack(packed + word_index(block_of(i), 0, bits), 0, m, bits, codes);
    const float *start = starts.of(i, m), *first = firsts.of(i, m), *low = lows.of(i, m), *high = highs.of(i, m);
#pragma GCC ivdep
    for (int j = 0; j < m; ++j) values[j] = fixed_value(codes[j], start[j], first[j], low[j], high[j], step);
    if (activated) {
      const float *factor = factors.of(i, m), *shift = shifts.of(i, m);
#pragma GCC ivdep
      for (int j = 0; j < m; ++j) {
        values[j] = fixed_activated(static_cast<float>(codes[j]) >= first[j], values[j], factor[j], shift[j], slope);
      }
    } else {
      const float* sign = signs.of(i, m);
#pragma GCC ivdep
      for (int j = 0; j < m; ++j) values[j] = sign[j] * values[j];
      if (scale.values) {
        const float* by = scales.of(i, m);
#pragma GCC ivdep
        for (int j = 0; j < m; ++j) values[j] = values[j] * by[j];
      }
    }
    typename Number::Type* to = out + i;
    for (int j = 0; j < m; ++j) to[j] = Number::narrow(values[j]);
  }
}

void decode(const Grid& grid, const Scale& scale, const uint32_t* packed, int bits, int64_t begin, int64_t end,
            bool activated, float slope, void* out, DType dtype) {
#define FEWBIT_DECODE(Number) \
  decode_as<Number>(grid, scale, packed, bits, begin, end, activated, slope, static_cast<Number::Type*>(out))
  FEWBIT_WITH_NUMBER(dtype, FEWBIT_DECODE)
}

// -- mask ------------------------------------------------------------------------------------------------------

template <class Number>
void mask_as(const Grid& grid, const uint32_t* packed, int bits, int64_t begin, int64_t end, double slope,
             const typename Number::Type* grad, typename Number::Type* out) {
  typedef typename Number::Wide Wide;
  alignas(64) uint8_t codes[kChunk];
  Along firsts(grid.first(), grid.index);
  const Wide below = static_cast<Wide>(slope);
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    kernels.unpack(packed + word_index(block_of(i), 0, bits), 0, m, bits, codes);
    const float* first = firsts.of(i, m);
    const typename Number::Type* from = grad + i;
    typename Number::Type* to = out + i;
#pragma GCC ivdep
    for (int j = 0; j < m; ++j) {
      const bool is_positive = static_cast<float>(codes[j]) >= first[j];
      to[j] = Number::narrow(fixed_masked<Wide>(is_positive, Number::widen(from[j]), below));
    }
  }
}

void mask(const Grid& grid, const uint32_t* packed, int bits, int64_t begin, int64_t end, double slope,
          const void* grad, void* out, DType dtype) {
#define FEWBIT_MASK(Number)                                                                               \
  mask_as<Number>(grid, packed, bits, begin, end, slope, static_cast<const Number::Type*>(grad), \
                  static_cast<Number::Type*>(out))
  FEWBIT_WITH_NUMBER(dtype, FEWBIT_MASK)
}

}  // namespace

const FixedPointKernels fixed_point_kernels = {encode, decode, mask};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
