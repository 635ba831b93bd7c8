// The numbers of channels as kernels for rotated copies use them.

#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "common/channels.h"
#include "common/dtype.h"
#include "cuda/groups.h"
#include "cuda/pairs.h"

namespace fewbit::cuda {

// The channels of a tensor. plain: those of a plain tensor (pairs.h), in runs of neighbors; its kind is `none` if the elements find
// their channels only one by one.
struct ChannelMap {
  StoredChannels stored = {};
  PlainEntries plain;

  __host__ __device__ bool exists() const { return stored.exists(); }
};

// Returns the channels of a part of a group whose elements lie side by side; one channel for all of them if there are none.
__device__ inline Entries entries_from(const StoredChannels& stored, int64_t element) {
  return Entries({stored.exists() ? stored.count : 1, 1}, element);
}

// run: as in find_entries. groups: those of the copy.
inline ChannelMap channel_map(const StoredChannels& stored, int64_t groups, int run) {
  ChannelMap map = {stored, {}};
  if (!is_vector_aligned(stored.numbers) || !find_entries(map.plain, {stored.count, 1}, stored.exists(), groups, run)) map.plain = {};
  return map;
}

// Returns true if a kernel for plain tensors can use this map.
inline bool is_plain_map(const ChannelMap& map) { return !map.exists() || map.plain.kind != EntryKind::none; }

// Returns the numbers of a channel from both bfloat16 in a word.
__device__ inline ChannelNumbers numbers_of(uint32_t word) { return {float_of(word << 16), float_of(word & 0xFFFF0000u)}; }

// Returns the same, also if the address is not that of a word.
__device__ inline ChannelNumbers numbers_of(const StoredChannels& stored, int64_t channel) {
  const uint16_t* const at = stored.numbers + 2 * channel;
  return {widen_bfloat16(at[0]), widen_bfloat16(at[1])};
}

// Returns 1 / scale, rounded to the nearest number. `near` is wrong by at most a unit in its last place, so the remainder is exact, and
// the last sum is (1 / scale) (1 - e), e < 2^-45, before it is rounded. No reciprocal of a number of 8 bits is so close to where rounding
// changes. All scales of channels are between 2^-25 and 2^25.
__device__ inline float inverse_of(float scale) {
#ifdef __CUDA_ARCH__
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(scale));
  return fmaf(near, fmaf(-scale, near, 1.0f), near);
#else
  return 1.0f / scale;
#endif
}

// Takes the numbers of a channel out of an element, and puts them into a value.
__device__ inline float taken_out(float x, const ChannelNumbers& of) { return (x - of.mean) * inverse_of(of.scale); }
__device__ inline float put_in(float value, const ChannelNumbers& of) { return value * of.scale + of.mean; }

}  // namespace fewbit::cuda
