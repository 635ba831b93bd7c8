// The kernels of one instruction set. The file is compiled several times, each with its own FEWBIT_NAMESPACE and flags.
//
// It uses no standard library templates, because the linker would merge their copies of all instruction sets into one.

#include "kernels.h"

#include <cstring>

#include "../common/draw.h"
#include "../common/functions.h"
#include "../common/planes.h"

#if defined(FEWBIT_AVX512)
#include "simd_avx512.h"
#elif defined(FEWBIT_AVX2)
#include "simd_avx2.h"
#else
#include "simd_baseline.h"
#endif

#define FEWBIT_STRING_(x) #x
#define FEWBIT_STRING(x) FEWBIT_STRING_(x)

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

extern const Kernels kernels;
extern const QuantizerKernels uniform_kernels;       // quantize.cpp
extern const QuantizerKernels rotated_kernels;       // rotated.cpp
extern const QuantizerKernels masked_kernels;        // rotated.cpp
extern const FixedPointKernels fixed_point_kernels;  // fixed_point.cpp
ChannelStatistics channel_statistics;                // channels.cpp

namespace {

constexpr int kChunkBlocks = kChunk / kBlock;

// -- Chunks and their last, shorter one -----------------------------------------------------------------

inline int chunk_size(int64_t first, int64_t end) {
  return end - first < kChunk ? static_cast<int>(end - first) : kChunk;
}

// Returns kChunk elements of which m exist at `in`: `in` itself, or a copy with zeros in place of the others.
template <class T>
inline const T* whole(const T* in, int m, T* buffer) {
  if (m == kChunk) return in;
  memset(buffer, 0, kChunk * sizeof(T));
  memcpy(buffer, in, m * sizeof(T));
  return buffer;
}

inline const uint32_t* whole_words(const uint32_t* in, int m, int bits, uint32_t* buffer) {
  if (m == kChunk) return in;
  memset(buffer, 0, kChunkBlocks * kMaxBits * sizeof(uint32_t));
  memcpy(buffer, in, packed_words(m, bits) * sizeof(uint32_t));
  return buffer;
}

// Copies the words of m elements from those of a chunk; bits beyond m are zero.
inline void store_words(uint32_t* buffer, int m, int bits, uint32_t* out) {
  const int64_t last = block_count(m) - 1;
  for (int plane = 0; plane < bits; ++plane) buffer[word_index(last, plane, bits)] &= valid_lanes(last, m);
  memcpy(out, buffer, packed_words(m, bits) * sizeof(uint32_t));
}

// The destination of results. If there are too many to be found in the caches later, they are written past the caches, which
// also saves reading the memory before it is written.
class Results {
 public:
  Results(const void* out, int64_t bytes)
      : past_caches_(bytes >= kPastCaches && reinterpret_cast<uintptr_t>(out) % kLine == 0) {}
  ~Results() {
    if (past_caches_) finish_streaming();
  }

  // Calls compute(T*), which writes a whole chunk to `out`, or to the buffer, from which it is written past the caches.
  template <class T, class Compute>
  void put(T* out, T* buffer, const Compute& compute) const {
    if (past_caches_) {
      compute(buffer);
      stream(buffer, out, kChunk * sizeof(T));
    } else {
      compute(out);
    }
  }

