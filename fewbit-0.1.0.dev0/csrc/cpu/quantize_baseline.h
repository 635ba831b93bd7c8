// The group quantizer's inner loops on any processor: the compiler vectorizes them.
#pragma once

#include <cstdint>

#include "../common/quantize.h"
#include "simd_baseline.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

typedef uint64_t Lanes __attribute__((vector_size(16)));

inline Lanes product(Lanes a, Lanes b) {
#ifdef __SSE2__
  return reinterpret_cast<Lanes>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  constexpr uint64_t lower = 0xFFFFFFFFu;
  return Lanes{(a[0] & lower) * (b[0] & lower), (a[1] & lower) * (b[1] & lower)};
#endif
}

// Extends `least` and `greatest` by n elements that are not NaN, n > 0 a multiple of kBlock. Returns false if an element is
// not finite.
inline bool extremes(const float* x, int n, float& least, float& greatest) {
  constexpr int lanes = 8;
  float low[lanes], high[lanes];
  uint32_t largest[lanes];
  for (int lane = 0; lane < lanes; ++lane) low[lane] = least, high[lane] = greatest, largest[lane] = 0;
  for (int i = 0; i < n; i += lanes) {
    for (int lane = 0; lane < lanes; ++lane) {
      const float value = x[i + lane];
      low[lane] = value < low[lane] ? value : low[lane];
      high[lane] = value > high[lane] ? value : high[lane];
      // Bit 31 is set once an exponent is that of infinities.
      largest[lane] |= (bits_of(value) & 0x7F800000u) + 0x00800000u;
    }
  }
  uint32_t all = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    least = low[lane] < least ? low[lane] : least;
    greatest = high[lane] > greatest ? high[lane] : greatest;
    all |= largest[lane];
  }
  return all >> 31 == 0;
}

// Computes the words of `blocks` blocks of a group. The first block is at a multiple of kDrawBlock. draws: of draw_words.
template <int BITS>
inline void quantize_blocks(const float* x, int blocks, const GroupLimits& limits, const uint32_t* draws,
                            uint32_t* words) {
  const GroupLimits local = limits;
  const float most = most_of(BITS);
  uint8_t codes[kBlock];
  for (int block = 0; block < blocks; ++block, x += kBlock, words += BITS) {
    const uint32_t* draw = draws + block / 2 * kDrawCounters;
    const int shift = block % 2 * 16;
    for (int i = 0; i < kBlock; ++i) {
      codes[i] = static_cast<uint8_t>(code_of(x[i], local, most, draw[i] >> shift & 0xFFFFu));
    }
    pack_block<BITS>(codes, words);
  }
}

// Dequantizes `blocks` blocks of a group.
template <int BITS>
inline void restore_blocks(const uint32_t* words, int blocks, const GroupLimits& limits, float* out) {
  const float minimum = limits.minimum, range = limits.range, unit = unit_of(BITS);
  for (int block = 0; block < blocks; ++block, words += BITS, out += kBlock) {
    uint8_t codes[kBlock];
    unpack_block<BITS>(words, codes);
    for (int i = 0; i < kBlock; ++i) out[i] = restored(codes[i], minimum, range, unit);
  }
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
