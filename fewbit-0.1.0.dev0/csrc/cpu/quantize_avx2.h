// The group quantizer's inner loops with AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../common/quantize.h"
#include "simd_avx2.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

typedef uint64_t Lanes __attribute__((vector_size(32)));

inline Lanes product(Lanes a, Lanes b) {
  return reinterpret_cast<Lanes>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

// Extends `least` and `greatest` by n elements that are not NaN, n > 0 a multiple of kBlock. Returns false if an element is
// not finite.
inline bool extremes(const float* x, int n, float& least, float& greatest) {
  const __m256 zero = _mm256_setzero_ps();
  __m256 low0 = _mm256_set1_ps(least), low1 = low0, high0 = _mm256_set1_ps(greatest), high1 = high0;
  __m256 clean0 = zero, clean1 = zero;
  for (int i = 0; i < n; i += 16) {
    const __m256 x0 = _mm256_loadu_ps(x + i), x1 = _mm256_loadu_ps(x + i + 8);
    // These instructions return the second operand if one is NaN.
    low0 = _mm256_min_ps(x0, low0);
    low1 = _mm256_min_ps(x1, low1);
    high0 = _mm256_max_ps(x0, high0);
    high1 = _mm256_max_ps(x1, high1);
    // The sum is 0, or NaN once an element was not finite.
    clean0 = _mm256_fmadd_ps(x0, zero, clean0);
    clean1 = _mm256_fmadd_ps(x1, zero, clean1);
  }
  float lows[8], highs[8];
  _mm256_storeu_ps(lows, _mm256_min_ps(low0, low1));
  _mm256_storeu_ps(highs, _mm256_max_ps(high0, high1));
  for (int lane = 0; lane < 8; ++lane) {
    least = lows[lane] < least ? lows[lane] : least;
    greatest = highs[lane] > greatest ? highs[lane] : greatest;
  }
  return _mm256_movemask_ps(_mm256_cmp_ps(clean0, clean1, _CMP_UNORD_Q)) == 0;
}

// Computes the words of `blocks` blocks of a group. The first block is at a multiple of kDrawBlock. draws: of draw_words.
template <int BITS>
inline void quantize_blocks(const float* x, int blocks, const GroupLimits& limits, const uint32_t* draws,
                            uint32_t* words) {
  const __m256 minimum = _mm256_set1_ps(limits.minimum), scale = _mm256_set1_ps(limits.scale);
  const __m256 most = _mm256_set1_ps(most_of(BITS));
  const __m256i lower = _mm256_set1_epi32(0xFFFF);
  // Within each half, packing takes 4 bytes of each vector in turn.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int block = 0; block < blocks; ++block, x += kBlock, words += BITS) {
    __m256i codes[4];
    for (int v = 0; v < 4; ++v) {
      const auto* address = reinterpret_cast<const __m256i*>(draws + block / 2 * kDrawCounters + 8 * v);
      const __m256i both = _mm256_loadu_si256(address);
      const __m256i draw = block % 2 ? _mm256_srli_epi32(both, 16) : _mm256_and_si256(both, lower);
      const __m256 steps = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + 8 * v), minimum), scale);
      const __m256i fixed = _mm256_cvtps_epi32(_mm256_min_ps(steps, most));
      codes[v] = _mm256_srli_epi32(_mm256_add_epi32(fixed, draw), 16);
    }
    const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]),
                                               _mm256_packus_epi32(codes[2], codes[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(packed, order);
    for (int plane = 0; plane < BITS; ++plane) {
      words[plane] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - plane)));
    }
  }
}

// Dequantizes `blocks` blocks of a group.
template <int BITS>
inline void restore_blocks(const uint32_t* words, int blocks, const GroupLimits& limits, float* out) {
  const __m256 minimum = _mm256_set1_ps(limits.minimum), range = _mm256_set1_ps(limits.range);
  const __m256 unit = _mm256_set1_ps(unit_of(BITS));
  for (int block = 0; block < blocks; ++block, words += BITS) {
    const __m256i codes = codes_of<BITS>(words);
    const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
    for (int v = 0; v < 4; ++v, out += 8) {
      const __m256i lanes = _mm256_cvtepu8_epi32(v % 2 ? _mm_srli_si128(halves[v / 2], 8) : halves[v / 2]);
      const __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(lanes), unit);
      _mm256_storeu_ps(out, _mm256_add_ps(minimum, _mm256_mul_ps(range, part)));
    }
  }
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
