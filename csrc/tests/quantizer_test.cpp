// Tests of the group quantizer of every instruction set, on heap buffers of exactly the right size, against a computation of
// one element at a time.

#include <cmath>
#include <random>
#include <vector>

#include "../common/philox.h"
#include "../common/planes.h"
#include "../common/quantize.h"
#include "../cpu/quantizer.h"
#include "checks.h"

using namespace fewbit;

namespace {

std::mt19937_64 generator(20250101);

struct Case {
  int64_t samples, features;
  int group_size;
  bool fp32_min;
  int bits;
  bool mixed;
  bool fused;  // with normalization, and an affine map unless mixed
  float offset;
  int threads;
};

// The vectors over n elements, in no more memory than they need.
struct Vectors {
  VectorIndex index;
  Exact<float> first, second;
  int left_out;  // 1 or 2: the first or the second vector is missing

  explicit Vectors(int64_t n) : Vectors(index_for(n)) {}
  explicit Vectors(const VectorIndex& index) : index(index), first(index.count), second(index.count) {
    std::normal_distribution<float> normal(1.0f, 1.0f);
    for (int64_t i = 0; i < index.count; ++i) first[i] = normal(generator), second[i] = normal(generator);
    left_out = generator() % 3;
  }

  const float* first_or_null() { return left_out == 1 ? nullptr : first.data(); }
  const float* second_or_null() { return left_out == 2 ? nullptr : second.data(); }
  int64_t entry(int64_t element) const { return element / index.inner % index.count; }

 private:
  static VectorIndex index_for(int64_t n) {
    if (n == 0) return {};
    const int64_t inner = divisor_of(n);
    return {divisor_of(n / inner), inner};
  }
  // 1, n, or any.
  static int64_t divisor_of(int64_t n) {
    if (generator() % 3 == 0) return generator() % 2 ? 1 : n;
    int64_t divisor = 1 + static_cast<int64_t>(generator() % static_cast<uint64_t>(n));
    while (n % divisor != 0) --divisor;
    return divisor;
  }
};

// Returns the 16-bit random number of element i of a group.
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

  const StreamPlan plan = plan_streams(c.samples, c.features, c.group_size, c.fp32_min, c.bits,
                                       c.mixed ? widths.data() : nullptr);
  const Streams& streams = plan.streams;
  Exact<uint32_t> packed(streams.words);
  Exact<uint16_t> ranges(streams.groups * columns(c.fp32_min));
  for (int64_t i = 0; i < streams.words; ++i) packed[i] = 0xA5A5A5A5u;
  Vectors statistics(n), map(n);
  Normalization normalization{};
  if (c.fused) normalization = {statistics.first_or_null(), statistics.second.data(), statistics.index};
  const Extent extent = quantize(kernels, CopyKind::uniform, plan, x.data(), DTYPE, normalization, seed, packed.data(),
                                 ranges.data(), c.threads);
  const auto at = [&](int64_t place) {
    const float value = static_cast<float>(N::wide(x[place]));
    const int64_t entry = statistics.entry(place);
    return c.fused ? (value - mean_at(normalization, entry)) * normalization.rstd[entry] : value;
  };

  std::vector<uint32_t> expected(static_cast<size_t>(streams.words));
  Exact<T> out(n);
  Affine affine{};
  if (c.fused && !c.mixed) affine = {map.first_or_null(), map.second_or_null(), map.index};
  dequantize(kernels, CopyKind::uniform, plan, packed.data(), ranges.data(), 0, affine, out.data(), DTYPE, c.threads);

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
      const float value = at(place(i));
      least = std::fmin(least, value);
      greatest = std::fmax(greatest, value);
      clean = clean && std::isfinite(value);
      any_nan = any_nan || std::isnan(value);
    }
    all_least = std::fmin(all_least, least);
    all_greatest = std::fmax(all_greatest, greatest);
    const GroupLimits limits = limits_of(least, greatest, clean, stream.bits, c.fp32_min);
    const GroupLimits stored = load_limits(ranges.data(), c.fp32_min, number);
    CHECK(equal(limits.minimum, stored.minimum) && equal(limits.range, stored.range));
    CHECK(!clean || (limits.minimum <= least && greatest - limits.minimum <= limits.range));
    for (int i = 0; i < group.length; ++i, ++seen) {
      const float value = at(place(i));
      const uint32_t draw = draw_of(seed, number, i, c.group_size);
      const int32_t code = is_kept(limits) ? code_of(value, limits, most_of(stream.bits), draw) : 0;
      CHECK(code >= 0 && code <= top_of(stream.bits));
      const int64_t element = group.first + i;
      for (int plane = 0; plane < stream.bits; ++plane) {
        expected[static_cast<size_t>(stream.first_word + word_index(block_of(element), plane, stream.bits))] |=
            (static_cast<uint32_t>(code) >> plane & 1u) << lane_of(element);
      }
      float back = restored(code, limits.minimum, limits.range, unit_of(stream.bits));
      const int64_t entry = map.entry(place(i));
      if (affine.scale) back *= affine.scale[entry];
      if (affine.shift) back += affine.shift[entry];
      CHECK(equal(N::wide(out[place(i)]), N::wide(N::narrow(back))));
    }
  }
  CHECK(seen == n);
  CHECK(packed.values() == expected);
  if (n == 0) all_least = all_greatest = 0.0f;
  CHECK(any_nan ? std::isnan(extent.least) && std::isnan(extent.greatest)
                : extent.least == all_least && extent.greatest == all_greatest);
}

