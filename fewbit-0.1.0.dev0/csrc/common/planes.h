// Index arithmetic of the packed format: bit-planes over blocks of 32 elements.
//
// Bit p of element e = 32 k + i is bit i of the 32-bit word k * bits + p. All indices are 64-bit.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

constexpr int kBlock = 32;    // elements per block, and bits per word
constexpr int kMaxBits = 8;   // planes per block, at most

FEWBIT_HD constexpr int64_t block_count(int64_t n) { return n / kBlock + (n % kBlock != 0); }

FEWBIT_HD constexpr int64_t packed_words(int64_t n, int bits) { return block_count(n) * bits; }

// The block of an element, and the element's place in the block.
FEWBIT_HD constexpr int64_t block_of(int64_t element) { return element / kBlock; }
FEWBIT_HD constexpr int lane_of(int64_t element) { return static_cast<int>(element % kBlock); }

FEWBIT_HD constexpr int64_t word_index(int64_t block, int plane, int bits) {
  return block * bits + plane;
}

// A mask of the elements of a block that exist if the tensor has n.
FEWBIT_HD constexpr uint32_t valid_lanes(int64_t block, int64_t n) {
  return n - block * kBlock >= kBlock ? 0xFFFFFFFFu
         : n <= block * kBlock        ? 0u
                                      : (1u << (n - block * kBlock)) - 1u;
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
