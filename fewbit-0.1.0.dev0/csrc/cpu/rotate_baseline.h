// The inner loops of rotated copies on any processor, with the compiler's vectors of 16 bytes (SSE2, NEON, ...).
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/dtype.h"
#include "../common/planes.h"
#include "../common/quantize.h"
#include "simd_baseline.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

typedef float Row __attribute__((vector_size(16)));
typedef int32_t Indices __attribute__((vector_size(16)));
constexpr int kLanesOfRow = 4;

// Both functions return the second operand if the first one is NaN.
FEWBIT_INLINE Row lower_of(Row x, Row low) {
#ifdef __SSE2__
  return _mm_min_ps(x, low);
#else
  const Indices is_lower = x < low;
  return reinterpret_cast<Row>((reinterpret_cast<Indices>(x) & is_lower) |
                               (reinterpret_cast<Indices>(low) & ~is_lower));
#endif
}
FEWBIT_INLINE Row higher_of(Row x, Row high) {
#ifdef __SSE2__
  return _mm_max_ps(x, high);
#else
  const Indices is_higher = x > high;
  return reinterpret_cast<Row>((reinterpret_cast<Indices>(x) & is_higher) |
                               (reinterpret_cast<Indices>(high) & ~is_higher));
#endif
}

// Adds lane i + 2 to lane i, then 1, and returns lane 0.
FEWBIT_INLINE float add_lanes(Row row) { return (row[0] + row[2]) + (row[1] + row[3]); }

// Does the stages of a transform within a row. a - b is computed as a + (-b), which is the same.
FEWBIT_INLINE Row transform_lanes(Row row) {
  constexpr int32_t sign = INT32_MIN;
  const Indices by2 = {0, 0, sign, sign}, by1 = {0, sign, 0, sign};
#if defined(__clang__) || __GNUC__ >= 12
  Row other = __builtin_shufflevector(row, row, 2, 3, 0, 1);
#else
  Row other = __builtin_shuffle(row, Indices{2, 3, 0, 1});
#endif
  row = other + reinterpret_cast<Row>(reinterpret_cast<Indices>(row) ^ by2);
#if defined(__clang__) || __GNUC__ >= 12
  other = __builtin_shufflevector(row, row, 1, 0, 3, 2);
#else
  other = __builtin_shuffle(row, Indices{1, 0, 3, 2});
#endif
  return other + reinterpret_cast<Row>(reinterpret_cast<Indices>(row) ^ by1);
}

// The bits up to which comparisons with all breaks are faster than a search.
constexpr int kMostComparedBits = 6;

template <int BITS>
FEWBIT_INLINE Row look_up_lanes(const float* values, Indices index) {
  return Row{values[index[0]], values[index[1]], values[index[2]], values[index[3]]};
}

// Multiplies rows of a full group by a factor and by random signs.
class RowSigns {
 public:
  RowSigns(const uint64_t* signs, float factor) : factor_(factor) {
    for (int block = 0; block < kDrawBlock / kBlock; ++block) {
      const uint32_t word = static_cast<uint32_t>(signs[block / 2] >> block % 2 * kBlock);
      for (int lane = 0; lane < kLanesOfRow; ++lane) shifted_[block][lane] = static_cast<int32_t>(word >> lane);
    }
  }

  // place: the number of the row in its block.
  FEWBIT_INLINE Row times(Row row, int block, int place) const {
    // The bit of a lane becomes the lane's highest.
    const Indices sign = (shifted_[block] << (31 - kLanesOfRow * place)) & INT32_MIN;
    return reinterpret_cast<Row>(reinterpret_cast<Indices>(row * factor_) ^ sign);
  }

 private:
  float factor_;
  Indices shifted_[kDrawBlock / kBlock];  // the words of the signs, shifted right by the number of the lane
};

#ifdef __SSE2__
// Returns a word of the highest bits of the lanes of eight rows.
FEWBIT_INLINE uint32_t top_bits(const __m128i* rows) {
  uint32_t word = 0;
  for (int half = 0; half < 2; ++half, rows += 4) {
    // Packing with saturation keeps signs.
    const __m128i packed = _mm_packs_epi16(_mm_packs_epi32(rows[0], rows[1]), _mm_packs_epi32(rows[2], rows[3]));
    word |= static_cast<uint32_t>(_mm_movemask_epi8(packed)) << 16 * half;
  }
  return word;
}
#endif

// Writes the words of a block from the signs of its rows and the indices.
template <int BITS>
FEWBIT_INLINE void put_planes(const Row* rows, const Indices* indices, uint32_t* words) {
#ifdef __SSE2__
  __m128i lanes[8];
#pragma GCC unroll 8
  for (int plane = 0; plane < BITS - 1; ++plane) {
    for (int i = 0; i < 8; ++i) lanes[i] = _mm_slli_epi32(reinterpret_cast<__m128i>(indices[i]), 31 - plane);
    words[plane] = top_bits(lanes);
  }
  for (int i = 0; i < 8; ++i) lanes[i] = _mm_castps_si128(rows[i]);
  words[BITS - 1] = top_bits(lanes);
#else
  uint8_t codes[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t sign = bits_of(rows[i / kLanesOfRow][i % kLanesOfRow]) >> 31;
    codes[i] = static_cast<uint8_t>(static_cast<uint32_t>(indices[i / kLanesOfRow][i % kLanesOfRow]) |
                                    sign << (BITS - 1));
  }
  pack_block<BITS>(codes, words);
#endif
}

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit

#include "rotate_in_memory.h"
