// The seeds that a counter gives: numbers of the generator SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fewbit {

constexpr uint64_t kSeedStep = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio

inline namespace FEWBIT_NAMESPACE {

// Returns the counter after `count` seeds were drawn.
FEWBIT_HD constexpr uint64_t advanced(uint64_t counter, int64_t count) { return counter + static_cast<uint64_t>(count) * kSeedStep; }

// Returns seed number `index` of those that are drawn next.
FEWBIT_HD constexpr uint64_t drawn_seed(uint64_t counter, int64_t index) {
  uint64_t z = advanced(counter, index + 1);
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
