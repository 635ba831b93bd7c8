// Dequantizing a full group by products of matrices: each lane of a warp gets eight adjacent values.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/normal_levels.h"
#include "common/rotate.h"
#include "cuda/hadamard.h"
#include "cuda/rotated_planes.h"
#include "cuda/rotation.h"

namespace fewbit::cuda {

static __device__ const NormalLevels kLevelsOnDevice = kNormalLevels;

// A group needs the two counters of its signs.
constexpr int kCountersAhead = 2, kTurns = kSide / kCountersAhead;

// -- levels ----------------------------------------------------------------------------------------------

// The levels in shared memory, by code.
struct CodeLevels {
  float signed_levels[2 << kMaxBits];  // those of `bits` bits begin at first(bits)

  __host__ __device__ static constexpr int first(int bits) { return (1 << bits) - 2; }
  __device__ const float* of(int bits) const { return signed_levels + first(bits); }
};

__device__ inline float signed_level(int code, int bits) {
  const int half = 1 << (bits - 1), index = code % half;
  const float level = kLevelsOnDevice.levels[levels_begin(bits) + index];
  return code >= half ? -level : level;
}

// Fills the table. Every thread of a block calls it.
__device__ inline void fill(CodeLevels& levels) {
  for (int i = threadIdx.x; i < CodeLevels::first(kMaxBits + 1); i += kThreads) {
    int bits = 1;
    while (i >= CodeLevels::first(bits + 1)) ++bits;
    levels.signed_levels[i] = signed_level(i - CodeLevels::first(bits), bits);
  }
}

// -- codes -----------------------------------------------------------------------------------------------

// Returns a column of levels.
__device__ inline void decode(float* values, const Planes& planes, const float* signed_levels) {
  uint32_t codes[kSide];
  unpack_codes(planes, codes);
#pragma unroll
  for (int j = 0; j < kSide; ++j) values[j] = signed_levels[codes[j]];
}

// -- neighbors -------------------------------------------------------------------------------------------

// The elements of a lane in a group that is transformed by products.
constexpr int kNeighbors = kFullGroup / 32;

// The number of words, and of vectors of 16 bytes, that the neighbors of a lane fill.
template <class T>
constexpr int kNeighborWords = kNeighbors * sizeof(T) / sizeof(uint32_t);
template <class T>
constexpr int kNeighborVectors = kNeighborWords<T> / 4;

// Writes the 256 elements of a warp to `out`. words: those of the lane's neighbors, which are overwritten. If T is float32, two
// adjacent lanes exchange half of their words, so that each store fills whole sectors of 32 bytes.
template <class T>
__device__ void store_neighbor_words(uint32_t* words, T* out) {
  const int lane = threadIdx.x % 32;
  auto* to = reinterpret_cast<uint4*>(out) + lane * kNeighborVectors<T>;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t got = __shfl_xor_sync(kAllLanes, lane % 2 ? words[i] : words[i + 4], 1);
      (lane % 2 ? words[i] : words[i + 4]) = got;
    }
    to -= lane % 2;
  }
  constexpr int kApart = sizeof(T) == 4 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kNeighborVectors<T>; ++i) {
    to[i * kApart] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
  }
}

// For a group that is rotated twice: applies the signs of the second rotation, whose transform is done already, and does the
// transform of the first rotation. values: a lane's neighbors. number: that of the group.
__device__ inline void rotate_neighbors_back(float* values, uint64_t seed, int64_t number) {
  const int lane = threadIdx.x % 32;
  const PhiloxWords random = philox_words(seed, group_counter(number) + static_cast<unsigned>(sign_counter(1, 0) + lane / kSide));
  // Numbers of their own, because the compiler would choose the word by a load from local memory.
  const uint32_t word0 = random.words[0], word1 = random.words[1], word2 = random.words[2], word3 = random.words[3];
  const uint32_t even = lane & 8 ? word2 : word0, odd = lane & 8 ? word3 : word1;
  const uint32_t signs = (lane & 4 ? odd : even) >> lane % 4 * kNeighbors;
#pragma unroll
  for (int k = 0; k < kNeighbors; ++k) values[k] *= signs & (1u << k) ? -inverse_root(kFullGroup) : inverse_root(kFullGroup);
#pragma unroll
  for (int step = kFullGroup / 2 / kNeighbors; step > 0; step /= 2) {
#pragma unroll
    for (int k = 0; k < kNeighbors; ++k) {
      const float other = float_of(__shfl_xor_sync(kAllLanes, bits_of(values[k]), step));
      values[k] = lane & step ? other - values[k] : values[k] + other;
    }
  }
  transform<kNeighbors / 2, kNeighbors>(values);
}

}  // namespace fewbit::cuda
