// Code for any processor, with the compiler's vectors of 16 bytes (SSE2, NEON, ...).
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/dtype.h"
#include "../common/planes.h"
#include "../common/table.h"
#include "kernels.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

template <class T>
struct Vector;
template <>
struct Vector<float> {
  typedef float Values __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));
};
template <>
struct Vector<double> {
  typedef double Values __attribute__((vector_size(16)));
  typedef int64_t Mask __attribute__((vector_size(16)));
};

// The number of comparisons over all planes above which a search is faster.
template <class T>
constexpr int kMostComparisons = sizeof(T) == 4 ? 40 : 24;

// Computes the bit-planes of a chunk by a comparison with every break, each followed by one exclusive or.
template <class T>
inline void thermometer(const Table& table, const Breaks<T>& breaks, const T* x, uint32_t* words) {
  typedef typename Vector<T>::Values Values;
  typedef typename Vector<T>::Mask Mask;
  constexpr int lanes = 16 / sizeof(T), group = 4;
  Mask first_bits;
  for (int lane = 0; lane < lanes; ++lane) first_bits[lane] = 1 << lane;
  for (int block = 0; block < kChunk / kBlock; ++block, x += kBlock, words += table.bits) {
    for (int plane = 0; plane < table.bits; ++plane) {
      const T* limit = breaks.by_plane + breaks.plane_begin[plane];
      const T* last = breaks.by_plane + breaks.plane_begin[plane + 1];
      // The comparison is "not beyond", so each break has flipped the bit once too often.
      const uint32_t flipped = (static_cast<uint32_t>(last - limit) + (table.initial >> plane)) & 1;
      uint32_t word = 0;
      for (int first = 0; first < kBlock; first += group * lanes) {
        Values values[group];
        Mask mask[group] = {};
        memcpy(values, x + first, sizeof values);
        for (const T* next = limit; next != last; ++next) {
          for (int v = 0; v < group; ++v) mask[v] ^= values[v] <= *next;
        }
        Mask bits{};
        for (int v = 0; v < group; ++v) bits |= mask[v] & first_bits << v * lanes;
        for (int lane = 0; lane < lanes; ++lane) word |= static_cast<uint32_t>(bits[lane]) << first;
      }
      words[plane] = word ^ (0u - flipped);
    }
  }
}

// Searches in registers and returns true, or returns false if this table does not allow that.
template <class T>
inline bool search_in_registers(const Table&, const T*, uint32_t*) {
  return false;
}

// gather_bits returns bit `plane` of 8 bytes as 8 bits. spread_bits returns 8 bits as 8 bytes of 0 or 1.
inline uint64_t gather_bits(uint64_t bytes, int plane) {
  return (bytes >> plane & 0x0101010101010101u) * 0x0102040810204080u >> 56;
}
inline uint64_t spread_bits(uint64_t byte) {
  return ((byte * 0x0101010101010101u & 0x8040201008040201u) + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
}

template <int BITS>
inline void pack_block(const uint8_t* codes, uint32_t* words) {
  uint64_t bytes[4];
  memcpy(bytes, codes, sizeof bytes);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  for (uint64_t& eight : bytes) eight = __builtin_bswap64(eight);
#endif
  for (int plane = 0; plane < BITS; ++plane) {
    words[plane] = static_cast<uint32_t>(gather_bits(bytes[0], plane) | gather_bits(bytes[1], plane) << 8 |
                                         gather_bits(bytes[2], plane) << 16 | gather_bits(bytes[3], plane) << 24);
  }
}

template <int BITS>
inline void unpack_block(const uint32_t* words, uint8_t* codes) {
  uint64_t bytes[4] = {};
  for (int plane = 0; plane < BITS; ++plane) {
    for (int i = 0; i < 4; ++i) bytes[i] |= spread_bits(words[plane] >> 8 * i & 0xFFu) << plane;
  }
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  for (uint64_t& eight : bytes) eight = __builtin_bswap64(eight);
#endif
  memcpy(codes, bytes, sizeof bytes);
}

// Looks up the levels of the codes of `blocks` blocks.
template <int BITS>
inline void look_up(const uint32_t* words, const float* lut, float* levels, int blocks = kChunk / kBlock) {
  for (int block = 0; block < blocks; ++block, words += BITS, levels += kBlock) {
    uint8_t codes[kBlock];
    unpack_block<BITS>(words, codes);
    for (int i = 0; i < kBlock; ++i) levels[i] = lut[codes[i]];
  }
}

// Converts n elements, a multiple of 16.
inline void widen(const uint16_t* in, float* out, int n = kChunk) {
  for (int i = 0; i < n; ++i) out[i] = widen_float16(in[i]);
}

inline void narrow(const float* in, uint16_t* out, int n = kChunk) {
  for (int i = 0; i < n; ++i) out[i] = narrow_float16(in[i]);
}

// Copies. There is no portable way to write past the caches.
inline void stream(const void* from, void* to, int64_t bytes) { memcpy(to, from, bytes); }

inline void finish_streaming() {}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
