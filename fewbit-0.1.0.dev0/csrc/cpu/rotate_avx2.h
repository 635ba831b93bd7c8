// The inner loops of rotated copies with AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd_avx2.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

typedef float Row __attribute__((vector_size(32)));
typedef int32_t Indices __attribute__((vector_size(32)));
constexpr int kLanesOfRow = 8;

// These instructions return the second operand if one is NaN.
FEWBIT_INLINE Row lower_of(Row x, Row low) { return _mm256_min_ps(x, low); }
FEWBIT_INLINE Row higher_of(Row x, Row high) { return _mm256_max_ps(x, high); }

// Adds lane i + 4 to lane i, then 2, then 1, and returns lane 0.
FEWBIT_INLINE float add_lanes(Row row) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(row), _mm256_extractf128_ps(row, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Does the stages of a transform within a row. A product with 1 or -1 is exact, so the fused operation rounds as an addition
// or subtraction.
FEWBIT_INLINE Row transform_lanes(Row row) {
  const Row by4 = {1, 1, 1, 1, -1, -1, -1, -1}, by2 = {1, 1, -1, -1, 1, 1, -1, -1}, by1 = {1, -1, 1, -1, 1, -1, 1, -1};
  row = _mm256_fmadd_ps(row, by4, _mm256_permute2f128_ps(row, row, 1));
  row = _mm256_fmadd_ps(row, by2, _mm256_permute_ps(row, 0x4E));
  return _mm256_fmadd_ps(row, by1, _mm256_permute_ps(row, 0xB1));
}

// The bits up to which comparisons with all breaks are faster than a search.
constexpr int kMostComparedBits = 3;

// Returns values[index] of each lane, with indices below 2^BITS. At least 8 values can be read. This takes less time than an
// instruction that gathers.
template <int BITS>
FEWBIT_INLINE Row look_up_lanes(const float* values, Indices index) {
  if constexpr (BITS <= 3) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), reinterpret_cast<__m256i>(index));
  } else {
    const Row low = look_up_lanes<BITS - 1>(values, index), high = look_up_lanes<BITS - 1>(values + (1 << (BITS - 1)), index);
    return _mm256_blendv_ps(low, high, reinterpret_cast<__m256>(index << (32 - BITS)));
  }
}

// Multiplies rows of a full group by a factor and by random signs.
class RowSigns {
 public:
  RowSigns(const uint64_t* signs, float factor) : plus_(_mm256_set1_ps(factor)), minus_(_mm256_set1_ps(-factor)) {
    memcpy(words_, signs, sizeof words_);
  }

  // place: the number of the row in its block.
  FEWBIT_INLINE Row times(Row row, int block, int place) const {
    // The bit of a lane becomes the lane's highest.
    const __m256i shifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i word = _mm256_set1_epi32(static_cast<int>(words_[block] >> kLanesOfRow * place));
    const __m256 set = _mm256_castsi256_ps(_mm256_sllv_epi32(word, shifts));
    return row * _mm256_blendv_ps(plus_, minus_, set);
  }

 private:
  __m256 plus_, minus_;
  uint32_t words_[kDrawBlock / kBlock];
};

// Returns a word of the highest bits of the lanes of four rows.
FEWBIT_INLINE uint32_t top_bits(const __m256i* rows) {
  // Packing with saturation keeps signs. Within each half it takes 4 bytes of each row in turn.
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(rows[0], rows[1]), _mm256_packs_epi32(rows[2], rows[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(packed, order)));
}

// Writes the words of a block from the signs of its rows and the indices.
template <int BITS>
FEWBIT_INLINE void put_planes(const Row* rows, const Indices* indices, uint32_t* words) {
  __m256i lanes[4];
#pragma GCC unroll 8
  for (int plane = 0; plane < BITS - 1; ++plane) {
    for (int i = 0; i < 4; ++i) lanes[i] = _mm256_slli_epi32(reinterpret_cast<__m256i>(indices[i]), 31 - plane);
    words[plane] = top_bits(lanes);
  }
  for (int i = 0; i < 4; ++i) lanes[i] = _mm256_castps_si256(rows[i]);
  words[BITS - 1] = top_bits(lanes);
}

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit

#include "rotate_in_memory.h"
