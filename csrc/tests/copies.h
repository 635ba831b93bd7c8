// The tests that all kinds of copies have in common, on heap buffers of exactly the right size. All instruction sets and numbers of
// threads must give the results of the baseline on one thread, which tests/runtime/test_quantizer.py compares with the reference
// backend.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "../common/planes.h"
#include "../common/quantize.h"
#include "../cpu/quantizer.h"
#include "checks.h"

namespace fewbit::tests {

inline std::mt19937_64 generator(20250101);

// The kinds of data that cases have.
enum class Look { normal, offset, huge, tiny, constant, zero, one_hot, nan, infinite, heavy, relu, last = relu };

inline Look any_look() { return static_cast<Look>(generator() % (static_cast<uint64_t>(Look::last) + 1)); }
inline int any_bits() { return 1 + static_cast<int>(generator() % 8); }
inline bool any_bool() { return generator() % 2 == 0; }

struct Case {
  int64_t samples, features;
  int group_size;
  int bits;
  bool mixed;  // samples have bits of their own
  Look look;
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

template <class T, DType DTYPE>
std::vector<T> elements_of(const Case& c) {
  std::normal_distribution<float> normal;
  const int64_t n = c.samples * c.features;
  const int64_t special = n > 0 ? static_cast<int64_t>(generator() % static_cast<uint64_t>(n)) : 0;
  std::vector<T> numbers;
  for (int64_t i = 0; i < n; ++i) {
    float x = normal(generator);
    if (c.look == Look::offset) x += 1000.0f;
    if (c.look == Look::huge) x *= DTYPE == DType::float16 ? 20000.0f : 1e38f;
    if (c.look == Look::tiny) x *= DTYPE == DType::float16 ? 1e-7f : 1e-40f;
    if (c.look == Look::constant) x = 3.7f;
    if (c.look == Look::zero) x = i % 2 ? 0.0f : -0.0f;
    if (c.look == Look::one_hot) x = i == special ? -5.0f : 0.0f;
    if (c.look == Look::nan && i == special) x = NAN;
    if (c.look == Look::infinite && i == special) x = -INFINITY;
    if (c.look == Look::heavy) x = x * x * x;
    if (c.look == Look::relu) x = std::fmax(x, 0.0f);
    numbers.push_back(Number<T, DTYPE>::narrow(x));
  }
  return numbers;
}

template <class T>
struct CopyResults {
  std::vector<uint32_t> packed;
  std::vector<uint16_t> ranges;
  std::vector<T> values;
  std::vector<float> squares;
  std::vector<uint16_t> channels;
};

// is_fused: with normalization, and an affine map unless samples are mixed. Otherwise half of the copies that are not uniform have
// a mask.
template <class T, DType DTYPE>
void test_case(const Kernels& kernels, CopyKind kind, const Case& c, bool is_fused) {
  using N = Number<T, DTYPE>;
  const int64_t n = c.samples * c.features;
  Exact<T> x(elements_of<T, DTYPE>(c));
  std::vector<uint8_t> widths;
  for (int64_t i = 0; i < c.samples; ++i) widths.push_back(static_cast<uint8_t>(c.mixed ? any_bits() : c.bits));
  const uint64_t seed = generator();
  const StreamPlan plan = plan_streams(c.samples, c.features, c.group_size, c.bits, c.mixed ? widths.data() : nullptr);
  const Streams& streams = plan.streams;
  Vectors statistics(n), map(n);
  Normalization normalization{};
  if (is_fused) normalization = {statistics.first_or_null(), statistics.second.data(), statistics.index, {}};
  ValueMap value_map{};
  Exact<uint32_t> mask(packed_words(n, 1));
  for (int64_t i = 0; i < packed_words(n, 1); ++i) mask[i] = static_cast<uint32_t>(generator());
  if (is_fused && !c.mixed) value_map = {map.first_or_null(), map.second_or_null(), map.index, nullptr, {}};
  if (!is_fused && kind != CopyKind::uniform && any_bool()) value_map.mask = mask.data();

  // The channels are as many as there are vectors' entries with other entries beside them.
  const bool has_channels = kind == CopyKind::rotated && n > 0 && any_bool() && !(c.mixed && c.features < kLeastFeatures);
  const int64_t channels = has_channels ? Vectors(n).index.count : 0;

  const auto run = [&](const Kernels& by, int threads) {
    Exact<uint16_t> stored(2 * channels);
    if (has_channels) {
      Normalization rows = normalization;
      channel_statistics(by, x.data(), DTYPE, rows, n / channels, channels, stored.data(), threads);
    }
    const OwnedChannels numbers(has_channels ? StoredChannels{stored.data(), channels} : StoredChannels{});
    normalization.channels = value_map.channels = numbers.get();
    Exact<uint32_t> packed(streams.words);
    Exact<uint16_t> ranges(streams.groups * kColumns);
    for (int64_t i = 0; i < streams.words; ++i) packed[i] = 0xA5A5A5A5u;
    quantize(by, kind, plan, x.data(), DTYPE, normalization, seed, packed.data(), ranges.data(), threads);
    Exact<T> out(n);
    dequantize(by, kind, plan, packed.data(), ranges.data(), seed, value_map, out.data(), DTYPE, threads);
    Exact<float> of_groups(c.mixed ? 0 : streams.groups);
    if (!c.mixed) squares(by, kind, streams, x.data(), DTYPE, normalization, of_groups.data(), threads);
    normalization.channels = value_map.channels = {};
    return CopyResults<T>{packed.values(), ranges.values(), out.values(), of_groups.values(), stored.values()};
  };
  const CopyResults<T> found = run(kernels, c.threads), expected = run(*kernels_of("baseline"), 1);
  CHECK(found.packed == expected.packed && found.ranges == expected.ranges && found.channels == expected.channels);
  for (size_t i = 0; i < found.values.size(); ++i) {
    CHECK(equal(N::wide(found.values[i]), N::wide(expected.values[i])));  // NaNs may differ in their signs
  }
  for (size_t i = 0; i < found.squares.size(); ++i) CHECK(equal(found.squares[i], expected.squares[i]));
}

inline void test_all_types(const Kernels& kernels, CopyKind kind, const Case& c) {
  for (const bool is_fused : {false, true}) {
    test_case<float, DType::float32>(kernels, kind, c, is_fused);
    test_case<uint16_t, DType::float16>(kernels, kind, c, is_fused);
    test_case<uint16_t, DType::bfloat16>(kernels, kind, c, is_fused);
  }
}

// Compares forward_quantized with forward followed by quantize.
template <class T, DType DTYPE>
void test_forward_case(const Kernels& kernels, CopyKind kind, const Table& table, const Case& c) {
  const int64_t n = c.samples * c.features;
  Exact<T> x(elements_of<T, DTYPE>(c)), y(n), expected_y(n);
  const StreamPlan plan = plan_streams(c.samples, c.features, c.group_size, c.bits, nullptr);
  const int64_t words = packed_words(n, table.bits), rows = plan.streams.groups * kColumns;
  Exact<uint32_t> codes(words), expected_codes(words), packed(plan.streams.words), expected(plan.streams.words);
  Exact<uint16_t> ranges(rows), expected_ranges(rows);
  for (int64_t i = 0; i < plan.streams.words; ++i) packed[i] = 0xA5A5A5A5u;
  const uint64_t seed = generator();

  kernels.forward(0, 0.0, 0.0, table, x.data(), DTYPE, 0, n, expected_y.data(), expected_codes.data(), 0);
  quantize(kernels, kind, plan, expected_y.data(), DTYPE, {}, seed, expected.data(), expected_ranges.data(), 1);
  const int threads = threads_of_forward(plan.streams, c.threads);
  CHECK(threads >= 1 && threads <= c.threads);
  const Forward forward{0, 0.0, 0.0, &table, x.data(), DTYPE, y.data(), codes.data(), 0};
  forward_quantized(kernels, kind, plan.streams, forward, seed, packed.data(), ranges.data(), c.threads);
  for (int64_t i = 0; i < n; ++i) CHECK(equal(y[i], expected_y[i]));
  CHECK(codes.values() == expected_codes.values() && packed.values() == expected.values());
  CHECK(ranges.values() == expected_ranges.values());
}

// largest: the largest group size.
inline void test_forward(const Kernels& kernels, CopyKind kind, int largest) {
  TableArrays arrays;
  arrays.breaks32 = {-1.0f, 0.0f, 1.0f};
  arrays.flips32 = {1, 3, 1};
  arrays.breaks64 = {-1.0, 0.0, 1.0};
  arrays.flips64 = {1, 3, 1};
  arrays.lut32 = {0.0f, 1.0f, 2.0f, 3.0f};
  arrays.lut64 = {0.0, 1.0, 2.0, 3.0};
  const OwnedTable table(2, 0, std::move(arrays));
  const auto test = [&](const Case& c) {
    test_forward_case<float, DType::float32>(kernels, kind, table.get(), c);
    test_forward_case<uint16_t, DType::float16>(kernels, kind, table.get(), c);
    test_forward_case<uint16_t, DType::bfloat16>(kernels, kind, table.get(), c);
  };
  for (const int64_t features : {0, 1, 31, 64, 96, 257, 640}) {
    for (const int64_t samples : {0, 1, 3, 130}) {  // 130: enough for several threads
      for (const int group_size : {32, 96, largest < 512 ? largest : 512}) {
        const int bits = any_bits();
        for (const int threads : {1, 3}) {
          test({samples, features, group_size, bits, false, any_look(), threads});
        }
      }
    }
  }
  test({3, 40001, largest, 3, false, Look::normal, 3});  // groups across words
  test({1, 100003, 256, 3, false, Look::normal, 4});
  test({2048, 65, 32, 3, false, Look::normal, 4});
}

}  // namespace fewbit::tests
