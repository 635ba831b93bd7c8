// Writes the words of a stream in order. Groups may begin and end inside a block.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/planes.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

// A block that two threads write, one up to a group and the other from that group on, holds zeros before either begins
// (clear_edge of quantizer.cpp), and gets its bits by atomic operations.
class WordWriter {
 public:
  // words: those of the stream; first: the element to begin with.
  WordWriter(uint32_t* words, int bits, int64_t first)
      : out_(words + word_index(block_of(first), 0, bits)), bits_(bits), filled_(lane_of(first)), shared_(filled_) {}

  // Returns the address for the words of the next m elements and moves on. Returns null if the words have to be `put`.
  uint32_t* direct(int m) {
    if (filled_ != 0 || m % kBlock != 0) return nullptr;
    uint32_t* here = out_;
    out_ += m / kBlock * bits_;
    return here;
  }

  // Writes the next m elements, from words that begin with them.
  void put(const uint32_t* words, int m) {
    for (int left = m; left > 0; left -= kBlock, words += bits_) {
      const int count = left < kBlock ? left : kBlock;
      const uint32_t valid = valid_lanes(0, count);
      const bool full = filled_ + count >= kBlock;
      uint32_t done[kMaxBits];
      for (int plane = 0; plane < bits_; ++plane) {
        const uint64_t both = carried_[plane] | static_cast<uint64_t>(words[plane] & valid) << filled_;
        done[plane] = static_cast<uint32_t>(both);
        carried_[plane] = full ? static_cast<uint32_t>(both >> kBlock) : done[plane];
      }
      filled_ += count;
      if (full) {
        filled_ -= kBlock;
        emit(done, shared_);
        shared_ = false;
      }
    }
  }

  // Writes the rest of a block. end: no elements follow in the stream.
  void finish(bool end) {
    if (filled_ != 0) emit(carried_, shared_ || !end);
  }

 private:
  void emit(const uint32_t* words, bool shared) {
    for (int plane = 0; plane < bits_; ++plane) {
      if (shared) {
        __atomic_fetch_or(out_ + plane, words[plane], __ATOMIC_RELAXED);
      } else {
        out_[plane] = words[plane];
      }
    }
    out_ += bits_;
  }

  uint32_t* out_;
  int bits_;
  int filled_;   // the number of elements of the block at out_ that are known
  bool shared_;  // true if another thread writes to that block too
  uint32_t carried_[kMaxBits] = {};
};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
