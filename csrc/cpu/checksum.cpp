#include "cpu/checksum.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cpu/parallel.h"

namespace fewbit {
namespace {

constexpr int kLanes = 64;                   // as many as keep a processor's vector units busy
constexpr int64_t kPart = int64_t{1} << 20;  // the bytes that one thread reads at a time
constexpr uint32_t kFactor = 2654435761u;    // odd, so that no bit of an earlier word is lost
constexpr uint64_t kWideFactor = 0x9E3779B97F4A7C15u;

// Returns the next value of a checksum to which a word is added.
uint64_t mixed(uint64_t sum, uint64_t word) {
  sum = (sum ^ word) * kWideFactor;
  return sum ^ sum >> 32;
}

// Each lane takes every kLanes-th word. The shift moves high bits down: otherwise, two changed signs would cancel.
uint64_t of_part(const char* data, int64_t bytes) {
  uint32_t lanes[kLanes] = {};
  constexpr int64_t kRow = sizeof lanes;
  const int64_t rows = bytes / kRow;
  for (int64_t row = 0; row < rows; ++row) {
    uint32_t words[kLanes];
    std::memcpy(words, data + row * kRow, kRow);
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t sum = (lanes[lane] ^ words[lane]) * kFactor;
      lanes[lane] = sum ^ sum >> 15;
    }
  }
  uint64_t sum = mixed(0, static_cast<uint64_t>(bytes));
  if (rows) {
    for (int lane = 0; lane < kLanes; lane += 2) {
      sum = mixed(sum, lanes[lane] | static_cast<uint64_t>(lanes[lane + 1]) << 32);
    }
  }
  for (int64_t i = rows * kRow; i < bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data + i, static_cast<size_t>(std::min<int64_t>(sizeof word, bytes - i)));
    sum = mixed(sum, word);
  }
  return sum;
}

}  // namespace

uint64_t checksum(const void* data, int64_t bytes, int threads) {
  const char* const begin = static_cast<const char*>(data);
  if (bytes <= kPart) return of_part(begin, bytes);
  const int64_t parts = (bytes + kPart - 1) / kPart;
  std::vector<uint64_t> sums(static_cast<size_t>(parts));
  auto work = [&](int index, int count) {
    for (int64_t part = index; part < parts; part += count) {
      const int64_t first = part * kPart;
      sums[static_cast<size_t>(part)] = of_part(begin + first, std::min(kPart, bytes - first));
    }
  };
  run_parallel(static_cast<int>(std::min<int64_t>(threads, parts)), work);
  uint64_t sum = 0;
  for (const uint64_t one : sums) sum = mixed(sum, one);
  return sum;
}

}  // namespace fewbit