 private:
  static constexpr int64_t kPastCaches = int64_t{24} << 20;  // bytes of one thread
  static constexpr uintptr_t kLine = 64;
  bool past_caches_;
};

// -- 16-bit floats ----------------------------------------------------------------------------------------

struct Float16 {
  static void widen(const uint16_t* in, float* out) { FEWBIT_NAMESPACE::widen(in, out); }
  static void narrow(const float* in, uint16_t* out) { FEWBIT_NAMESPACE::narrow(in, out); }
};

struct BFloat16 {
  static void widen(const uint16_t* in, float* out) {
    for (int i = 0; i < kChunk; ++i) out[i] = widen_bfloat16(in[i]);
  }
  static void narrow(const float* in, uint16_t* out) {
    for (int i = 0; i < kChunk; ++i) out[i] = narrow_bfloat16(in[i]);
  }
};

// -- bits as a constant -----------------------------------------------------------------------------------

template <int BITS>
void pack_chunk(const uint8_t* codes, uint32_t* words) {
  for (int block = 0; block < kChunkBlocks; ++block) pack_block<BITS>(codes + block * kBlock, words + block * BITS);
}

template <int BITS>
void unpack_chunk(const uint32_t* words, uint8_t* codes) {
  for (int block = 0; block < kChunkBlocks; ++block) unpack_block<BITS>(words + block * BITS, codes + block * kBlock);
}

template <int BITS>
void look_up_chunk(const uint32_t* words, const float* lut, float* levels) {
  look_up<BITS>(words, lut, levels);
}

struct OfBits {
  void (*pack)(const uint8_t* codes, uint32_t* words);
  void (*unpack)(const uint32_t* words, uint8_t* codes);
  void (*look_up)(const uint32_t* words, const float* lut, float* levels);
};

template <int BITS>
constexpr OfBits of_bits = {pack_chunk<BITS>, unpack_chunk<BITS>, look_up_chunk<BITS>};

constexpr OfBits kOfBits[] = {of_bits<1>, of_bits<2>, of_bits<3>, of_bits<4>,
                              of_bits<5>, of_bits<6>, of_bits<7>, of_bits<8>};

inline const OfBits& with(int bits) { return kOfBits[bits - 1]; }

// -- Codes of a chunk -------------------------------------------------------------------------------------

template <class T>
void search(const Table& table, const Breaks<T>& breaks, const T* x, uint32_t* words) {
  int32_t place[kChunk];
  uint8_t codes[kChunk];
  for (int i = 0; i < kChunk; ++i) place[i] = 0;
  for (int32_t half = 1 << breaks.steps >> 1; half > 0; half >>= 1) {
    for (int i = 0; i < kChunk; ++i) place[i] = beyond(breaks.padded, place[i], half, x[i]);
  }
  for (int i = 0; i < kChunk; ++i) codes[i] = breaks.codes[place[i]];
  with(table.bits).pack(codes, words);
}

// Does draw() of draw.h for a chunk, part by part.
void draw_chunk(const Table& table, const float* x, uint64_t seed, uint64_t first, uint32_t* words) {
  const Knots& knots = table.knots;
  int32_t place[kChunk];
  float mean[kChunk], uniform[kChunk];
  for (int i = 0; i < kChunk; ++i) place[i] = 0;
  for (int32_t half = 1 << knots.point_steps >> 1; half > 0; half >>= 1) {
    for (int i = 0; i < kChunk; ++i) place[i] = beyond(knots.padded_points, place[i], half, x[i]);
  }
  for (int i = 0; i < kChunk; ++i) mean[i] = draw_mean(knots, place[i], x[i]);
  for (int i = 0; i < kChunk; ++i) place[i] = 0;
  for (int32_t half = 1 << knots.level_steps >> 1; half > 0; half >>= 1) {
    for (int i = 0; i < kChunk; ++i) place[i] = at_or_beyond(knots.padded_levels, place[i], half, mean[i]);
  }
  for (int i = 0; i < kChunk; ++i) uniform[i] = philox_uniform(seed, first + i);
  for (int i = 0; i < kChunk; ++i) place[i] = draw_code(knots, place[i], mean[i], uniform[i]);
  uint8_t codes[kChunk];
  for (int i = 0; i < kChunk; ++i) codes[i] = static_cast<uint8_t>(place[i]);
  with(table.bits).pack(codes, words);
}

template <class T>
inline void locate(const Table& table, const Breaks<T>& breaks, const T* x, uint32_t* words) {
  if (breaks.plane_begin[table.bits] <= kMostComparisons<T>) {
    thermometer(table, breaks, x, words);
  } else if (!search_in_registers(table, x, words)) {
    search(table, breaks, x, words);
  }
}

inline void codes_of_chunk(const Table& table, const float* x, uint64_t seed, int64_t first, uint32_t* words) {
  if (table.knots.count > 0) {
    draw_chunk(table, x, seed, static_cast<uint64_t>(first), words);
  } else {
    locate(table, table.breaks32, x, words);
  }
}

inline void codes_of_chunk(const Table& table, const double* x, uint64_t seed, int64_t first, uint32_t* words) {
  if (table.knots.count > 0) {
    float rounded[kChunk];
    for (int i = 0; i < kChunk; ++i) rounded[i] = static_cast<float>(x[i]);
    draw_chunk(table, rounded, seed, static_cast<uint64_t>(first), words);
  } else {
    locate(table, table.breaks64, x, words);
  }
}

// Writes the codes of m elements from number `first` on.
template <class T>
inline void put_codes(const Table& table, const T* x, int m, uint64_t seed, int64_t first, uint32_t* packed) {
  uint32_t* out = packed + word_index(block_of(first), 0, table.bits);
  if (m == kChunk) {
    codes_of_chunk(table, x, seed, first, out);
  } else {
    uint32_t words[kChunkBlocks * kMaxBits];
    codes_of_chunk(table, x, seed, first, words);
    store_words(words, m, table.bits, out);
  }
}

// -- encode -----------------------------------------------------------------------------------------------

template <class T>
void encode_wide(const Table& table, const T* x, int64_t begin, int64_t end, uint32_t* packed, uint64_t seed) {
  T buffer[kChunk];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    put_codes(table, whole(x + i, m, buffer), m, seed, i, packed);
  }
}

