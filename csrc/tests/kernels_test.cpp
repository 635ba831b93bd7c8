// Tests of every CPU kernel of every instruction set that this machine has, on heap buffers of exactly the right size, so that
// AddressSanitizer sees an access beyond them. Results are compared with a computation of one element at a time.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "../common/draw.h"
#include "../common/dtype.h"
#include "../common/planes.h"
#include "../common/table.h"
#include "../cpu/kernels.h"
#include "../cpu/parallel.h"
#include "checks.h"

using namespace fewbit;

void test_quantizer(const Kernels& kernels);    // quantizer_test.cpp
void test_rotated(const Kernels& kernels);      // rotated_test.cpp
void test_fixed_point(const Kernels& kernels);  // fixed_point_test.cpp

namespace {

std::mt19937_64 generator(20240607);

TableArrays random_arrays(int bits, int breaks, bool unbiased) {
  std::normal_distribution<float> normal(0.0f, 3.0f);
  TableArrays arrays;
  for (int j = 0; j < breaks; ++j) arrays.breaks32.push_back(normal(generator));
  std::sort(arrays.breaks32.begin(), arrays.breaks32.end());
  arrays.breaks64.assign(arrays.breaks32.begin(), arrays.breaks32.end());
  for (int j = 0; j < breaks; ++j) arrays.flips32.push_back(generator() & ((1u << bits) - 1));
  arrays.flips64 = arrays.flips32;
  for (int code = 0; code < 1 << bits; ++code) arrays.lut64.push_back(normal(generator));
  arrays.lut32.assign(arrays.lut64.begin(), arrays.lut64.end());
  if (unbiased) {
    const int points = breaks + 2, levels = 1 << bits;
    for (int i = 0; i < points; ++i) {
      arrays.points.push_back(0.25f * (i - points / 2));
      arrays.values.push_back(normal(generator));
    }
    arrays.origins = arrays.points;
    for (int i = 0; i + 1 < points; ++i) {
      arrays.slopes.push_back((arrays.values[i + 1] - arrays.values[i]) / 0.25f);
    }
    for (int i = 0; i < levels; ++i) arrays.levels.push_back(static_cast<float>(i - levels / 2));
    arrays.inverse_gaps.assign(levels - 1, 1.0f);
  }
  return arrays;
}

template <class T>
uint32_t code_of(const Table& table, const Breaks<T>& breaks, T x) {
  uint32_t code = table.initial;
  for (int j = 0; j < breaks.count; ++j) {
    if (!(x <= breaks.values[j])) code ^= breaks.flips[j];
  }
  return code;
}

const Breaks<float>& breaks_for(const Table& table, float) { return table.breaks32; }
const Breaks<double>& breaks_for(const Table& table, double) { return table.breaks64; }
float level_for(const Table& table, uint32_t code, float) { return table.lut32[code]; }
double level_for(const Table& table, uint32_t code, double) { return table.lut64[code]; }

template <class T, DType DTYPE>
void test_table(const Kernels& kernels, const Table& table, int64_t n) {
  using N = Number<T, DTYPE>;
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<T> numbers;
  for (int64_t i = 0; i < n; ++i) numbers.push_back(N::narrow(normal(generator)));
  const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, 6e-8f, 65504.0f};
  for (int64_t i = 0; i < n; i += 5) numbers[i] = N::narrow(special[i / 5 % 8]);
  Exact<T> x(numbers);

  const uint64_t seed = generator();
  std::vector<uint32_t> codes;
  std::vector<uint32_t> expected(packed_words(n, table.bits));
  for (int64_t i = 0; i < n; ++i) {
    const auto value = N::wide(x[i]);
    const uint32_t code = table.unbiased() ? draw(table.knots, static_cast<float>(value), seed, i)
                                           : code_of(table, breaks_for(table, value), value);
    codes.push_back(code);
    for (int plane = 0; plane < table.bits; ++plane) {
      expected[word_index(block_of(i), plane, table.bits)] |= (code >> plane & 1) << lane_of(i);
    }
  }

  Exact<uint32_t> packed(packed_words(n, table.bits));
  kernels.encode(table, x.data(), DTYPE, 0, n, packed.data(), seed);
  CHECK(packed.values() == expected);

  Exact<uint8_t> unpacked(n);
  kernels.unpack(packed.data(), 0, n, table.bits, unpacked.data());
  for (int64_t i = 0; i < n; ++i) CHECK(unpacked[i] == codes[i]);
  Exact<uint32_t> repacked(packed_words(n, table.bits));
  kernels.pack(unpacked.data(), 0, n, table.bits, repacked.data());
  CHECK(repacked.values() == expected);

  Exact<T> out(n), one(std::vector<T>{N::narrow(-1.25f)});
  kernels.decode_mul(table, x.data(), DTYPE, 0, n, packed.data(), out.data(), false);
  for (int64_t i = 0; i < n; ++i) {
    const auto value = N::wide(x[i]);
    CHECK(equal(N::wide(out[i]), N::wide(N::narrow(level_for(table, codes[i], value) * value))));
  }
  kernels.decode_mul(table, one.data(), DTYPE, 0, n, packed.data(), out.data(), true);
  for (int64_t i = 0; i < n; ++i) {
    const auto value = N::wide(one[0]);
    CHECK(equal(N::wide(out[i]), N::wide(N::narrow(level_for(table, codes[i], value) * value))));
  }
  if (DTYPE == DType::float64) return;

