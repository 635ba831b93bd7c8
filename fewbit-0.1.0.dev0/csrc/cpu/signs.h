// The random numbers of rotated copies: signs, and the rounding of scales.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/rotate.h"
#include "draws.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

constexpr int kSignQuarters = 4;  // 64-bit words with the signs of a group: bit i mod 64 of word i div 64 is that of number i

// Computes the random numbers of kBatch groups at a time.
class Signs {
 public:
  // The seed is that of the copy.
  explicit Signs(uint64_t seed) : keys_(seed) {}

  // Returns the signs of a group's first transform in the first rotation. The result is valid until the next call.
  const uint64_t* first(int64_t group) {
    seek(group);
    return signs_[group - begin_];
  }

  // Returns the random number that rounds the scale of a group.
  uint32_t rounding(int64_t group) {
    seek(group);
    return static_cast<uint32_t>(rounding_[group - begin_]);
  }

  // Returns the signs of any transform, see sign_counter. The result is valid until the next call for another group.
  const uint64_t* of(int64_t group, int rotation, int transform) {
    if (group != group_) {
      group_ = group;
      fill_all();
    }
    return all_signs_ + kSignQuarters / 2 * sign_counter(rotation, transform);
  }

 private:
  static constexpr int kBatch = 8;

  void seek(int64_t group) {
    if (group / kBatch * kBatch != begin_) {
      begin_ = group / kBatch * kBatch;
      fill();
    }
  }

  void fill() {
    constexpr int kLanes = sizeof(Lanes) / sizeof(uint64_t);
    constexpr int kVectors = 3;  // counters 0 and 1, for signs, and kRoundingCounter
    const uint64_t first = group_counter(begin_);
    uint64_t quarters[kSignQuarters][kBatch];
    for (int i = 0; i < kBatch; i += kLanes) {
      Lanes counters = {};
      for (int lane = 0; lane < kLanes; ++lane) {
        counters[lane] = static_cast<uint32_t>(first) + static_cast<uint32_t>(kCountersOfGroup * (i + lane));
      }
      const Lanes lower[kVectors] = {counters, counters + uint64_t{1}, counters + uint64_t{kRoundingCounter}};
      Lanes all[4][kVectors];
      // begin_ is a multiple of kBatch, so all counters have the same upper word.
      philox_lanes<kVectors>(keys_, lower, first >> 32, all);
      for (int quarter = 0; quarter < kSignQuarters; ++quarter) {
        const int word = quarter % 2 * 2;
        const Lanes both = all[word + 1][quarter / 2] << 32 | (all[word][quarter / 2] & uint64_t{0xFFFFFFFFu});
        memcpy(quarters[quarter] + i, &both, sizeof both);
      }
      memcpy(rounding_ + i, &all[0][2], sizeof(Lanes));
    }
    for (int group = 0; group < kBatch; ++group) {
      for (int quarter = 0; quarter < kSignQuarters; ++quarter) signs_[group][quarter] = quarters[quarter][group];
    }
  }

  // Computes the signs of all transforms of group_.
  void fill_all() {
    constexpr int kLanes = sizeof(Lanes) / sizeof(uint64_t);
    const uint64_t first = group_counter(group_);
    for (int i = 0; i < kSignCounters; i += kLanes) {
      Lanes counters = {}, words[4][1];
      for (int lane = 0; lane < kLanes; ++lane) counters[lane] = static_cast<uint32_t>(first) + static_cast<uint32_t>(i + lane);
      // Counters of groups are multiples of kCountersOfGroup, so all have the same upper word.
      philox_lanes<1>(keys_, &counters, first >> 32, words);
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int half = 0; half < 2; ++half) {
          const uint64_t lower = words[2 * half][0][lane], upper = words[2 * half + 1][0][lane];
          all_signs_[2 * (i + lane) + half] = upper << 32 | static_cast<uint32_t>(lower);
        }
      }
    }
  }

  static constexpr int kSignCounters = 8;  // of a group

  const DrawKeys keys_;
  int64_t begin_ = -1;  // the first group whose numbers are in the arrays
  uint64_t signs_[kBatch][kSignQuarters];
  uint64_t rounding_[kBatch];  // in the lower halves
  int64_t group_ = -1;         // the group whose signs are in all_signs_
  uint64_t all_signs_[2 * kSignCounters];
};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
