// The tables of normal levels in the layouts that the inner loops of rotated copies read.
#pragma once

#include "../common/normal_levels.h"
#include "../common/planes.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

// The values of all codes, so that `look_up` needs no case for signs. At least 16 entries can be read.
template <int BITS>
struct CodeLevels {
  float values[BITS < 4 ? 16 : 1 << BITS];

  constexpr CodeLevels() : values() {
    constexpr int half = 1 << (BITS - 1);
    for (int i = 0; i < half; ++i) {
      values[i] = kNormalLevels.levels[levels_begin(BITS) + i];
      values[half + i] = -values[i];
    }
  }
};

// The positive levels. At least 16 entries can be read.
template <int BITS>
struct PositiveLevels {
  float values[BITS < 5 ? 16 : 1 << (BITS - 1)];

  constexpr PositiveLevels() : values() {
    for (int i = 0; i < 1 << (BITS - 1); ++i) values[i] = kNormalLevels.levels[levels_begin(BITS) + i];
  }
};

// The positive breaks in the order of a binary search. Step number s has 2^s breaks from place 2^s on. The number of the break
// among them has one bit for each outcome of the earlier steps, the first one highest. After the last step the outcomes are
// the index.
template <int BITS>
struct SearchBreaks {
  static constexpr int kCount = 1 << (BITS - 1);
  alignas(64) float values[kCount];

  constexpr SearchBreaks() : values() {
    for (int step = 0; step < BITS - 1; ++step) {
      const int apart = 1 << (BITS - 2 - step);
      for (int i = 0; i < 1 << step; ++i) {
        values[(1 << step) + i] = kNormalLevels.breaks[breaks_begin(BITS) + (2 * i + 1) * apart - 1];
      }
    }
  }
};

// The breaks for 4 bits, one for each bucket. A bucket is an interval of magnitudes, in units of the group's root mean square,
// which contains at most one break: that one, or else the next one, or else the last one. below: the number of breaks below it.
struct Buckets {
  static constexpr int kCount = 16;
  static constexpr float kWidth = 0.19f;  // every break is at least a fifth of it away from the ends of its bucket
  alignas(64) float breaks[kCount];
  alignas(64) int32_t below[kCount];

  constexpr Buckets() : breaks(), below() {
    constexpr int last = 6;
    const float* all = kNormalLevels.breaks + breaks_begin(4);
    for (int i = 0; i < kCount; ++i) {
      while (below[i] < last && all[below[i]] < kWidth * static_cast<float>(i)) ++below[i];
      breaks[i] = all[below[i]];
    }
  }
};

template <int BITS>
constexpr CodeLevels<BITS> kCodeLevels{};
template <int BITS>
constexpr PositiveLevels<BITS> kPositiveLevels{};
template <int BITS>
constexpr SearchBreaks<BITS> kSearchBreaks{};
constexpr Buckets kBuckets{};

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
