// Tests of rotated and masked copies of every instruction set.

#include <cstring>

#include "../common/rotate.h"
#include "../cpu/quantizer.h"
#include "checks.h"
#include "copies.h"

using namespace fewbit;
using namespace fewbit::tests;

namespace {

void test_seed_rows() {
  const uint64_t seed = 0xFEDCBA9876543210u;
  const uint16_t expected[4] = {0x3210, 0x7654, 0xBA98, 0xFEDC};
  uint16_t rows[4];
  store_seed(seed, rows);
  CHECK(std::memcmp(rows, expected, sizeof expected) == 0 && load_seed(rows) == seed);
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
      test({3, features, group_size, any_bits(), any_bool(), any_look(), 1});
    }
    for (int bits = 1; bits <= 8; ++bits) {
      for (const int group_size : sizes) test({2, 1030, group_size, bits, false, Look::relu, 1});
    }
    for (int look = 0; look <= static_cast<int>(Look::last); ++look) {
      for (const int64_t features : {40, 256, 300, 1025}) {
        test({3, features, 256, any_bits(), false, static_cast<Look>(look), 1});
        test({1, features, 96, any_bits(), false, static_cast<Look>(look), 1});
      }
    }
    // Enough elements for several threads, whose groups share words.
    test({1001, 67, 256, 3, true, Look::normal, 3});
    test({9, 8001, 256, 2, false, Look::offset, 4});
    test_forward(kernels, kind, kFullGroup);
  }
}