  for (size_t function = 0; function < fused_functions().size(); ++function) {
    Exact<T> inplace(numbers);
    kernels.forward(function, 0.5, 1.0, table, x.data(), DTYPE, 0, n, out.data(), packed.data(), seed);
    CHECK(packed.values() == expected);
    kernels.forward(function, 0.5, 1.0, table, inplace.data(), DTYPE, 0, n, inplace.data(), packed.data(), seed);
    CHECK(packed.values() == expected);
    for (int64_t i = 0; i < n; ++i) CHECK(equal(N::wide(out[i]), N::wide(inplace[i])));
  }
}

void test_kernels(const Kernels& kernels) {
  std::vector<int64_t> sizes;
  for (int64_t n = 0; n <= 65; ++n) sizes.push_back(n);
  for (int64_t n : {511, 512, 513, 1500}) sizes.push_back(n);
  for (int bits = 1; bits <= 8; ++bits) {
    for (int breaks : {0, 3, 18, 100, 1000}) {
      const OwnedTable plain(bits, 0, random_arrays(bits, breaks, false));
      const OwnedTable drawn(bits, (1 << bits) - 1, random_arrays(bits, breaks, true));
      for (const OwnedTable* table : {&plain, &drawn}) {
        // Only one table for each number of bits runs with all sizes. The others differ in how codes are found.
        for (size_t i = breaks == 3 ? 0 : sizes.size() - 1; i < sizes.size(); ++i) {
          test_table<float, DType::float32>(kernels, table->get(), sizes[i]);
          test_table<double, DType::float64>(kernels, table->get(), sizes[i]);
          test_table<uint16_t, DType::float16>(kernels, table->get(), sizes[i]);
          test_table<uint16_t, DType::bfloat16>(kernels, table->get(), sizes[i]);
        }
      }
    }
  }
}

void test_planes() {
  CHECK(packed_words(0, 3) == 0);
  CHECK(packed_words(1, 3) == 3);
  CHECK(packed_words(32, 8) == 8);
  CHECK(packed_words(33, 1) == 2);
  const int64_t n = (int64_t{1} << 33) + 5;
  CHECK(block_count(n) == (int64_t{1} << 28) + 1);
  CHECK(packed_words(n, 8) == (int64_t{1} << 31) + 8);
  CHECK(block_of(n - 1) == int64_t{1} << 28);
  CHECK(lane_of(n - 1) == 4);
  CHECK(word_index(block_of(n - 1), 7, 8) == (int64_t{1} << 31) + 7);
  CHECK(valid_lanes(block_of(n - 1), n) == 0x1Fu);
  CHECK(valid_lanes(block_of(n - 1) - 1, n) == 0xFFFFFFFFu);
  CHECK(valid_lanes(block_of(n - 1) + 1, n) == 0u);
  CHECK(valid_lanes(0, 32) == 0xFFFFFFFFu);
  CHECK(valid_lanes(0, 0) == 0u);
}

void test_shares() {
  for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{511}, int64_t{512}, int64_t{513}, int64_t{100003},
                    (int64_t{1} << 33) + 5}) {
    for (int count : {1, 2, 3, 7, 64}) {
      int64_t end = 0;
      for (int index = 0; index < count; ++index) {
        const Range range = share_of(n, index, count);
        CHECK(range.begin == end);
        CHECK(range.end >= range.begin);
        CHECK(range.begin == n || range.begin % kChunk == 0);
        end = range.end;
      }
      CHECK(end == n);
    }
  }
  CHECK(threads_for(0, 8) == 1);
  CHECK(threads_for(32768, 8) == 1);
  CHECK(threads_for(32769, 8) == 2);
  CHECK(threads_for(int64_t{1} << 40, 8) == 8);
}

void test_threads() {
  for (int threads : {1, 2, 5}) {
    std::atomic<int> calls{0}, indices{0};
    auto body = [&](int index, int count) {
      CHECK(count == threads);
      calls += 1;
      indices += 1 << index;
    };
    run_parallel(threads, body);
    CHECK(calls == threads);
    CHECK(indices == (1 << threads) - 1);
  }
  CHECK(!use_openmp_of("/nowhere/libtorch_cpu.so"));
}

void test_floats() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const bool nan16 = (bits & 0x7FFF) > 0x7C00, nanb = (bits & 0x7FFF) > 0x7F80;
    CHECK(narrow_float16(widen_float16(half)) == (nan16 ? half | 0x200 : half));
    CHECK(narrow_bfloat16(widen_bfloat16(half)) == (nanb ? half | 0x40 : half));
    if (nan16 || (bits & 0x7FFF) >= 0x7C00) continue;
    // A number halfway between two rounds to the even one. Numbers just beside it round to the nearer one.
    const float here = widen_float16(half), next = widen_float16(half + 1);
    if (std::isinf(next)) continue;
    const float middle = (here + next) / 2;
    CHECK(narrow_float16(middle) == (half & 1 ? half + 1 : half));
    CHECK(narrow_float16(std::nextafterf(middle, here)) == half);
    CHECK(narrow_float16(std::nextafterf(middle, next)) == half + 1);
  }
  CHECK(narrow_float16(65519.99f) == 0x7BFF);
  CHECK(narrow_float16(65520.0f) == 0x7C00);
  CHECK(narrow_float16(1e30f) == 0x7C00);
}

void test_refusals() {
  TableArrays arrays = random_arrays(2, 3, false);
  arrays.flips32[1] = 4;
  bool refused = false;
  try {
    OwnedTable table(2, 0, arrays);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  test_planes();
  test_shares();
  test_threads();
  test_floats();
  test_refusals();
  for (const std::string& isa : cpu_isas()) {
    test_kernels(*kernels_of(isa));
    test_quantizer(*kernels_of(isa));
    test_rotated(*kernels_of(isa));
    test_fixed_point(*kernels_of(isa));
    std::printf("%s: passed\n", isa.c_str());
  }
}