template <class Half>
void encode_half(const Table& table, const uint16_t* x, int64_t begin, int64_t end, uint32_t* packed,
                 uint64_t seed) {
  uint16_t buffer[kChunk];
  float wide[kChunk];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    Half::widen(whole(x + i, m, buffer), wide);
    put_codes(table, wide, m, seed, i, packed);
  }
}

void encode(const Table& table, const void* x, DType dtype, int64_t begin, int64_t end, uint32_t* packed,
            uint64_t seed) {
  switch (dtype) {
    case DType::float32:
      return encode_wide(table, static_cast<const float*>(x), begin, end, packed, seed);
    case DType::float64:
      return encode_wide(table, static_cast<const double*>(x), begin, end, packed, seed);
    case DType::float16:
      return encode_half<Float16>(table, static_cast<const uint16_t*>(x), begin, end, packed, seed);
    case DType::bfloat16:
      return encode_half<BFloat16>(table, static_cast<const uint16_t*>(x), begin, end, packed, seed);
  }
}

// -- decode_mul -------------------------------------------------------------------------------------------

// A copy of the table's lut, multiplied by the gradient if the gradient is one number. At least 16 entries can be read.
struct LocalLut {
  float values[1 << kMaxBits];

  LocalLut(const Table& table, float factor) {
    const int size = 1 << table.bits;
    memset(values, 0, 16 * sizeof(float));
    for (int i = 0; i < size; ++i) values[i] = table.lut32[i] * factor;
  }
};

// Returns the words of the chunk that begins with element `first`.
inline const uint32_t* words_at(const uint32_t* packed, int64_t first, int m, int bits, uint32_t* buffer) {
  return whole_words(packed + word_index(block_of(first), 0, bits), m, bits, buffer);
}

