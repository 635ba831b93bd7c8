// The inner loops of rotated copies with AVX-512. The 256 numbers of a group are in 16 registers from the first to the last
// step.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../common/rotate.h"
#include "rotate_one_by_one.h"
#include "rotate_tables.h"
#include "signs.h"
#include "simd_avx512.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

constexpr int kLanesOfRow = 16;
constexpr int kRowsAtATime = 16;
constexpr int kRows = kFullGroup / kLanesOfRow;
constexpr int kBlocksOfGroup = kFullGroup / kBlock;

// The sum, the smallest and the largest number of a group.
struct GroupSum {
  float sum, least, greatest;
};

// Adds number i + COUNT / 2 to number i, then COUNT / 4 ..., and returns the first number.
template <int COUNT>
FEWBIT_INLINE __m512 add_rows(__m512* rows) {
  if constexpr (COUNT > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; ++i) rows[i] = _mm512_add_ps(rows[i], rows[i + COUNT / 2]);
    return add_rows<COUNT / 2>(rows);
  }
  return rows[0];
}

// Does the same with the lanes of a row.
FEWBIT_INLINE float add_lanes(__m512 row) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(row), _mm512_extractf32x8_ps(row, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Returns the sum and the extremes of kFullGroup numbers. Extremes are those of the numbers that are not NaN.
inline GroupSum sum_of_group(const float* x) {
  __m512 rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = _mm512_loadu_ps(x + kLanesOfRow * i);
  // These instructions return the second operand if one is NaN.
  __m512 low0 = _mm512_set1_ps(__builtin_inff()), low1 = low0;
  __m512 high0 = _mm512_set1_ps(-__builtin_inff()), high1 = high0;
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i += 2) {
    low0 = _mm512_min_ps(rows[i], low0);
    low1 = _mm512_min_ps(rows[i + 1], low1);
    high0 = _mm512_max_ps(rows[i], high0);
    high1 = _mm512_max_ps(rows[i + 1], high1);
  }
  const float least = _mm512_reduce_min_ps(_mm512_min_ps(low0, low1));
  const float greatest = _mm512_reduce_max_ps(_mm512_max_ps(high0, high1));
  return {add_lanes(add_rows<kRows>(rows)), least, greatest};
}

// Returns the sum of the squares of kFullGroup numbers x - shift.
inline float energy_of_group(const float* x, float shift) {
  const __m512 subtracted = _mm512_set1_ps(shift);
  __m512 rows[kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    const __m512 v = _mm512_sub_ps(_mm512_loadu_ps(x + kLanesOfRow * i), subtracted);
    rows[i] = _mm512_mul_ps(v, v);
  }
  return add_lanes(add_rows<kRows>(rows));
}

// -- Transforms ------------------------------------------------------------------------------------------------

// Does the stages with distances of whole rows.
template <int COUNT>
FEWBIT_INLINE void transform_rows(__m512* rows) {
  if constexpr (COUNT > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; ++i) {
      const __m512 a = rows[i], b = rows[i + COUNT / 2];
      rows[i] = _mm512_add_ps(a, b);
      rows[i + COUNT / 2] = _mm512_sub_ps(a, b);
    }
    transform_rows<COUNT / 2>(rows);
    transform_rows<COUNT / 2>(rows + COUNT / 2);
  }
}

// Does the stages within each of COUNT rows, a stage for all rows after the other: the rows are independent, so no operation has
// to wait for the one before. A product with 1 or -1 is exact, so the fused operation rounds as an addition or subtraction.
template <int COUNT>
FEWBIT_INLINE void transform_lanes(__m512* rows) {
  const __m512 by8 = _mm512_set_ps(-1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512 by4 = _mm512_set_ps(-1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1);
  const __m512 by2 = _mm512_set_ps(-1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1);
  const __m512 by1 = _mm512_set_ps(-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1);
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i) rows[i] = _mm512_fmadd_ps(rows[i], by8, _mm512_shuffle_f32x4(rows[i], rows[i], 0x4E));
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i) rows[i] = _mm512_fmadd_ps(rows[i], by4, _mm512_shuffle_f32x4(rows[i], rows[i], 0xB1));
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i) rows[i] = _mm512_fmadd_ps(rows[i], by2, _mm512_permute_ps(rows[i], 0x4E));
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i) rows[i] = _mm512_fmadd_ps(rows[i], by1, _mm512_permute_ps(rows[i], 0xB1));
}

