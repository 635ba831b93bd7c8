// The bit-planes of the codes of rotated groups, in memory, and the memory that they leave free.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/planes.h"
#include "common/streams.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rotation.h"

namespace fewbit::cuda {

// The place of a group's codes.
struct GroupToPack {
  uint32_t* words;  // begins with the block of the first element
  int m;            // elements
  int shift;        // the first element's place in its block
  int bits;

  __device__ int blocks() const { return (shift + m + kBlock - 1) / kBlock; }

  // Stores a word. Its block may have elements of other groups, whose bits stay: all words were zero before.
  __device__ void store_shared(int block, int plane, uint32_t word) const {
    if (block >= blocks() || plane >= bits) return;
    const bool is_shared = (block == 0 && shift > 0) || (block == blocks() - 1 && (shift + m) % kBlock != 0);
    if (is_shared) {
      atomicOr(words + block * bits + plane, word);
    } else {
      words[block * bits + plane] = word;
    }
  }
};

// Returns true if no block has elements of two groups. Groups share blocks only if groups begin inside blocks.
inline bool is_whole(const Quantized& of) { return of.features < kLeastFeatures || of.features % kBlock == 0; }

// Clears the words and the ranges that the groups of a copy do not fill.
inline void clear(const Quantized& of, int32_t* packed, uint16_t* ranges, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  // Streams of one width, whose sizes are known here, fill all words.
  if (!is_whole(of) || of.counts) {
    check(cudaMemsetAsync(packed, 0, static_cast<size_t>(of.words) * sizeof(uint32_t), on), "clearing packed codes");
  }
  if (of.counts) {
    const size_t bytes = static_cast<size_t>(of.groups) * kColumns * sizeof(uint16_t);
    check(cudaMemsetAsync(ranges, 0, bytes, on), "clearing ranges");
  }
}

// Writes the codes of a group. whole: no block has elements of two groups.
__device__ inline void store_planes(const Planes& planes, const GroupToPack& to, int most_bits, bool whole, bool has_codes) {
  const int lane = lane_of_group(), first = lane * kSide, left = to.m - first;
  const uint32_t exist = !has_codes || left <= 0 ? 0u : left < kSide ? (1u << left) - 1u : 0xFFFFu;
#pragma unroll
  for (int pair = 0; pair < kMaxBits / 2; ++pair) {
    if (2 * pair >= most_bits) break;
    const uint32_t word = exchange_planes(planes.pairs[pair] & exist * 0x10001u);
    const int block = lane / 2, plane = 2 * pair + lane % 2;
    if (whole) {
      if (block * kBlock < to.m && plane < to.bits) to.words[block * to.bits + plane] = word;
      continue;
    }
    const uint32_t neighbor = __shfl_sync(kAllLanes, word, lane - 2, kSide), before = block > 0 ? neighbor : 0u;
    to.store_shared(block, plane, __funnelshift_l(before, word, to.shift));
    if (block == kSide / 2 - 1) to.store_shared(block + 1, plane, __funnelshift_l(word, 0, to.shift));
  }
}

// Writes the codes of a full group of at most MostBits bits, if no block has elements of two groups.
template <int MostBits>
__device__ inline void store_full(const Planes& planes, uint32_t* words, int bits) {
  const int lane = lane_of_group();
#pragma unroll
  for (int pair = 0; pair < (MostBits + 1) / 2; ++pair) {
    const uint32_t word = exchange_planes(planes.pairs[pair]);
    const int plane = 2 * pair + lane % 2;
    if (plane < bits) words[lane / 2 * bits + plane] = word;
  }
}

// The codes of a group.
struct PackedGroup {
  const uint32_t* words;  // begins with the block of the first element
  int m;                  // elements
  int shift;              // the first element's place in its block
  int bits;

  // Returns the bits of 32 elements in a plane. No word beyond the block of the last element is read.
  __device__ uint32_t word(int block, int plane) const {
    const int left = m - block * kBlock;
    if (left <= 0 || plane >= bits) return 0;
    const uint32_t* from = words + block * bits + plane;
    if (shift == 0) return *from;
    const uint32_t next = shift + left > kBlock ? from[bits] : 0u;
    return __funnelshift_r(*from, next, shift);
  }
};

// Reads a column of codes.
__device__ inline Planes read_planes(const PackedGroup& group, int most_bits) {
  const int lane = lane_of_group();
  Planes planes = {};
#pragma unroll
  for (int pair = 0; pair < kMaxBits / 2; ++pair) {
    if (2 * pair >= most_bits) break;
    planes.pairs[pair] = transposed_planes(exchange_planes(group.word(lane / 2, 2 * pair + lane % 2)));
  }
  return planes;
}

}  // namespace fewbit::cuda
