// The group quantiser of every instruction set on heap buffers of exactly the right size, compared with one
// element at a time.

#include <cmath>
#include <random>
#include <vector>

#include "../common/philox.h"
#include "../common/planes.h"
#include "../common/quantise.h"
#include "../cpu/quantiser.h"
#include "checks.h"

using namespace fewbit;

namespace {

std::mt19937_64 generator(20250101);

struct Case {
  int64_t samples, features;
  int group_size;
  bool wide;
  int bits;
  bool mixed;
  float offset;
  int threads;
};

// The 16-bit draw of element i of a group.
uint32_t draw_of(uint64_t seed, int64_t group, int i, int group_size) {
  const int64_t padded = (group_size + 255) / 256 * 256, e = group * padded + i;
  const PhiloxWords words = philox_words(seed, static_cast<uint64_t>(e / 256 * 32 + e % 32));
  const int half = static_cast<int>(e / 32 % 8);
  return words.words[half / 2] >> 16 * (half % 2) & 0xFFFFu;
}

template <class T, DType DTYPE>
void test_case(const Kernels& kernels, const Case& c) {
  using N = Number<T, DTYPE>;
  const int64_t n = c.samples * c.features;
  std::normal_distribution<float> normal(c.offset, 1.0f);
  std::vector<T> numbers;
  for (int64_t i = 0; i < n; ++i) numbers.push_back(N::narrow(normal(generator)));
  if (n > 300) numbers[generator() % n] = N::narrow(generator() % 2 ? NAN : INFINITY);
  Exact<T> x(numbers);
  std::vector<uint8_t> widths;
  for (int64_t i = 0; i < c.samples; ++i) widths.push_back(c.mixed ? 1 + generator() % 8 : c.bits);
  const uint64_t seed = generator();

  const StreamPlan plan = plan_streams(c.samples, c.features, c.group_size, c.wide, c.bits,
                                       c.mixed ? widths.data() : nullptr);
  const Streams& streams = plan.streams;
  Exact<uint32_t> packed(streams.words);
  Exact<uint16_t> ranges(streams.groups * columns(c.wide));
  for (int64_t i = 0; i < streams.words; ++i) packed[i] = 0xA5A5A5A5u;
  const Extent extent = quantise(kernels, plan, x.data(), DTYPE, seed, packed.data(), ranges.data(), c.threads);

  std::vector<uint32_t> expected(static_cast<size_t>(streams.words));
  Exact<T> out(n);
  dequantise(kernels, plan, packed.data(), ranges.data(), out.data(), DTYPE, c.threads);

  float all_least = INFINITY, all_greatest = -INFINITY;
  bool any_nan = false;
  int64_t seen = 0;
  for (int64_t number = 0; number < streams.groups; ++number) {
    const Stream& stream = stream_of(streams, number);
    const Group group = group_at(streams, stream, number - stream.first_group);
    const auto place = [&](int i) {
      const int64_t sample = stream.first_sample + (group.first + i) / c.features;
      const int64_t from = plan.order.empty() ? sample : plan.order[static_cast<size_t>(sample)];
      CHECK(widths[static_cast<size_t>(from)] == stream.bits);
      return from * c.features + (group.first + i) % c.features;
    };
    float least = INFINITY, greatest = -INFINITY;
    bool clean = true;
    for (int i = 0; i < group.length; ++i) {
      const float value = static_cast<float>(N::wide(x[place(i)]));
      least = std::fmin(least, value);
      greatest = std::fmax(greatest, value);
      clean = clean && std::isfinite(value);
      any_nan = any_nan || std::isnan(value);
    }
    all_least = std::fmin(all_least, least);
    all_greatest = std::fmax(all_greatest, greatest);
    const GroupLimits limits = limits_of(least, greatest, clean, stream.bits, c.wide);
    const GroupLimits stored = load_limits(ranges.data(), c.wide, number);
    CHECK(equal(limits.minimum, stored.minimum) && equal(limits.range, stored.range));
    CHECK(!clean || (limits.minimum <= least && greatest - limits.minimum <= limits.range));
    for (int i = 0; i < group.length; ++i, ++seen) {
      const float value = static_cast<float>(N::wide(x[place(i)]));
      const uint32_t draw = draw_of(seed, number, i, c.group_size);
      const int32_t code = is_kept(limits) ? code_of(value, limits, most_of(stream.bits), draw) : 0;
      CHECK(code >= 0 && code <= top_of(stream.bits));
      const int64_t element = group.first + i;
      for (int plane = 0; plane < stream.bits; ++plane) {
        expected[static_cast<size_t>(stream.first_word + word_index(block_of(element), plane, stream.bits))] |=
            (static_cast<uint32_t>(code) >> plane & 1u) << lane_of(element);
      }
      const float back = restored(code, limits.minimum, limits.range, unit_of(stream.bits));
      CHECK(equal(N::wide(out[place(i)]), N::wide(N::narrow(back))));
    }
  }
  CHECK(seen == n);
  CHECK(packed.values() == expected);
  if (n == 0) all_least = all_greatest = 0.0f;
  CHECK(any_nan ? std::isnan(extent.least) && std::isnan(extent.greatest)
                : extent.least == all_least && extent.greatest == all_greatest);
}

void test_all_types(const Kernels& kernels, const Case& c) {
  test_case<float, DType::float32>(kernels, c);
  test_case<double, DType::float64>(kernels, c);
  test_case<uint16_t, DType::float16>(kernels, c);
  test_case<uint16_t, DType::bfloat16>(kernels, c);
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
  const Streams streams = mixed_streams(counts, 65, 32, false);
  CHECK(streams.groups == 6 * 3);
  CHECK(streams.words == 5 + 3 * 3 + 8 * 7);
  CHECK(&stream_of(streams, 0) == streams.of && &stream_of(streams, 5) == streams.of);
  CHECK(stream_of(streams, 6).bits == 3 && stream_of(streams, 9).bits == 8);
  CHECK(group_at(streams, streams.of[7], 5).first == 65 + 64 && group_at(streams, streams.of[7], 5).length == 1);
  const int64_t n = (int64_t{1} << 33) + 5;
  const Streams large = one_stream(n, 3, 256, false, 8);
  CHECK(large.groups == quotient_up(3 * n, 256));
  CHECK(large.words == 8 * quotient_up(3 * n, 32));
  CHECK(group_at(large, large.of[0], large.groups - 1).first == (large.groups - 1) * 256);
  CHECK(first_counter(large.groups - 1, 0, 256) == static_cast<uint64_t>(32 * (large.groups - 1)));
}

// Groups whose counters need more than 32 bits, of a tensor that would not fit this machine.
void test_large_numbers(const Kernels& kernels) {
  const int64_t first = (int64_t{1} << 33) + 3;
  Streams streams = one_stream(1, 700, 256, false, 4);
  const int64_t count = streams.groups;
  streams.of[0].first_group = first;
  streams.groups += first;
  std::vector<float> x;
  for (int i = 0; i < 700; ++i) x.push_back(static_cast<float>(i * i % 701));
  const uint64_t seed = generator();
  Exact<uint32_t> packed(streams.words);
  Exact<uint16_t> ranges(2 * count);
  uint16_t* rows = reinterpret_cast<uint16_t*>(reinterpret_cast<uintptr_t>(ranges.data()) - 4u * first);
  Spread spread{INFINITY, -INFINITY, false};
  kernels.quantiser->quantise(streams, nullptr, x.data(), DType::float32, seed, first, first + count, packed.data(),
                              rows, spread);
  for (int i = 0; i < 700; ++i) {
    const GroupLimits stored = load_limits(ranges.data(), false, i / 256);
    const GroupLimits limits = limits_of(stored.minimum, stored.minimum + stored.range, true, 4, false);
    const uint32_t draw = draw_of(seed, first + i / 256, i % 256, 256);
    const int32_t code = code_of(x[static_cast<size_t>(i)], limits, most_of(4), draw);
    for (int plane = 0; plane < 4; ++plane) {
      CHECK((packed[word_index(i / 32, plane, 4)] >> i % 32 & 1) == (static_cast<uint32_t>(code) >> plane & 1));
    }
  }
}

}  // namespace

