// Two groups in a warp: lanes 0 to 15 work on one group, lanes 16 to 31 on the next group. Sixteen elements of a lane share the
// instructions that a group needs once.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/quantize.h"
#include "common/streams.h"
#include "cuda/groups.h"
#include "cuda/launch.h"
#include "cuda/tile.h"

namespace fewbit::cuda {

constexpr int kSide = 16;  // lanes that work on a group, which has 256 elements, kSide for each of them
constexpr int kGroupsOfBlock = kThreads / kSide;

__device__ inline int lane_of_group() { return threadIdx.x % kSide; }

// Returns the same. What depends on it is not computed before a loop, in registers that the loop needs, because shuffles are not.
__device__ inline int lane_of_group_now() {
  return static_cast<int>(__shfl_xor_sync(kAllLanes, static_cast<uint32_t>(lane_of_group()), 0));
}

__device__ inline bool any(bool condition) { return __any_sync(kAllLanes, condition) != 0; }
__device__ inline bool all(bool condition) { return __all_sync(kAllLanes, condition) != 0; }

// Returns the larger number of a warp's two groups. own: the same number in all lanes of a group.
__device__ inline int larger(int own) {
  const int other = static_cast<int>(__shfl_xor_sync(kAllLanes, static_cast<uint32_t>(own), kSide));
  return own > other ? own : other;
}

// Returns true in all lanes of a group if the condition is true in one of them.
__device__ inline bool any_of_group(bool condition) {
  return (__ballot_sync(kAllLanes, condition) >> (threadIdx.x & kSide) & 0xFFFFu) != 0;
}

// The facts about a tensor by which kernels find its groups. The host computes them, because divisions are slow on devices.
struct GroupMap {
  int64_t per_sample;  // groups; 0 if groups run across samples
  int64_t end;         // the number of elements
  bool is_flat;        // true if group g begins with element g * group_size of the tensor
};

inline GroupMap group_map(const Streams& uniform, bool is_mixed) {
  GroupMap map;
  map.per_sample = by_sample(uniform) ? quotient_up(uniform.features, uniform.group_size) : 0;
  map.end = elements(uniform, uniform.of[0]);
  map.is_flat = !is_mixed && (map.per_sample == 0 || uniform.features % uniform.group_size == 0);
  return map;
}

// Returns true if a tensor is plain: its group g begins with element 256 g, and all groups have one width.
inline bool is_plain_tensor(const Quantized& of, const GroupMap& map) {
  return !of.counts && !of.order && map.is_flat && of.group_size == kDrawBlock;
}

// The number of pairs of full groups of such a tensor.
__host__ __device__ inline int64_t plain_pair_count(const GroupMap& map) { return map.end / (2 * kDrawBlock); }

// The entries of a vector that the elements of a plain tensor have.
enum class EntryKind {
  none,      // there is no vector
  rows,      // one entry for all elements of a group
  features,  // neighboring entries for neighboring elements
};

// The host divides for the elements of a plain tensor, which then find their entries with little arithmetic. The entries of
// features are counted in runs of neighbors.
struct PlainEntries {
  EntryKind kind = EntryKind::none;
  uint32_t count = 1;                      // of entries, or of runs
  Divisor by_count = Divisor(1);
  Divisor groups_per_entry = Divisor(1);  // for rows

  // Returns the entry of a group's elements, for rows.
  __device__ uint32_t of_group(uint32_t group) const { return of(groups_per_entry.quotient(group)); }

  // Returns number % count. number: below 2^31.
  __device__ uint32_t of(uint32_t number) const { return number - by_count.quotient(number) * count; }
};

// Finds the entries of a plain tensor. It returns false if their order is another one, or if their numbers may not fit into 31
// bits. exists: false if there is no vector. run: the elements of a run, at least 8.
inline bool find_entries(PlainEntries& found, const VectorIndex& index, bool exists, int64_t groups, int run) {
  found = {};
  if (!exists) return true;
  if (groups >> 26 != 0 || index.count >> 31 != 0 || index.count < 1 || index.inner < 1) return false;
  if (index.inner % kDrawBlock == 0) {
    found = {EntryKind::rows, static_cast<uint32_t>(index.count), Divisor(index.count), Divisor(index.inner / kDrawBlock)};
  } else if (index.inner == 1 && index.count % run == 0) {
    found = {EntryKind::features, static_cast<uint32_t>(index.count / run), Divisor(index.count / run), Divisor(1)};
  }
  return found.kind != EntryKind::none;
}

// Returns true if memory can be accessed in vectors of 16 bytes from an address on, which may be null.
inline bool is_vector_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % sizeof(uint4) == 0; }

// A group as its lanes see it.
struct LocatedGroup {
  int64_t number;
  int64_t first;  // the group's first element in the stream
  int stream;
  int length;     // 0 if the number is beyond the last group
};

// Finds the groups 2 p and 2 p + 1 of a pair p.
__device__ inline LocatedGroup locate(const Streams& streams, const GroupMap& map, int64_t pair) {
  const int64_t number = 2 * pair + threadIdx.x / kSide % 2;
  const int size = streams.group_size;
  if (number >= streams.groups) return {number, 0, 0, 0};
  int64_t first = number * size, end = map.end;
  int in = 0;
  if (!map.is_flat) {
    const Stream& stream = stream_of(streams, number);
    in = static_cast<int>(&stream - streams.of);
    const int64_t index = number - stream.first_group;
    first = index * size, end = elements(streams, stream);
    if (map.per_sample > 0) {
      const int64_t sample = quotient(index, map.per_sample), begin = sample * streams.features;
      first = begin + (index - sample * map.per_sample) * size, end = begin + streams.features;
    }
  }
  return {number, first, in, end - first < size ? static_cast<int>(end - first) : size};
}

// Returns the place of a group's elements. The sample is computed where it is needed, which takes fewer registers.
__device__ inline GroupPlace place_of(const LocatedGroup& of, const Streams& streams, const int64_t* order) {
  const int64_t sample = order && by_sample(streams) ? quotient(of.first, streams.features) : 0;
  return GroupPlace(streams, streams.of[of.stream], order, {of.first, sample, of.length});
}

// Returns true if a group has 256 elements, as other groups of the tensor, that lie side by side. begin: their place in the tensor.
__device__ inline bool is_full_at(int64_t& begin, const LocatedGroup& of, const Streams& streams, const int64_t* order) {
  begin = of.first;
  if (of.length != kDrawBlock || streams.group_size != kDrawBlock) return false;
  if (!order) return true;
  const GroupPlace place = place_of(of, streams, order);
  begin = place.of(0);
  return place.contiguous();
}

inline int64_t pair_count(int64_t groups) { return groups / 2 + groups % 2; }

// The first of the pairs of groups that a warp takes. The shuffle tells the compiler that lanes have the same number.
__device__ inline int64_t first_pair_of_warp() {
  const uint32_t warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0, 32);
  return static_cast<int64_t>(blockIdx.x) * kWarps + warp;
}
__device__ inline int64_t pairs_apart() { return static_cast<int64_t>(gridDim.x) * kWarps; }

}  // namespace fewbit::cuda