template <int COUNT>
inline void transform_in_place(float* y) {
  __m512 rows[COUNT];
  for (int i = 0; i < COUNT; ++i) rows[i] = _mm512_loadu_ps(y + kLanesOfRow * i);
  transform_rows<COUNT>(rows);
  transform_lanes<COUNT>(rows);
  for (int i = 0; i < COUNT; ++i) _mm512_storeu_ps(y + kLanesOfRow * i, rows[i]);
}

// Transforms `size` numbers, a power of two up to kFullGroup.
inline void transform(float* y, int size) {
  switch (size) {
    case 256:
      return transform_in_place<16>(y);
    case 128:
      return transform_in_place<8>(y);
    case 64:
      return transform_in_place<4>(y);
    case 32:
      return transform_in_place<2>(y);
    case 16:
      return transform_in_place<1>(y);
    default:
      return transform_one_by_one(y, size);
  }
}

// Returns 16 bits of words from bit 16 * row on. A test of broadcast bits takes half as many operations as moving them into a
// mask register from a general one.
FEWBIT_INLINE __mmask16 bits_of_row(uint32_t word, int row) {
  const __m512i lower = _mm512_set_epi32(1 << 15, 1 << 14, 1 << 13, 1 << 12, 1 << 11, 1 << 10, 1 << 9, 1 << 8, 1 << 7,
                                         1 << 6, 1 << 5, 1 << 4, 1 << 3, 1 << 2, 1 << 1, 1);
  const __m512i bits = row % 2 ? _mm512_slli_epi32(lower, 16) : lower;
  return _mm512_test_epi32_mask(_mm512_set1_epi32(static_cast<int>(word)), bits);
}

// Multiplies row number `row` of a full group by `plus`, or by `minus` if the number's sign is set.
FEWBIT_INLINE __m512 times_signed(__m512 v, __m512 plus, __m512 minus, const uint32_t* signs, int row) {
  return _mm512_mul_ps(v, _mm512_mask_blend_ps(bits_of_row(signs[row / 2], row), plus, minus));
}

// -- Codes -----------------------------------------------------------------------------------------------------

// Computes codes from rotated numbers, a row at a time.
template <int BITS>
class Coder {
 public:
  // rms: the root mean square of the group.
  explicit Coder(float rms) {
    for (int i = 0; i < kBreaks; ++i) breaks_[i] = _mm512_set1_ps(kNormalLevels.breaks[breaks_begin(BITS) + i] * rms);
    for (int i = 0; i < kLevels; ++i) levels_[i] = _mm512_set1_ps(kNormalLevels.levels[levels_begin(BITS) + i]);
  }

  // Writes the bit-planes of the codes, and returns the magnitudes times their levels.
  FEWBIT_INLINE __m512 code(__m512 y, __mmask16* planes) const {
    const __m512 magnitude = _mm512_abs_ps(y);
    __m512 level = levels_[0];
    __mmask16 beyond[kBreaks + 1];
#pragma GCC unroll 4
    for (int i = 0; i < kBreaks; ++i) {
      beyond[i] = _mm512_cmp_ps_mask(magnitude, breaks_[i], _CMP_GT_OQ);
      level = _mm512_mask_mov_ps(level, beyond[i], levels_[i + 1]);
    }
    if constexpr (BITS == 2) planes[0] = beyond[0];
    if constexpr (BITS == 3) {
      planes[0] = _kxor_mask16(_kxor_mask16(beyond[0], beyond[1]), beyond[2]);
      planes[1] = beyond[1];
    }
    planes[BITS - 1] = _mm512_movepi32_mask(_mm512_castps_si512(y));
    return _mm512_mul_ps(magnitude, level);
  }

 private:
  static_assert(BITS <= 3, "more bits have the class below");
  static constexpr int kLevels = 1 << (BITS - 1), kBreaks = kLevels - 1;
  __m512 breaks_[kBreaks + 1], levels_[kLevels];
};

// Does the same for more bits by a binary search.
template <int BITS>
class SearchCoder {
 public:
  explicit SearchCoder(float rms) {
    for (int i = 0; i < SearchBreaks<BITS>::kCount; ++i) breaks_[i] = kSearchBreaks<BITS>.values[i] * rms;
  }

