// Encoding with few breaks. Every element is compared with every break, which flips a bit-plane if it is below.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/table.h"
#include "cuda/number.h"
#include "cuda/tile.h"

namespace fewbit::cuda {

// The breaks of each plane. They are a kernel parameter, which kernels read as constants.
struct Thresholds {
  // A comparison costs about 1.5 instructions (half that for pairs), a search of 128 pieces about 60.
  static constexpr int kCapacity = 96;

  int bits;                   // 0: no codes at all
  uint32_t initial[2];        // the code below all breaks: byte p of both is all ones if plane p is one
  int count[kMaxBits];        // breaks that flip the plane, at least 1
  // The breaks in pairs, from the highest plane down. If a plane has an odd number, .y of its first pair is not used. A break
  // is a float32, or twice the same 16-bit float.
  uint2 breaks[kCapacity / 2 + kMaxBits];
};

// Makes the register with which elements of T are compared for a float32 break b. A 16-bit x is above b if it is above b
// rounded down to its own type. Returns false if that is -inf, from which nothing can be subtracted.
template <class T>
bool make_break(float b, uint32_t& result) {
  if constexpr (kIsPair<T>) {
    uint32_t bits = T::narrow_pair(b, 0.0f) & 0xFFFFu;
    if (T::widen(bits) > b) bits = (bits & 0x7FFFu) == 0 ? 0x8001u : bits & 0x8000u ? bits + 1 : bits - 1;
    if (bits == (T::kInfinity | 0x8000u)) return false;
    if (bits == 0x8000u) bits = 0;
    result = bits * 0x10001u;
  } else {
    result = bits_of(b + 0.0f);  // -0 becomes +0
  }
  return true;
}

// Makes the thresholds of a table for elements of type T. Returns false if they do not fit, and the table must be searched.
template <class T>
bool make_thresholds(const Table& table, Thresholds& thresholds) {
  const Breaks<float>& breaks = table.breaks32;
  thresholds.bits = table.bits;
  thresholds.initial[0] = thresholds.initial[1] = 0;
  for (int plane = 0; plane < table.bits; ++plane) {
    if (table.initial >> plane & 1) thresholds.initial[plane / 4] |= 0xFFu << (plane % 4 * 8);
  }
  if (breaks.plane_begin[table.bits] > Thresholds::kCapacity) return false;
  uint2* next = thresholds.breaks;
  for (int plane = table.bits - 1; plane >= 0; --plane) {
    const float* first = breaks.by_plane + breaks.plane_begin[plane];
    const int count = breaks.plane_begin[plane + 1] - breaks.plane_begin[plane];
    thresholds.count[plane] = count > 0 ? count : 2;
    if (count == 0) *next++ = {0, 0};  // the same break twice flips nothing
    for (int j = 0; j < count; ++next) {
      if (!make_break<T>(first[j++], next->x)) return false;
      next->y = next->x;
      if ((count - j) % 2 != 0 && !make_break<T>(first[j++], next->y)) return false;
    }
  }
  return true;
}

// Shifts the sign bits of 8 elements into `planes` as its lowest byte. beyond: registers like those of a group.
template <class T>
__device__ uint32_t gather_signs(const uint32_t* beyond, uint32_t planes) {
  if constexpr (kIsPair<T>) {
    // `first` and `second` get the upper bytes of 4 elements each, whose signs are bits 7, 15, 23, 31.
    const uint32_t first = __byte_perm(beyond[0], beyond[1], 0x7531);
    const uint32_t second = __byte_perm(beyond[2], beyond[3], 0x7531);
    // The signs of the first four elements move to bits 3, 11, 19, 27. A product moves each to its place in the highest byte.
    // No two partial products overlap, so nothing carries.
    const uint32_t signs = ((second & 0xF0F0F0F0u) | (first >> 4 & 0x0F0F0F0Fu)) & 0x88888888u;
    return __funnelshift_l(signs * 0x00204081u, planes, 8);
  } else {
#pragma unroll
    for (int i = 7; i >= 0; --i) planes = __funnelshift_l(beyond[i], planes, 1);
    return planes;
  }
}

// Returns the planes of all groups of a lane. It replaces NaN in `x`.
template <class T>
__device__ void encode_linear(Fragment<T>& x, const Thresholds& thresholds, Octet* octets) {
  constexpr int kRegisters = Tile<T>::kRegisters, kGroups = Tile<T>::kGroups;
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) x.words[r] = nan_to_infinity<T>(x.words[r]);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) octets[g] = {0, 0};
  int next = 0;
  int plane = thresholds.bits - 1;
#pragma unroll 1
  for (int last = plane & 4; last >= 0; last -= 4) {  // the planes from 4 on, if any, and those below
#pragma unroll
    for (int g = 0; g < kGroups; ++g) octets[g] = {0, octets[g].low};
#pragma unroll 1
    for (; plane >= last; --plane) {
      uint32_t beyond[kRegisters];
      int left = thresholds.count[plane];
      uint2 b = thresholds.breaks[next++];
      if (left & 1) {
#pragma unroll
        for (int r = 0; r < kRegisters; ++r) beyond[r] = beyond_bits<T>(x.words[r], b.x);
      } else {
#pragma unroll
        for (int r = 0; r < kRegisters; ++r) {
          beyond[r] = beyond_bits<T>(x.words[r], b.x) ^ beyond_bits<T>(x.words[r], b.y);
        }
      }
      // Breaks are handled in pairs, because one instruction computes the exclusive or of three registers.
#pragma unroll 1
      for (left -= 2; left > 0; left -= 2) {
        b = thresholds.breaks[next++];
#pragma unroll
        for (int r = 0; r < kRegisters; ++r) {
          beyond[r] ^= beyond_bits<T>(x.words[r], b.x) ^ beyond_bits<T>(x.words[r], b.y);
        }
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        octets[g].low = gather_signs<T>(beyond + g * Fragment<T>::kPerGroup, octets[g].low);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    octets[g].low ^= thresholds.initial[0];
    octets[g].high ^= thresholds.initial[1];
  }
}

}  // namespace fewbit::cuda