void decode_float32(const Table& table, const float* grad, int64_t begin, int64_t end, const uint32_t* packed,
                    float* out, bool grad_is_scalar) {
  const LocalLut lut(table, grad_is_scalar ? *grad : 1.0f);
  const auto look_up = with(table.bits).look_up;
  uint32_t words[kChunkBlocks * kMaxBits];
  alignas(64) float levels[kChunk];
  const Results results(out + begin, (end - begin) * sizeof(float));
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    look_up(words_at(packed, i, m, table.bits, words), lut.values, levels);
    if (grad_is_scalar) {
      memcpy(out + i, levels, m * sizeof(float));
    } else if (m == kChunk) {
      results.put(out + i, levels, [&](float* product) {
#pragma GCC ivdep
        for (int k = 0; k < kChunk; ++k) product[k] = levels[k] * grad[i + k];
      });
    } else {
      for (int k = 0; k < m; ++k) out[i + k] = levels[k] * grad[i + k];
    }
  }
}

template <class Half>
void decode_half(const Table& table, const uint16_t* grad, int64_t begin, int64_t end, const uint32_t* packed,
                 uint16_t* out, bool grad_is_scalar) {
  alignas(64) uint16_t buffer[kChunk] = {};
  float levels[kChunk], wide[kChunk];
  const Results results(out + begin, (end - begin) * sizeof(uint16_t));
  if (grad_is_scalar) buffer[0] = *grad;
  Half::widen(buffer, wide);
  const LocalLut lut(table, grad_is_scalar ? wide[0] : 1.0f);
  const auto look_up = with(table.bits).look_up;
  uint32_t words[kChunkBlocks * kMaxBits];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    look_up(words_at(packed, i, m, table.bits, words), lut.values, levels);
    if (!grad_is_scalar) {
      Half::widen(whole(grad + i, m, buffer), wide);
      for (int k = 0; k < kChunk; ++k) levels[k] *= wide[k];
    }
    if (m == kChunk) {
      results.put(out + i, buffer, [&](uint16_t* product) { Half::narrow(levels, product); });
    } else {
      Half::narrow(levels, buffer);
      memcpy(out + i, buffer, m * sizeof(uint16_t));
    }
  }
}

void decode_float64(const Table& table, const double* grad, int64_t begin, int64_t end, const uint32_t* packed,
                    double* out, bool grad_is_scalar) {
  const auto unpack = with(table.bits).unpack;
  uint32_t words[kChunkBlocks * kMaxBits];
  uint8_t codes[kChunk];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    unpack(words_at(packed, i, m, table.bits, words), codes);
    if (grad_is_scalar) {
      for (int k = 0; k < m; ++k) out[i + k] = table.lut64[codes[k]] * *grad;
    } else {
      for (int k = 0; k < m; ++k) out[i + k] = table.lut64[codes[k]] * grad[i + k];
    }
  }
}

void decode_mul(const Table& table, const void* grad, DType dtype, int64_t begin, int64_t end,
                const uint32_t* packed, void* out, bool grad_is_scalar) {
  if (begin == end) return;  // without elements there may be no gradient to read
  switch (dtype) {
    case DType::float32:
      return decode_float32(table, static_cast<const float*>(grad), begin, end, packed, static_cast<float*>(out),
                            grad_is_scalar);
    case DType::float64:
      return decode_float64(table, static_cast<const double*>(grad), begin, end, packed,
                            static_cast<double*>(out), grad_is_scalar);
    case DType::float16:
      return decode_half<Float16>(table, static_cast<const uint16_t*>(grad), begin, end, packed,
                                  static_cast<uint16_t*>(out), grad_is_scalar);
    case DType::bfloat16:
      return decode_half<BFloat16>(table, static_cast<const uint16_t*>(grad), begin, end, packed,
                                   static_cast<uint16_t*>(out), grad_is_scalar);
  }
}

// -- forward ----------------------------------------------------------------------------------------------

// Computes f of a chunk. x and y must not overlap, so that the compiler may run several iterations at once. Each one is a long
// chain of dependent operations, so this pays (the .flags files ask for it).
template <class Function>
void apply(double p0, double p1, const float* __restrict__ x, float* __restrict__ y) {
  const Function f(p0, p1);
  for (int i = 0; i < kChunk; ++i) y[i] = f(x[i]);
}

