// Code for AVX-512 F, BW, VL and DQ. Comparisons return mask registers, which are bit-planes already.
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
constexpr int kMostComparisons = sizeof(T) == 4 ? 40 : 110;

inline __mmask16 beyond_lanes(__m512 x, __m512 limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_NLE_UQ); }

// x is beyond a limit if the sign of limit - x is set, and the sign of an exclusive or of such differences counts them modulo
// 2. This takes half as many operations as comparisons and mask registers. The limit must not be -0, since 0 - 0 is +0, and x
// must not be NaN.
inline __m512 differences(__m512 odd, __m512 first, __m512 second) {
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(odd), _mm512_castps_si512(first),
                                                       _mm512_castps_si512(second), 0x96));
}

inline __m512d differences(__m512d odd, __m512d first, __m512d second) {
  return _mm512_castsi512_pd(_mm512_ternarylogic_epi64(_mm512_castpd_si512(odd), _mm512_castpd_si512(first),
                                                       _mm512_castpd_si512(second), 0x96));
}

// COUNT limits in registers. `word` marks which of 32 elements are beyond an odd number of them.
template <class T, int COUNT>
struct Limits;

template <int COUNT>
struct Limits<float, COUNT> {
  __m512 limits[COUNT];

  explicit Limits(const float* values) {
    for (int j = 0; j < COUNT; ++j) limits[j] = _mm512_set1_ps(values[j]);
  }

  __mmask16 odd(const float* x) const {
    // The minimum of NaN and infinity is infinity, which is beyond all limits.
    const __m512 lanes = _mm512_min_ps(_mm512_loadu_ps(x), _mm512_set1_ps(__builtin_inff()));
    __m512 odd = _mm512_sub_ps(limits[0], lanes);
    for (int j = 1; j + 1 < COUNT; j += 2) {
      odd = differences(odd, _mm512_sub_ps(limits[j], lanes), _mm512_sub_ps(limits[j + 1], lanes));
    }
    if constexpr (COUNT % 2 == 0) odd = _mm512_xor_ps(odd, _mm512_sub_ps(limits[COUNT - 1], lanes));
    return _mm512_movepi32_mask(_mm512_castps_si512(odd));
  }

  uint32_t word(const float* x) const { return _cvtmask32_u32(_mm512_kunpackw(odd(x + 16), odd(x))); }
};

template <int COUNT>
struct Limits<double, COUNT> {
  __m512d limits[COUNT];

  explicit Limits(const double* values) {
    for (int j = 0; j < COUNT; ++j) limits[j] = _mm512_set1_pd(values[j]);
  }

  __mmask8 odd(const double* x) const {
    const __m512d lanes = _mm512_min_pd(_mm512_loadu_pd(x), _mm512_set1_pd(__builtin_inf()));
    __m512d odd = _mm512_sub_pd(limits[0], lanes);
    for (int j = 1; j + 1 < COUNT; j += 2) {
      odd = differences(odd, _mm512_sub_pd(limits[j], lanes), _mm512_sub_pd(limits[j + 1], lanes));
    }
    if constexpr (COUNT % 2 == 0) odd = _mm512_xor_pd(odd, _mm512_sub_pd(limits[COUNT - 1], lanes));
    return _mm512_movepi64_mask(_mm512_castpd_si512(odd));
  }

  uint32_t word(const double* x) const {
    const __mmask16 low = _mm512_kunpackb(odd(x + 8), odd(x)), high = _mm512_kunpackb(odd(x + 24), odd(x + 16));
    return _cvtmask32_u32(_mm512_kunpackw(high, low));
  }
};

// Flips bits of one plane of a chunk; the words of a plane are `stride` apart.
template <class T, int COUNT>
inline void flip_plane(const T* values, const T* x, uint32_t* words, int stride) {
  const Limits<T, COUNT> limits(values);
#pragma GCC unroll 1
  for (int block = 0; block < kChunk / kBlock; ++block) words[block * stride] ^= limits.word(x + block * kBlock);
}

// Computes the bit-planes of a chunk by a comparison with every break, each followed by one exclusive or. It goes
// plane by plane with a few breaks at a time, because compilers carry masks through a loop in general registers.
template <class T>
inline void thermometer(const Table& table, const Breaks<T>& breaks, const T* x, uint32_t* words) {
  const int bits = table.bits;
  for (int plane = 0; plane < bits; ++plane) {
    const uint32_t initial = 0u - (table.initial >> plane & 1);
    for (int block = 0; block < kChunk / kBlock; ++block) words[block * bits + plane] = initial;
    const T* limit = breaks.by_plane + breaks.plane_begin[plane];
    int left = breaks.plane_begin[plane + 1] - breaks.plane_begin[plane];
    for (; left >= 8; left -= 8, limit += 8) flip_plane<T, 8>(limit, x, words + plane, bits);
    switch (left) {
      case 1:
        flip_plane<T, 1>(limit, x, words + plane, bits);
        break;
      case 2:
        flip_plane<T, 2>(limit, x, words + plane, bits);
        break;
      case 3:
        flip_plane<T, 3>(limit, x, words + plane, bits);
        break;
      case 4:
        flip_plane<T, 4>(limit, x, words + plane, bits);
        break;
      case 5:
        flip_plane<T, 5>(limit, x, words + plane, bits);
        break;
      case 6:
        flip_plane<T, 6>(limit, x, words + plane, bits);
        break;
      case 7:
        flip_plane<T, 7>(limit, x, words + plane, bits);
        break;
    }
  }
}

// A table of 2**BITS entries in registers of 16 each; at least 16 entries can be read.
template <int BITS>
struct Lut {
  static constexpr int kRegisters = BITS <= 4 ? 1 : 1 << (BITS - 4);
  __m512 part[kRegisters];

