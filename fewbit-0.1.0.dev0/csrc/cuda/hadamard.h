// The Walsh-Hadamard transform of a group as products of matrices, which tensor cores compute.
//
// The transform of 256 numbers is H X H, where H is the transform of 16 numbers, and X has the group's numbers in any order
// that gives each bit of an element's number a bit of the row or of the column. A warp works on one group.
//
// X and H X are matrices of float16. The result is exact if the numbers are integers times one power of two, and if sixteen
// times the greatest integer is at most 2048. The levels of copies with up to kMostProductBits bits are such numbers.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/normal_levels.h"
#include "cuda/number.h"

namespace fewbit::cuda {

constexpr bool kHasProducts = FEWBIT_PAIR_INSTRUCTIONS;
constexpr int kMostProductBits = 4;

// A lane's numbers before the transform: pairs of elements that are 32 apart. i: bits 2 and 1 of their numbers. Bits 7 and 6 are
// those of the lane's number mod 4; bits 4, 3 and 0 are those of its number div 4.
struct Pairs {
  uint32_t of[4];
};

// Returns the lane's part of H, two neighbors in a row. H has four equal quarters, except that the last one is negated.
__device__ inline uint32_t part_of_transform() {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  const uint32_t odd = 0x96u;  // bit i is the parity of i
  return 0x3C003C00u | (odd >> (row & column) & 1u) << 15 | (odd >> (row & (column + 1)) & 1u) << 31;
}

// Transforms a group. values: afterwards the lane's 8 neighbors. Every lane of a warp calls it.
__device__ inline void transform(float* values, const Pairs& x, uint32_t part) {
#if FEWBIT_PAIR_INSTRUCTIONS
  const uint32_t negated = part ^ 0x80008000u;
  uint32_t y[4];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t left[4] = {part, part, part, negated}, right[2] = {x.of[j], x.of[j + 2]};
    ptx::mma_m16n8k16_f16(y + 2 * j, left, right);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t right[2] = {part, j == 0 ? part : negated};
    float z[4];
    ptx::mma_m16n8k16_f32(z, y, right);
    values[2 * j] = z[0], values[2 * j + 1] = z[1];
    values[2 * j + 4] = z[2], values[2 * j + 5] = z[3];
  }
#endif
}

// -- levels ----------------------------------------------------------------------------------------------

// Returns the upper byte of a level in float16. The lower byte of the levels of 1 and 2 bits is 0.
constexpr uint32_t byte_of(float level) {
  int exponent = 15;
  for (; level < 1.0f; level *= 2.0f) --exponent;
  for (; level >= 2.0f; level /= 2.0f) ++exponent;
  const int fraction = static_cast<int>((level - 1.0f) * 4.0f);
  return static_cast<float>(fraction) == (level - 1.0f) * 4.0f ? static_cast<uint32_t>(exponent << 2 | fraction) : 0u;
}

constexpr uint32_t kOneByte = byte_of(kNormalLevels.levels[levels_begin(1)]);
constexpr uint32_t kLowByte = byte_of(kNormalLevels.levels[levels_begin(2)]);
constexpr uint32_t kHighByte = byte_of(kNormalLevels.levels[levels_begin(2) + 1]);
static_assert(kOneByte > 0 && kLowByte > 0 && kHighByte > 0);

// Returns the bits of the lane's elements in two planes: four fields of two bits for each of two blocks, one block in each byte.
// words: those of the even plane and of the odd plane, for both blocks.
__device__ inline uint32_t two_planes(uint32_t even0, uint32_t odd0, uint32_t even1, uint32_t odd1) {
  const unsigned place = threadIdx.x % 32 / 4, shift = place % 2, byte = place / 2;
  const uint32_t mask = 0x55555555u;
  const uint32_t fields0 = (even0 >> shift & mask) | (odd0 << (1 - shift) & ~mask);
  const uint32_t fields1 = (even1 >> shift & mask) | (odd1 << (1 - shift) & ~mask);
  return __byte_perm(fields0, fields1, byte | (byte + 4) << 4);
}

// Returns the levels of codes with up to 2 bits.
__device__ inline Pairs levels_of(uint32_t codes, int bits) {
  const uint32_t levels = bits == 2 ? kLowByte | kHighByte << 8 : kOneByte | (kOneByte | 0x80u) << 8;
  const uint32_t bytes = levels | (levels | 0x8080u) << 16, mask = bits == 2 ? 0x3030u : 0x1010u;
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t shifted = i < 2 ? codes << (4 - 2 * i) : codes >> (2 * i - 4);
    pairs.of[i] = __byte_perm(bytes, 0, (shifted & mask) | 0x0404u);  // 4 selects a zero
  }
  return pairs;
}

// Returns the levels of codes with 3 or 4 bits. signed_levels: those of these bits.
__device__ inline Pairs levels_of(uint32_t low, uint32_t high, const float* signed_levels) {
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t codes = (low >> 2 * i & 0x0303u) | (high >> 2 * i & 0x0303u) << 2;
    pairs.of[i] = Float16::narrow_pair(signed_levels[codes & 0xFFu], signed_levels[codes >> 8]);
  }
  return pairs;
}

// Reads the levels of a group. words: those of the group, aligned to 16 bytes.
__device__ inline Pairs read_levels(const uint32_t* words, int bits, const float* signed_levels) {
  const uint32_t* first = words + threadIdx.x % 4 * 2 * bits;
  const uint32_t* second = first + bits;
  uint4 four;  // planes 0 and 1 of both blocks
  if (bits == 2) {
    four = *reinterpret_cast<const uint4*>(first);
  } else {
    four = {first[0], bits > 1 ? first[1] : 0u, second[0], bits > 1 ? second[1] : 0u};
  }
  const uint32_t low = two_planes(four.x, four.y, four.z, four.w);
  if (bits <= 2) return levels_of(low, bits);
  return levels_of(low, two_planes(first[2], bits > 3 ? first[3] : 0u, second[2], bits > 3 ? second[3] : 0u), signed_levels);
}

}  // namespace fewbit::cuda
