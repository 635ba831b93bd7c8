#include "cpu/checksum.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace fewbit {
namespace {

constexpr int64_t kPart = int64_t{1} << 20;  // the bytes that one thread reads at a time
constexpr uint64_t kWideFactor = 0x9E3779B97F4A7C15u;

// Returns the next value of a checksum to which a word is added.
uint64_t mixed(uint64_t sum, uint64_t word) {
  sum = (sum ^ word) * kWideFactor;
  return sum ^ sum >> 32;
}

// Each lane takes every kChecksumLanes-th word.
uint64_t of_part(const Kernels& kernels, const char* data, int64_t bytes) {
  uint32_t lanes[kChecksumLanes] = {};
  constexpr int64_t kRow = sizeof lanes;
  const int64_t rows = bytes / kRow;
  kernels.mix_rows(data, rows, lanes);
  uint64_t sum = mixed(0, static_cast<uint64_t>(bytes));
  if (rows) {
    for (int lane = 0; lane < kChecksumLanes; lane += 2) {
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

uint64_t checksum(const Kernels& kernels, const void* data, int64_t bytes, int threads) {
  const char* const begin = static_cast<const char*>(data);
  if (bytes <= kPart) return of_part(kernels, begin, bytes);
  const int64_t parts = (bytes + kPart - 1) / kPart;
  std::vector<uint64_t> sums(static_cast<size_t>(parts));
  auto work = [&](int index, int count) {
    for (int64_t part = index; part < parts; part += count) {
      const int64_t first = part * kPart;
      sums[static_cast<size_t>(part)] = of_part(kernels, begin + first, std::min(kPart, bytes - first));
    }
  };
  run_parallel(static_cast<int>(std::min<int64_t>(threads, parts)), work);
  uint64_t sum = 0;
  for (const uint64_t one : sums) sum = mixed(sum, one);
  return sum;
}

}  // namespace fewbit