void test_all_types(const Kernels& kernels, Case c) {
  for (const bool fused : {false, true}) {
    c.fused = fused;
    test_case<float, DType::float32>(kernels, c);
    test_case<double, DType::float64>(kernels, c);
    test_case<uint16_t, DType::float16>(kernels, c);
    test_case<uint16_t, DType::bfloat16>(kernels, c);
  }
}

// Compares forward_quantized with forward followed by quantize.
template <class T, DType DTYPE>
void test_forward_case(const Kernels& kernels, const Table& table, const Case& c) {
  using N = Number<T, DTYPE>;
  const int64_t n = c.samples * c.features;
  std::normal_distribution<float> normal(c.offset, 1.0f);
  std::vector<T> numbers;
  for (int64_t i = 0; i < n; ++i) numbers.push_back(N::narrow(normal(generator)));
  if (n > 300) numbers[generator() % n] = N::narrow(generator() % 2 ? NAN : INFINITY);
  Exact<T> x(numbers), y(n), expected_y(n);
  const StreamPlan plan = plan_streams(c.samples, c.features, c.group_size, c.fp32_min, c.bits, nullptr);
  const int64_t words = packed_words(n, table.bits), rows = plan.streams.groups * columns(c.fp32_min);
  Exact<uint32_t> codes(words), expected_codes(words), packed(plan.streams.words), expected(plan.streams.words);
  Exact<uint16_t> ranges(rows), expected_ranges(rows);
  for (int64_t i = 0; i < plan.streams.words; ++i) packed[i] = 0xA5A5A5A5u;
  const uint64_t seed = generator();

  kernels.forward(0, 0.0, 0.0, table, x.data(), DTYPE, 0, n, expected_y.data(), expected_codes.data(), 0);
  const Extent extent = quantize(kernels, CopyKind::uniform, plan, expected_y.data(), DTYPE, {}, seed, expected.data(),
                                 expected_ranges.data(), 1);
  const int threads = threads_of_forward(plan.streams, c.threads);
  CHECK(threads >= 1 && threads <= c.threads);
  const Forward forward{0, 0.0, 0.0, &table, x.data(), DTYPE, y.data(), codes.data(), 0};
  const Extent found =
      forward_quantized(kernels, CopyKind::uniform, plan.streams, forward, seed, packed.data(), ranges.data(), c.threads);
  for (int64_t i = 0; i < n; ++i) CHECK(equal(y[i], expected_y[i]));
  CHECK(codes.values() == expected_codes.values() && packed.values() == expected.values());
  CHECK(ranges.values() == expected_ranges.values());
  CHECK(equal(found.least, extent.least) && equal(found.greatest, extent.greatest));
}

void test_forward(const Kernels& kernels) {
  TableArrays arrays;
  arrays.breaks32 = {-1.0f, 0.0f, 1.0f};
  arrays.flips32 = {1, 3, 1};
  arrays.breaks64 = {-1.0, 0.0, 1.0};
  arrays.flips64 = {1, 3, 1};
  arrays.lut32 = {0.0f, 1.0f, 2.0f, 3.0f};
  arrays.lut64 = {0.0, 1.0, 2.0, 3.0};
  const OwnedTable table(2, 0, std::move(arrays));
  const auto test = [&](const Case& c) {
    test_forward_case<float, DType::float32>(kernels, table.get(), c);
    test_forward_case<uint16_t, DType::float16>(kernels, table.get(), c);
    test_forward_case<uint16_t, DType::bfloat16>(kernels, table.get(), c);
  };
  for (const int64_t features : {0, 1, 31, 64, 96, 257, 640}) {
    for (const int64_t samples : {0, 1, 3, 900}) {
      for (const int group_size : {32, 96, 512}) {
        const int bits = 1 + generator() % 8;
        for (const int threads : {1, 3}) {
          test({samples, features, group_size, generator() % 2 == 0, bits, false, false, 0.0f, threads});
        }
      }
    }
  }
  test({3, 40001, 65536, false, 3, false, false, 0.0f, 3});  // groups of several blocks, across words
  test({1, 100003, 256, false, 3, false, false, 0.0f, 4});
  test({2048, 65, 32, false, 3, false, false, 0.0f, 4});
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

// Tests groups whose counters need more than 32 bits, in a tensor that would not fit in memory.
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
  kernels.uniform->quantize(streams, nullptr, x.data(), DType::float32, {}, seed, first, first + count,
                              packed.data(), rows, spread);
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

void test_quantizer(const Kernels& kernels) {
  test_nearest();
  test_toward();
  test_streams();
  test_large_numbers(kernels);
  test_forward(kernels);
  for (const int64_t features : {0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 100, 255, 256, 257, 300, 640}) {
    for (const int64_t samples : {0, 1, 3, 40}) {
      for (const int group_size : {32, 96, 256, 512}) {
        for (const bool mixed : {false, true}) {
          const int bits = 1 + generator() % 8;
          test_all_types(kernels, {samples, features, group_size, generator() % 2 == 0, bits, mixed, false,
                                   generator() % 2 ? 0.0f : 10.0f, 1});
        }
      }
    }
  }
  for (int bits = 1; bits <= 8; ++bits) test_all_types(kernels, {5, 333, 256, false, bits, false, false, 0.0f, 1});
  // Enough elements for several threads, whose groups share words.
  for (const bool mixed : {false, true}) {
    test_all_types(kernels, {1501, 67, 256, false, 3, mixed, false, 1.0f, 3});
    test_all_types(kernels, {3, 40001, 32, true, 2, mixed, false, 1.0f, 4});
    test_all_types(kernels, {9001, 11, 65536, false, 2, mixed, false, 1.0f, 2});
    test_all_types(kernels, {1, 100003, 65536, false, 2, mixed, false, 1.0f, 4});
  }
}