using Apply = void (*)(double p0, double p1, const float* x, float* y);

#define FEWBIT_APPLY(Function) apply<Function>,
constexpr Apply kApply[] = {FEWBIT_FUNCTIONS(FEWBIT_APPLY)};
#undef FEWBIT_APPLY

void forward_float32(Apply f, double p0, double p1, const Table& table, const float* x, int64_t begin,
                     int64_t end, float* y, uint32_t* packed, uint64_t seed) {
  float buffer[kChunk], last[kChunk];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    const float* in = whole(x + i, m, buffer);
    put_codes(table, in, m, seed, i, packed);
    if (m < kChunk) {
      f(p0, p1, in, last);
      memcpy(y + i, last, m * sizeof(float));
    } else if (in == y + i) {
      memcpy(buffer, in, sizeof buffer);
      f(p0, p1, buffer, y + i);
    } else {
      f(p0, p1, in, y + i);
    }
  }
}

template <class Half>
void forward_half(Apply f, double p0, double p1, const Table& table, const uint16_t* x, int64_t begin,
                  int64_t end, uint16_t* y, uint32_t* packed, uint64_t seed) {
  uint16_t buffer[kChunk];
  float wide[kChunk], result[kChunk];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    Half::widen(whole(x + i, m, buffer), wide);
    put_codes(table, wide, m, seed, i, packed);
    f(p0, p1, wide, result);
    if (m == kChunk) {
      Half::narrow(result, y + i);
    } else {
      Half::narrow(result, buffer);
      memcpy(y + i, buffer, m * sizeof(uint16_t));
    }
  }
}

void forward(int function, double p0, double p1, const Table& table, const void* x, DType dtype, int64_t begin,
             int64_t end, void* y, uint32_t* packed, uint64_t seed) {
  const Apply f = kApply[function];
  switch (dtype) {
    case DType::float32:
      return forward_float32(f, p0, p1, table, static_cast<const float*>(x), begin, end, static_cast<float*>(y),
                             packed, seed);
    case DType::float64:
      return;
    case DType::float16:
      return forward_half<Float16>(f, p0, p1, table, static_cast<const uint16_t*>(x), begin, end,
                                   static_cast<uint16_t*>(y), packed, seed);
    case DType::bfloat16:
      return forward_half<BFloat16>(f, p0, p1, table, static_cast<const uint16_t*>(x), begin, end,
                                    static_cast<uint16_t*>(y), packed, seed);
  }
}

// -- pack and unpack --------------------------------------------------------------------------------------

void pack(const uint8_t* codes, int64_t begin, int64_t end, int bits, uint32_t* packed) {
  uint8_t buffer[kChunk];
  uint32_t words[kChunkBlocks * kMaxBits];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    uint32_t* out = packed + word_index(block_of(i), 0, bits);
    with(bits).pack(whole(codes + i, m, buffer), m == kChunk ? out : words);
    if (m < kChunk) store_words(words, m, bits, out);
  }
}

void unpack(const uint32_t* packed, int64_t begin, int64_t end, int bits, uint8_t* codes) {
  uint8_t buffer[kChunk];
  uint32_t words[kChunkBlocks * kMaxBits];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int m = chunk_size(i, end);
    with(bits).unpack(words_at(packed, i, m, bits, words), m == kChunk ? codes + i : buffer);
    if (m < kChunk) memcpy(codes + i, buffer, m);
  }
}

}  // namespace

const Kernels kernels = {FEWBIT_STRING(FEWBIT_NAMESPACE),
                         pack,
                         unpack,
                         encode,
                         decode_mul,
                         forward,
                         &uniform_kernels,
                         &rotated_kernels,
                         &masked_kernels,
                         &fixed_point_kernels,
                         channel_statistics};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
