// AVX2, with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../common/planes.h"
#include "../common/table.h"
#include "kernels.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

// The number of comparisons over all planes above which a search is faster.
template <class T>
constexpr int kMostComparisons = sizeof(T) == 4 ? 120 : 70;

// Computes the bit-planes of a chunk by a comparison with every break, each followed by one exclusive or.
inline void thermometer(const Table& table, const Breaks<float>& breaks, const float* x, uint32_t* words) {
  for (int block = 0; block < kChunk / kBlock; ++block, x += kBlock, words += table.bits) {
    const __m256 x0 = _mm256_loadu_ps(x), x1 = _mm256_loadu_ps(x + 8);
    const __m256 x2 = _mm256_loadu_ps(x + 16), x3 = _mm256_loadu_ps(x + 24);
    for (int plane = 0; plane < table.bits; ++plane) {
      __m256 m0 = _mm256_setzero_ps(), m1 = m0, m2 = m0, m3 = m0;
      for (int j = breaks.plane_begin[plane]; j < breaks.plane_begin[plane + 1]; ++j) {
        const __m256 limit = _mm256_set1_ps(breaks.by_plane[j]);
        m0 = _mm256_xor_ps(m0, _mm256_cmp_ps(x0, limit, _CMP_NLE_UQ));
        m1 = _mm256_xor_ps(m1, _mm256_cmp_ps(x1, limit, _CMP_NLE_UQ));
        m2 = _mm256_xor_ps(m2, _mm256_cmp_ps(x2, limit, _CMP_NLE_UQ));
        m3 = _mm256_xor_ps(m3, _mm256_cmp_ps(x3, limit, _CMP_NLE_UQ));
      }
      const uint32_t word = static_cast<uint32_t>(_mm256_movemask_ps(m0) | _mm256_movemask_ps(m1) << 8 |
                                                  _mm256_movemask_ps(m2) << 16) |
                            static_cast<uint32_t>(_mm256_movemask_ps(m3)) << 24;
      words[plane] = word ^ (0u - (table.initial >> plane & 1));
    }
  }
}

inline void thermometer(const Table& table, const Breaks<double>& breaks, const double* x, uint32_t* words) {
  for (int block = 0; block < kChunk / kBlock; ++block, x += kBlock, words += table.bits) {
    for (int plane = 0; plane < table.bits; ++plane) {
      uint32_t word = 0;
      for (int first = 0; first < kBlock; first += 16) {
        __m256d values[4], mask[4];
        for (int v = 0; v < 4; ++v) {
          values[v] = _mm256_loadu_pd(x + first + 4 * v);
          mask[v] = _mm256_setzero_pd();
        }
        for (int j = breaks.plane_begin[plane]; j < breaks.plane_begin[plane + 1]; ++j) {
          const __m256d limit = _mm256_set1_pd(breaks.by_plane[j]);
          for (int v = 0; v < 4; ++v) {
            mask[v] = _mm256_xor_pd(mask[v], _mm256_cmp_pd(values[v], limit, _CMP_NLE_UQ));
          }
        }
        for (int v = 0; v < 4; ++v) {
          word |= static_cast<uint32_t>(_mm256_movemask_pd(mask[v])) << (first + 4 * v);
        }
      }
      words[plane] = word ^ (0u - (table.initial >> plane & 1));
    }
  }
}

// Searches in registers and returns true, or returns false if this table does not allow that.
template <class T>
inline bool search_in_registers(const Table&, const T*, uint32_t*) {
  return false;
}

template <int BITS>
inline void pack_block(const uint8_t* codes, uint32_t* words) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  for (int plane = 0; plane < BITS; ++plane) {
    // The wanted bit moves to the top of its byte. Bits that cross into the next byte stay below the top there.
    words[plane] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - plane)));
  }
}

// Returns the 32 codes of a block, one in each byte.
template <int BITS>
inline __m256i codes_of(const uint32_t* words) {
  const __m256i spread = _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101, 0x0202020202020202,
                                            0x0303030303030303);
  const __m256i lane = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  __m256i codes = _mm256_setzero_si256();
  for (int plane = 0; plane < BITS; ++plane) {
    const __m256i word = _mm256_set1_epi32(static_cast<int>(words[plane]));
    const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(word, spread), lane);
    const __m256i set = _mm256_cmpeq_epi8(bits, lane);
    codes = _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(1 << plane))));
  }
  return codes;
}

template <int BITS>
inline void unpack_block(const uint32_t* words, uint8_t* codes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), codes_of<BITS>(words));
}

template <int BITS>
inline __m256 level_of(__m256i code, const float* lut) {
  if constexpr (BITS <= 3) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(lut), code);
  } else if constexpr (BITS == 4) {
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(lut), code);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(lut + 8), code);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
  } else {
    return _mm256_i32gather_ps(lut, code, 4);
  }
}

// Looks up the levels of the codes of `blocks` blocks. lut: 2**BITS entries; at least 16 can be read.
template <int BITS>
inline void look_up(const uint32_t* words, const float* lut, float* levels, int blocks = kChunk / kBlock) {
  for (int block = 0; block < blocks; ++block, words += BITS) {
    const __m256i codes = codes_of<BITS>(words);
    const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
    for (int half = 0; half < 2; ++half, levels += 16) {
      const __m256i low = _mm256_cvtepu8_epi32(halves[half]);
      const __m256i high = _mm256_cvtepu8_epi32(_mm_srli_si128(halves[half], 8));
      _mm256_storeu_ps(levels, level_of<BITS>(low, lut));
      _mm256_storeu_ps(levels + 8, level_of<BITS>(high, lut));
    }
  }
}

// Converts n elements, a multiple of 16.
inline void widen(const uint16_t* in, float* out, int n = kChunk) {
  for (int i = 0; i < n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
}

inline void narrow(const float* in, uint16_t* out, int n = kChunk) {
  for (int i = 0; i < n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
}

// Copies whole lines of 64 bytes past the caches. `to` is aligned to lines.
inline void stream(const void* from, void* to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 32) {
    const __m256i half_line =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(to) + i), half_line);
  }
}

inline void finish_streaming() { _mm_sfence(); }

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
