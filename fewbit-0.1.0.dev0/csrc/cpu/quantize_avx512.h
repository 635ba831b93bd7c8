// The group quantizer's inner loops with AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../common/quantize.h"
#include "simd_avx512.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

typedef uint64_t Lanes __attribute__((vector_size(64)));

inline Lanes product(Lanes a, Lanes b) {
  return reinterpret_cast<Lanes>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

// Extends `least` and `greatest` by n elements that are not NaN, n > 0 a multiple of kBlock. Returns false if an element is
// not finite.
inline bool extremes(const float* x, int n, float& least, float& greatest) {
  const __m512 zero = _mm512_setzero_ps();
  __m512 low0 = _mm512_set1_ps(least), low1 = low0, high0 = _mm512_set1_ps(greatest), high1 = high0;
  __m512 clean0 = zero, clean1 = zero;
#pragma GCC unroll 4
  for (int i = 0; i < n; i += kBlock) {
    const __m512 x0 = _mm512_loadu_ps(x + i), x1 = _mm512_loadu_ps(x + i + 16);
    // These instructions return the second operand if one is NaN.
    low0 = _mm512_min_ps(x0, low0);
    low1 = _mm512_min_ps(x1, low1);
    high0 = _mm512_max_ps(x0, high0);
    high1 = _mm512_max_ps(x1, high1);
    // The sum is 0, or NaN once an element was not finite.
    clean0 = _mm512_fmadd_ps(x0, zero, clean0);
    clean1 = _mm512_fmadd_ps(x1, zero, clean1);
  }
  least = _mm512_reduce_min_ps(_mm512_min_ps(low0, low1));
  greatest = _mm512_reduce_max_ps(_mm512_max_ps(high0, high1));
  return _mm512_cmp_ps_mask(clean0, clean1, _CMP_UNORD_Q) == 0;
}

// Computes the words of `blocks` blocks of a group. The first block is at a multiple of kDrawBlock. draws: of draw_words.
template <int BITS>
inline void quantize_blocks(const float* x, int blocks, const GroupLimits& limits, const uint32_t* draws,
                            uint32_t* words) {
  const __m512 minimum = _mm512_set1_ps(limits.minimum), scale = _mm512_set1_ps(limits.scale);
  const __m512 most = _mm512_set1_ps(most_of(BITS));
  // The indices of the upper halves of 32 sums, in the order of the sums.
  const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const auto fixed = [&](const float* lane) {
    const __m512 steps = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(lane), minimum), scale);
    return _mm512_cvtps_epi32(_mm512_min_ps(steps, most));
  };
  const auto put = [&](const float* lane, __m512i draw0, __m512i draw1, uint32_t* word) {
    const __m512i sum0 = _mm512_add_epi32(fixed(lane), draw0), sum1 = _mm512_add_epi32(fixed(lane + 16), draw1);
    const __m512i codes = _mm512_permutex2var_epi16(sum0, upper, sum1);
    for (int plane = 0; plane < BITS; ++plane) {
      word[plane] = _cvtmask32_u32(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(1 << plane)));
    }
  };
  const __m512i lower = _mm512_set1_epi32(0xFFFF);
  // A word of draws serves two blocks.
  for (int block = 0; block < blocks; block += 2, x += 2 * kBlock, words += 2 * BITS, draws += kDrawCounters) {
    const __m512i draw0 = _mm512_loadu_si512(draws), draw1 = _mm512_loadu_si512(draws + 16);
    put(x, _mm512_and_si512(draw0, lower), _mm512_and_si512(draw1, lower), words);
    if (block + 1 == blocks) break;
    put(x + kBlock, _mm512_srli_epi32(draw0, 16), _mm512_srli_epi32(draw1, 16), words + BITS);
  }
}

// Dequantizes `blocks` blocks of a group.
template <int BITS>
inline void restore_blocks(const uint32_t* words, int blocks, const GroupLimits& limits, float* out) {
  const __m512 minimum = _mm512_set1_ps(limits.minimum), range = _mm512_set1_ps(limits.range);
  const __m512 unit = _mm512_set1_ps(unit_of(BITS));
  const auto values = [&](__m512i codes) {
    const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), unit);
    return _mm512_add_ps(minimum, _mm512_mul_ps(range, part));
  };
  // The values of up to 16 codes fit in one register.
  const __m512 table = values(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  for (int block = 0; block < blocks; ++block, words += BITS, out += kBlock) {
    const __m256i codes = codes_of<BITS>(words);
    const __m512i low = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes));
    const __m512i high = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1));
    if constexpr (BITS <= 4) {
      _mm512_storeu_ps(out, _mm512_permutexvar_ps(low, table));
      _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(high, table));
    } else {
      _mm512_storeu_ps(out, values(low));
      _mm512_storeu_ps(out + 16, values(high));
    }
  }
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