  FEWBIT_INLINE __m512 code(__m512 y, __mmask16* planes) const {
    const __m512 magnitude = _mm512_abs_ps(y);
    const __m512i path = step<0>(magnitude, _mm512_setzero_si512());
    for (int plane = 0; plane < BITS - 1; ++plane) {
      planes[plane] = _mm512_test_epi32_mask(path, _mm512_set1_epi32(1 << plane));
    }
    planes[BITS - 1] = _mm512_movepi32_mask(_mm512_castps_si512(y));
    return _mm512_mul_ps(magnitude, Lut<BITS - 1>(kPositiveLevels<BITS>.values)[path]);
  }

 private:
  template <int STEP>
  FEWBIT_INLINE __m512i step(__m512 magnitude, __m512i path) const {
    if constexpr (STEP < BITS - 1) {
      const __m512 limit = Lut<STEP>(breaks_ + (1 << STEP))[path];
      const __mmask16 beyond = _mm512_cmp_ps_mask(magnitude, limit, _CMP_GT_OQ);
      const __m512i twice = _mm512_add_epi32(path, path);
      return step<STEP + 1>(magnitude, _mm512_mask_sub_epi32(twice, beyond, twice, _mm512_set1_epi32(-1)));
    }
    return path;
  }

  alignas(64) float breaks_[SearchBreaks<BITS>::kCount + 16] = {};  // 16 entries can be read from any step on
};

// Does the same for 4 bits by one comparison, with the only break that a number's bucket may contain.
template <>
class Coder<4> {
 public:
  explicit Coder(float rms) {
    // If the root mean square is 0, so are all numbers.
    inverse_ = _mm512_set1_ps(rms > 0.0f ? 1.0f / (kBuckets.kWidth * rms) : 0.0f);
    breaks_ = _mm512_mul_ps(_mm512_load_ps(kBuckets.breaks), _mm512_set1_ps(rms));
    below_ = _mm512_load_si512(kBuckets.below);
    levels_ = _mm512_loadu_ps(kPositiveLevels<4>.values);
  }

  FEWBIT_INLINE __m512 code(__m512 y, __mmask16* planes) const {
    const __m512 magnitude = _mm512_abs_ps(y);
    const __m512 last = _mm512_set1_ps(Buckets::kCount - 1);
    const __m512i bucket = _mm512_cvttps_epi32(_mm512_min_ps(_mm512_mul_ps(magnitude, inverse_), last));
    const __mmask16 beyond = _mm512_cmp_ps_mask(magnitude, _mm512_permutexvar_ps(bucket, breaks_), _CMP_GT_OQ);
    const __m512i below = _mm512_permutexvar_epi32(bucket, below_);
    const __m512i index = _mm512_mask_sub_epi32(below, beyond, below, _mm512_set1_epi32(-1));
    for (int plane = 0; plane < 3; ++plane) {
      planes[plane] = _mm512_test_epi32_mask(index, _mm512_set1_epi32(1 << plane));
    }
    planes[3] = _mm512_movepi32_mask(_mm512_castps_si512(y));
    return _mm512_mul_ps(magnitude, _mm512_permutexvar_ps(index, levels_));
  }

 private:
  __m512 inverse_, breaks_, levels_;
  __m512i below_;
};
template <>
class Coder<5> : public SearchCoder<5> {
  using SearchCoder::SearchCoder;
};
template <>
class Coder<6> : public SearchCoder<6> {
  using SearchCoder::SearchCoder;
};
template <>
class Coder<7> : public SearchCoder<7> {
  using SearchCoder::SearchCoder;
};
template <>
class Coder<8> : public SearchCoder<8> {
  using SearchCoder::SearchCoder;
};

// Writes the words of two rows, a block.
template <int BITS>
FEWBIT_INLINE void put_words(const __mmask16* low, const __mmask16* high, uint32_t* words) {
#pragma GCC unroll 8
  for (int plane = 0; plane < BITS; ++plane) {
    words[plane] = _cvtmask32_u32(_mm512_kunpackw(high[plane], low[plane]));
  }
}