  explicit Lut(const void* entries) {
    for (int i = 0; i < kRegisters; ++i) part[i] = _mm512_loadu_ps(static_cast<const float*>(entries) + 16 * i);
  }

  __m512 operator[](__m512i index) const {
    if constexpr (BITS <= 4) {
      return _mm512_permutexvar_ps(index, part[0]);
    } else {
      // The low 5 bits look up in pairs of registers. The other bits choose among pairs.
      __m512 found[kRegisters / 2];
      for (int i = 0; i < kRegisters / 2; ++i) {
        found[i] = _mm512_permutex2var_ps(part[2 * i], index, part[2 * i + 1]);
      }
      for (int bit = 5, count = kRegisters / 2; bit < BITS; ++bit, count /= 2) {
        const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(1 << bit));
        for (int i = 0; i < count / 2; ++i) {
          found[i] = _mm512_mask_blend_ps(upper, found[2 * i], found[2 * i + 1]);
        }
      }
      return found[0];
    }
  }
};

// Finds the codes of a chunk by a search of STEPS halvings. Each halving looks up a break among those of its step.
template <int STEPS>
struct Search {
  // Returns the outcomes of the first STEPS comparisons, one bit for each.
  static __m512i path(const Breaks<float>& breaks, __m512 x) {
    const __m512i before = Search<STEPS - 1>::path(breaks, x);
    const Lut<STEPS - 1> limits(breaks.reversed + (1 << (STEPS - 1)) - 1);
    const __mmask16 beyond = beyond_lanes(x, limits[before]);
    return _mm512_mask_or_epi32(before, beyond, before, _mm512_set1_epi32(1 << (STEPS - 1)));
  }

  static __m512i code(const Breaks<float>& breaks, __m512i path) {
    if constexpr (STEPS <= 8) {
      return _mm512_castps_si512(Lut<STEPS>(breaks.reversed_codes)[path]);
    } else {
      return _mm512_i32gather_epi32(path, breaks.reversed_codes, 4);
    }
  }

  static void run(const Table& table, const float* x, uint32_t* words) {
    const Breaks<float>& breaks = table.breaks32;
    for (int block = 0; block < kChunk / kBlock; ++block, x += kBlock, words += table.bits) {
      const __m512i low = code(breaks, path(breaks, _mm512_loadu_ps(x)));
      const __m512i high = code(breaks, path(breaks, _mm512_loadu_ps(x + 16)));
      for (int plane = 0; plane < table.bits; ++plane) {
        const __m512i bit = _mm512_set1_epi32(1 << plane);
        words[plane] = _cvtmask32_u32(
            _mm512_kunpackw(_mm512_test_epi32_mask(high, bit), _mm512_test_epi32_mask(low, bit)));
      }
    }
  }
};

template <>
struct Search<0> {
  static __m512i path(const Breaks<float>&, __m512) { return _mm512_setzero_si512(); }
};

// Searches in registers and returns true, or returns false if this table does not allow that.
inline bool search_in_registers(const Table& table, const float* x, uint32_t* words) {
  switch (table.breaks32.steps) {
    case 4:
      return Search<4>::run(table, x, words), true;
    case 5:
      return Search<5>::run(table, x, words), true;
    case 6:
      return Search<6>::run(table, x, words), true;
    case 7:
      return Search<7>::run(table, x, words), true;
    case 8:
      return Search<8>::run(table, x, words), true;
    case 9:
      return Search<9>::run(table, x, words), true;
    default:
      return false;
  }
}

inline bool search_in_registers(const Table&, const double*, uint32_t*) { return false; }

template <int BITS>
inline void pack_block(const uint8_t* codes, uint32_t* words) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  for (int plane = 0; plane < BITS; ++plane) {
    words[plane] = _mm256_test_epi8_mask(bytes, _mm256_set1_epi8(static_cast<char>(1 << plane)));
  }
}

// Returns the 32 codes of a block, one in each byte.
template <int BITS>
inline __m256i codes_of(const uint32_t* words) {
  __m256i codes = _mm256_maskz_set1_epi8(words[0], 1);
  for (int plane = 1; plane < BITS; ++plane) {
    const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << plane));
    codes = _mm256_or_si256(codes, _mm256_maskz_mov_epi8(words[plane], bit));
  }
  return codes;
}

template <int BITS>
inline void unpack_block(const uint32_t* words, uint8_t* codes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), codes_of<BITS>(words));
}

// Looks up the levels of the codes of `blocks` blocks. lut: 2**BITS entries; at least 16 can be read.
template <int BITS>
inline void look_up(const uint32_t* words, const float* lut, float* levels, int blocks = kChunk / kBlock) {
  const Lut<BITS> level(lut);
  for (int block = 0; block < blocks; ++block, words += BITS, levels += kBlock) {
    const __m256i codes = codes_of<BITS>(words);
    _mm512_storeu_ps(levels, level[_mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes))]);
    _mm512_storeu_ps(levels + 16, level[_mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1))]);
  }
}

// Converts n elements, a multiple of 16.
inline void widen(const uint16_t* in, float* out, int n = kChunk) {
  for (int i = 0; i < n; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(half));
  }
}

inline void narrow(const float* in, uint16_t* out, int n = kChunk) {
  for (int i = 0; i < n; i += 16) {
    const __m256i half = _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), half);
  }
}

// Copies whole lines of 64 bytes past the caches. `to` is aligned to lines.
inline void stream(const void* from, void* to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    const __m512i line = _mm512_loadu_si512(static_cast<const char*>(from) + i);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + i), line);
  }
}

inline void finish_streaming() { _mm_sfence(); }

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
