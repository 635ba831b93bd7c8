// Tests of rotated, masked and unbiased copies of every instruction set.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "../common/unbiased.h"
#include "../cpu/quantizer.h"
#include "checks.h"
#include "copies.h"

using namespace fewbit;
using namespace fewbit::tests;

namespace {

// Random codes of all numbers of bits, as the kernels read them.
struct RandomCodes {
  Exact<float> all;

  RandomCodes() : all(kUnbiasedFloats) {
    for (int bits = 1; bits <= 8; ++bits) make(bits, all.data() + 8 + 3 * code_sizes_before(bits));
  }

 private:
  // Walks the states of the code by ascending slopes.
  void make(int bits, float* levels) {
    const int size = code_size(bits), columns = 1 << bits, rows = size / columns;
    std::normal_distribution<float> normal;
    for (int i = 0; i < size; ++i) levels[i] = normal(generator);
    std::vector<std::pair<double, int>> transitions;
    double mean = 0.0;
    for (int row = 0; row < rows; ++row) {
      float* own = levels + row * columns;
      std::sort(own, own + columns);
      mean += own[0];
      for (int c = 0; c < columns - 1; ++c) {
        transitions.emplace_back(static_cast<double>(own[c]) + own[c + 1], row * columns + c);
      }
    }
    std::sort(transitions.begin(), transitions.end());
    mean /= rows;
    for (const auto& [slope, i] : transitions) {
      const double gap = (static_cast<double>(levels[i + 1]) - levels[i]) / rows;
      levels[size + i] = static_cast<float>(mean);
      levels[2 * size + i] = static_cast<float>(gap);
      mean += gap;
    }
    all[bits - 1] = static_cast<float>(1.0 / std::fabs(mean));
  }
};

void test_seed_rows() {
  const uint64_t seed = 0xFEDCBA9876543210u;
  const uint16_t two[4] = {0x3210, 0x7654, 0xBA98, 0xFEDC}, three[6] = {0x3210, 0x7654, 0xBA98, 0xFEDC, 0, 0};
  uint16_t rows[6];
  store_seed(seed, false, rows);
  CHECK(std::memcmp(rows, two, sizeof two) == 0 && load_seed(rows) == seed);
  store_seed(seed, true, rows);
  CHECK(std::memcmp(rows, three, sizeof three) == 0 && load_seed(rows) == seed);
}

}  // namespace

void test_rotated(const Kernels& kernels) {
  test_seed_rows();
  for (const bool is_masked : {false, true}) {
    const CopyKind kind = is_masked ? CopyKind::masked : CopyKind::rotated;
    const auto test = [&](const Case& c) { test_all_types(kernels, kind, c); };
    const int sizes[] = {32, 64, 96, 128, 224, 256};
    for (int64_t features = 0; features <= 600; features += features < 70 ? 1 : 7) {
      const int group_size = sizes[generator() % 6];
      test({3, features, group_size, any_bool(), any_bits(), any_bool(), any_look(), 1});
    }
    for (int bits = 1; bits <= 8; ++bits) {
      for (const int group_size : sizes) test({2, 1030, group_size, any_bool(), bits, false, Look::relu, 1});
    }
    for (int look = 0; look <= static_cast<int>(Look::last); ++look) {
      for (const int64_t features : {40, 256, 300, 1025}) {
        test({3, features, 256, look % 2 == 0, any_bits(), false, static_cast<Look>(look), 1});
        test({1, features, 96, look % 2 == 1, any_bits(), false, static_cast<Look>(look), 1});
      }
    }
    // Enough elements for several threads, whose groups share words.
    test({1001, 67, 256, false, 3, true, Look::normal, 3});
    test({9, 8001, 256, true, 2, false, Look::offset, 4});
    test_forward(kernels, kind, kFullGroup);
  }
}

void test_unbiased(const Kernels& kernels) {
  RandomCodes codes;
  const auto test = [&](const Case& c) { test_all_types(kernels, CopyKind::unbiased, c, codes.all.data()); };
  const int sizes[] = {32, 64, 96, 128, 224, 256};
  for (int64_t features = 0; features <= 600; features += features < 70 ? 3 : 29) {
    test({3, features, sizes[generator() % 6], any_bool(), any_bits(), any_bool(), any_look(), 1});
  }
  for (int bits = 1; bits <= 8; ++bits) test({2, 1030, 256, any_bool(), bits, false, Look::normal, 1});
  for (int look = 0; look <= static_cast<int>(Look::last); ++look) {
    test({3, 300, 256, look % 2 == 0, any_bits(), false, static_cast<Look>(look), 1});
  }
  test({1001, 67, 256, false, 3, true, Look::normal, 3});
}
