// Tests of uniform copies of every instruction set.

#include <cmath>
#include <vector>

#include "../common/philox.h"
#include "../common/planes.h"
#include "../common/quantize.h"
#include "../cpu/quantizer.h"
#include "checks.h"
#include "copies.h"

using namespace fewbit;
using namespace fewbit::tests;

namespace {

// Returns the 16-bit random number of element i of a group.
uint32_t draw_of(uint64_t seed, int64_t group, int i, int group_size) {
  const int64_t padded = (group_size + 255) / 256 * 256, e = group * padded + i;
  const PhiloxWords words = philox_words(seed, static_cast<uint64_t>(e / 256 * 32 + e % 32));
  const int half = static_cast<int>(e / 32 % 8);
  return words.words[half / 2] >> 16 * (half % 2) & 0xFFFFu;
}

void test_nearest() {
  for (uint32_t bits = 0; bits <= bits_of(0x1p24f); bits += 61) {
    const float value = float_of(bits);
    CHECK(nearest(value) == static_cast<int32_t>(std::nearbyintf(value)));
  }
  for (int i = 0; i < 1 << 16; ++i) {
    const float half = static_cast<float>(i) + 0.5f;
    CHECK(nearest(half) == static_cast<int32_t>(std::nearbyintf(half)));
  }
}

void test_toward() {
  for (int i = 0; i < 100000; ++i) {
    const float x = float_of(static_cast<uint32_t>(generator()));
    if (!std::isfinite(x)) continue;
    const float down = toward_bfloat16(x, false), up = toward_bfloat16(x, true);
    CHECK(down <= x && x <= up);
    CHECK((bits_of(down) & 0xFFFFu) == 0 && (bits_of(up) & 0xFFFFu) == 0);
    const bool exact = (bits_of(x) & 0xFFFFu) == 0;
    CHECK(exact ? down == x && up == x : down < x && x < up);
  }
}

void test_streams() {
  const int64_t counts[9] = {0, 2, 0, 1, 0, 0, 0, 0, 3};
  const Streams streams = mixed_streams(counts, 65, 32);
  CHECK(streams.groups == 6 * 3);
  CHECK(streams.words == 5 + 3 * 3 + 8 * 7);
  CHECK(&stream_of(streams, 0) == streams.of && &stream_of(streams, 5) == streams.of);
  CHECK(stream_of(streams, 6).bits == 3 && stream_of(streams, 9).bits == 8);
  CHECK(group_at(streams, streams.of[7], 5).first == 65 + 64 && group_at(streams, streams.of[7], 5).length == 1);
  const int64_t n = (int64_t{1} << 33) + 5;
  const Streams large = one_stream(n, 3, 256, 8);
  CHECK(large.groups == quotient_up(3 * n, 256));
  CHECK(large.words == 8 * quotient_up(3 * n, 32));
  CHECK(group_at(large, large.of[0], large.groups - 1).first == (large.groups - 1) * 256);
  CHECK(first_counter(large.groups - 1, 0, 256) == static_cast<uint64_t>(32 * (large.groups - 1)));
}

// Tests groups whose counters need more than 32 bits, in a tensor that would not fit in memory.
void test_large_numbers(const Kernels& kernels) {
  const int64_t first = (int64_t{1} << 33) + 3;
  Streams streams = one_stream(1, 700, 256, 4);
  const int64_t count = streams.groups;
  streams.of[0].first_group = first;
  streams.groups += first;
  std::vector<float> x;
  for (int i = 0; i < 700; ++i) x.push_back(static_cast<float>(i * i % 701));
  const uint64_t seed = generator();
  Exact<uint32_t> packed(streams.words);
  Exact<uint16_t> ranges(kColumns * count);
  uint16_t* rows = reinterpret_cast<uint16_t*>(reinterpret_cast<uintptr_t>(ranges.data()) - 4u * first);
  kernels.uniform->quantize(streams, nullptr, x.data(), DType::float32, {}, seed, first, first + count, packed.data(), rows);
  for (int i = 0; i < 700; ++i) {
    const GroupLimits stored = load_limits(ranges.data(), i / 256);
    const GroupLimits limits = limits_of(stored.minimum, stored.minimum + stored.range, true, 4);
    const uint32_t draw = draw_of(seed, first + i / 256, i % 256, 256);
    const int32_t code = code_of(x[static_cast<size_t>(i)], limits, most_of(4), draw);
    for (int plane = 0; plane < 4; ++plane) {
      CHECK((packed[word_index(i / 32, plane, 4)] >> i % 32 & 1) == (static_cast<uint32_t>(code) >> plane & 1));
    }
  }
}

}  // namespace

void test_quantizer(const Kernels& kernels) {
  const auto test = [&](const Case& c) { test_all_types(kernels, CopyKind::uniform, c); };
  test_nearest();
  test_toward();
  test_streams();
  test_large_numbers(kernels);
  test_forward(kernels, CopyKind::uniform, kMostGroupSize);
  for (const int64_t features : {0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 100, 255, 256, 257, 300, 640}) {
    for (const int64_t samples : {0, 1, 3, 40}) {
      for (const int group_size : {32, 96, 256, 512}) {
        for (const bool mixed : {false, true}) {
          test({samples, features, group_size, any_bits(), mixed, any_look(), 1});
        }
      }
    }
  }
  for (int bits = 1; bits <= 8; ++bits) test({5, 333, 256, bits, false, Look::nan, 1});
  // Enough elements for several threads, whose groups share words.
  for (const bool mixed : {false, true}) {
    test({1501, 67, 256, 3, mixed, Look::infinite, 3});
    test({3, 40001, 32, 2, mixed, Look::offset, 4});
    test({9001, 11, kMostGroupSize, 2, mixed, Look::normal, 2});
    test({1, 100003, kMostGroupSize, 2, mixed, Look::normal, 4});
  }
}