void test_quantiser(const Kernels& kernels) {
  test_nearest();
  test_toward();
  test_streams();
  test_large_numbers(kernels);
  for (const int64_t features : {0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 100, 255, 256, 257, 300, 640}) {
    for (const int64_t samples : {0, 1, 3, 40}) {
      for (const int group_size : {32, 96, 256, 512}) {
        for (const bool mixed : {false, true}) {
          const int bits = 1 + generator() % 8;
          test_all_types(kernels, {samples, features, group_size, generator() % 2 == 0, bits, mixed,
                                   generator() % 2 ? 0.0f : 10.0f, 1});
        }
      }
    }
  }
  for (int bits = 1; bits <= 8; ++bits) test_all_types(kernels, {5, 333, 256, false, bits, false, 0.0f, 1});
  // Enough elements for several threads, whose groups share words.
  for (const bool mixed : {false, true}) {
    test_all_types(kernels, {1501, 67, 256, false, 3, mixed, 1.0f, 3});
    test_all_types(kernels, {3, 40001, 32, true, 2, mixed, 1.0f, 4});
    test_all_types(kernels, {9001, 11, 65536, false, 2, mixed, 1.0f, 2});
    test_all_types(kernels, {1, 100003, 65536, false, 2, mixed, 1.0f, 4});
  }
}
