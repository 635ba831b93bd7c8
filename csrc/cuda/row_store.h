// Writes the dequantized values of rotated groups.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/quantize.h"
#include "cuda/channels.h"
#include "cuda/groups.h"
#include "cuda/number.h"
#include "cuda/rotation.h"

namespace fewbit::cuda {

// Returns x, or the closest number that T can represent as a finite one.
template <class T>
__device__ float representable(float x) {
  return std::is_same_v<T, Float16> ? within_float16(x) : x;
}

// Returns the value of an element after the affine map.
__device__ inline float mapped(float x, const ValueMap& value_map, int64_t entry) {
  return x * scale_at(value_map, entry) + shift_at(value_map, entry);
}

// Reads four neighboring entries of a vector; without a vector, four times `none`.
__device__ inline void read_four(float* values, const float* vector, int64_t entry, float none) {
  uint4 four = {bits_of(none), bits_of(none), bits_of(none), bits_of(none)};
  if (vector) four = *reinterpret_cast<const uint4*>(vector + entry);
  values[0] = float_of(four.x), values[1] = float_of(four.y), values[2] = float_of(four.z), values[3] = float_of(four.w);
}

// Returns true if neighbors have neighboring entries that can be read four at a time. place: that of the group.
__device__ inline bool are_fours(const ValueMap& value_map, const Entries& entries, int64_t place) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(value_map.scale) | reinterpret_cast<uintptr_t>(value_map.shift);
  return entries.are_neighbors(4) && (value_map.index.count | place) % 4 == 0 && addresses % sizeof(uint4) == 0;
}

// Returns true if map_neighbors can apply the affine map, if there is one, to a full group whose elements lie side by side.
__device__ inline bool can_map(const ValueMap& value_map, int64_t place) {
  if (!value_map.is_affine()) return true;
  const Entries entries(value_map.index, place);
  return entries.are_one(kFullGroup) || are_fours(value_map, entries, place);
}

// Applies the affine map to a row of neighbors, of which the first is element `first` of the group.
__device__ inline void map_neighbors(float* values, const ValueMap& value_map, int64_t place, int first) {
  const Entries entries(value_map.index, place);
  if (all(entries.are_one(kFullGroup))) {
    const int64_t entry = entries.of(0);
    const float scale = scale_at(value_map, entry), shift = shift_at(value_map, entry);
#pragma unroll
    for (int k = 0; k < kSide; ++k) values[k] = values[k] * scale + shift;
    return;
  }
  int64_t entry = entries.of(first);
#pragma unroll
  for (int k = 0; k < kSide; k += 4) {
    float scales[4], shifts[4];
    read_four(scales, value_map.scale, entry, 1.0f);
    read_four(shifts, value_map.shift, entry, -0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[k + i] = values[k + i] * scales[i] + shifts[i];
    entry = entries.after(entry, 4);
  }
}

// Puts channels into a row of neighbors, of which the first is element `first` of the group.
__device__ inline void put_channels_in(float* values, const StoredChannels& channels, int64_t place, int first) {
  const Entries entries = entries_from(channels, place);
  int64_t channel = entries.of(first);
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    values[k] = put_in(values[k], numbers_of(channels, channel));
    channel = entries.after(channel, 1);
  }
}

// Returns 1 or 0, the i-th of some bits of a mask.
__device__ inline float factor_of_bit(uint32_t bits, int i) { return bits & (1u << i) ? 1.0f : 0.0f; }

// Rounds neighbors to T.
template <class T, int Length>
__device__ void narrow(uint32_t* words, const float* values) {
#pragma unroll
  for (int k = 0; k < Length; k += 2) {
    const float low = representable<T>(values[k]), high = representable<T>(values[k + 1]);
    set_pair<T>(words, k, static_cast<Wide<T>>(low), static_cast<Wide<T>>(high));
  }
}

// The registers that a row of T fills, and its vectors of 16 bytes.
template <class T>
constexpr int kRowWords = kSide * sizeof(T) / 4;
template <class T>
constexpr int kRowVectors = kRowWords<T> / 4;

// Writes the rows of a full group to memory that is aligned to vectors. Rows change lanes before, so that the lanes side by
// side write side by side.
template <class T>
__device__ void store_vectors(const uint32_t* words, T* out, Workspace& own) {
  const int lane = lane_of_group();
  auto* to = reinterpret_cast<uint4*>(out);
  uint4 vectors[kRowVectors<T>];
#pragma unroll
  for (int i = 0; i < kRowVectors<T>; ++i) {
    vectors[i].x = words[4 * i], vectors[i].y = words[4 * i + 1];
    vectors[i].z = words[4 * i + 2], vectors[i].w = words[4 * i + 3];
  }
  // A vector of padding after every four vectors keeps lanes out of each other's banks.
  auto* staged = reinterpret_cast<uint4*>(own.numbers);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRowVectors<T>; ++i) {
    const int place = lane * kRowVectors<T> + i;
    staged[place + place / 4] = vectors[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRowVectors<T>; ++i) {
    const int place = i * kSide + lane;
    to[place] = staged[place + place / 4];
  }
}

// Writes a row of values of a group of m elements, which it changes.
template <class T>
__device__ void store_row(float* values, const ValueMap& value_map, const StoredChannels& channels, T* out, const GroupPlace& place, int m,
                          Workspace& own) {
  const bool are_neighbors = m == kFullGroup && place.contiguous();
  T* const first = out + (are_neighbors ? place.of(0) : 0);
  const bool is_aligned = are_neighbors && reinterpret_cast<uintptr_t>(first) % sizeof(uint4) == 0;
  if (all(is_aligned && can_map(value_map, place.of(0)))) {
    if (channels.exists()) put_channels_in(values, channels, place.of(0), lane_of_group() * kSide);
    if (value_map.is_affine()) map_neighbors(values, value_map, place.of(0), lane_of_group() * kSide);
    if (value_map.mask) {
      const uint32_t bits = mask_bits(value_map.mask, place.of(0) + lane_of_group() * kSide, kSide);
#pragma unroll
      for (int k = 0; k < kSide; ++k) values[k] *= factor_of_bit(bits, k);
    }
    uint32_t words[kRowWords<T>];
    narrow<T, kSide>(words, values);
    return store_vectors(words, first, own);
  }
  put_row(values, own);
  const Entries entries(value_map.index, value_map.is_affine() && place.contiguous() && m > 0 ? place.of(0) : 0);
#pragma unroll 1
  for (int i = lane_of_group(); i < m; i += kSide) {
    float x = own.at(i);
    if (channels.exists()) x = put_in(x, numbers_of(channels, modulo(place.of(i), channels.count)));
    if (value_map.is_affine()) x = mapped(x, value_map, entries.of(i));
    if (value_map.mask) x *= factor_of_bit(mask_bits(value_map.mask, place.of(i), 1), 0);
    store_one(representable<T>(x), out + place.of(i));
  }
}

}  // namespace fewbit::cuda