// Computes the words of `blocks` blocks of rotated numbers, followed by zeros up to kFullGroup. Returns the sum of the
// magnitudes times their levels.
template <int BITS>
inline float code_blocks(const float* y, int blocks, float rms, uint32_t* words) {
  const Coder<BITS> coder(rms);
  __m512 products[kRows] = {};
  for (int block = 0; block < blocks; ++block, words += BITS) {
    __mmask16 low[BITS], high[BITS];
    products[2 * block] = coder.code(_mm512_loadu_ps(y + kBlock * block), low);
    products[2 * block + 1] = coder.code(_mm512_loadu_ps(y + kBlock * block + kLanesOfRow), high);
    put_words<BITS>(low, high, words);
  }
  return add_lanes(add_rows<kRows>(products));
}

// Rotates the numbers x - shift of a full group and computes their words. Returns the same sum.
template <int BITS>
inline float code_full_group(const float* x, float shift, const uint64_t* signs, float rms, uint32_t* words) {
  uint32_t signs_of_block[kBlocksOfGroup];
  memcpy(signs_of_block, signs, sizeof signs_of_block);
  const __m512 subtracted = _mm512_set1_ps(shift);
  const __m512 plus = _mm512_set1_ps(inverse_root(kFullGroup)), minus = _mm512_set1_ps(-inverse_root(kFullGroup));
  __m512 rows[kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    const __m512 v = _mm512_sub_ps(_mm512_loadu_ps(x + kLanesOfRow * i), subtracted);
    rows[i] = times_signed(v, plus, minus, signs_of_block, i);
  }
  transform_rows<kRows>(rows);
  if constexpr (BITS <= 4) {
    const Coder<BITS> coder(rms);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i += 2, words += BITS) {
      if (i % kRowsAtATime == 0) transform_lanes<kRowsAtATime>(rows + i);
      __mmask16 low[BITS], high[BITS];
      rows[i] = coder.code(rows[i], low);
      rows[i + 1] = coder.code(rows[i + 1], high);
      put_words<BITS>(low, high, words);
    }
    return add_lanes(add_rows<kRows>(rows));
  } else {
    alignas(64) float y[kFullGroup];
    transform_lanes<kRows>(rows);
    for (int i = 0; i < kRows; ++i) _mm512_store_ps(y + kLanesOfRow * i, rows[i]);
    return code_blocks<BITS>(y, kBlocksOfGroup, rms, words);
  }
}

// -- Values ----------------------------------------------------------------------------------------------------

// Writes the levels of the codes of `blocks` blocks, with their signs.
template <int BITS>
inline void levels_of_blocks(const uint32_t* words, int blocks, float* y) {
  look_up<BITS>(words, kCodeLevels<BITS>.values, y, blocks);
}

// Dequantizes a full group that was rotated once.
template <int BITS>
inline void restore_full_group(const uint32_t* words, const uint64_t* signs, float mean, float scale, float* out) {
  uint32_t signs_of_block[kBlocksOfGroup];
  memcpy(signs_of_block, signs, sizeof signs_of_block);
  __m512 rows[kRows];
  if constexpr (BITS == 2) {
    const __m512 inner = _mm512_set1_ps(kCodeLevels<2>.values[0]), outer = _mm512_set1_ps(kCodeLevels<2>.values[1]);
    const __m512 sign = _mm512_set1_ps(-0.0f);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const __mmask16 index = bits_of_row(words[i / 2 * 2], i), negative = bits_of_row(words[i / 2 * 2 + 1], i);
      const __m512 level = _mm512_mask_blend_ps(index, inner, outer);
      rows[i] = _mm512_mask_xor_ps(level, negative, level, sign);
    }
  } else {
    alignas(64) float levels[kFullGroup];
    levels_of_blocks<BITS>(words, kBlocksOfGroup, levels);
    for (int i = 0; i < kRows; ++i) rows[i] = _mm512_load_ps(levels + kLanesOfRow * i);
  }
  transform_rows<kRows>(rows);
  const float factor = scale * inverse_root(kFullGroup);
  const __m512 plus = _mm512_set1_ps(factor), minus = _mm512_set1_ps(-factor), added = _mm512_set1_ps(mean);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    if (i % kRowsAtATime == 0) transform_lanes<kRowsAtATime>(rows + i);
    const __m512 y = times_signed(rows[i], plus, minus, signs_of_block, i);
    _mm512_storeu_ps(out + kLanesOfRow * i, _mm512_add_ps(added, y));
  }
}

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
