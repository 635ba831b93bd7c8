// Tests of rotated, masked and unbiased copies of every instruction set, against a transcription of docs/concepts/quantizer.md that computes one
// number at a time.

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "../common/normal_levels.h"
#include "../common/philox.h"
#include "../common/rotate.h"
#include "../common/unbiased.h"
#include "../cpu/quantizer.h"
#include "checks.h"
#include "copies.h"

using namespace fewbit;
using namespace fewbit::tests;

namespace {

// -- The page, one number at a time ------------------------------------------------------------------------------

// Returns the bfloat16 number nearest to x, ties to even. Multiplication by a power of two and rint do what bits do elsewhere.
float nearest_bfloat16(float x) {
  if (!std::isfinite(x) || x == 0.0f) return x;
  int exponent = 0;
  std::frexp(static_cast<double>(x), &exponent);
  const int last_place = std::max(exponent - 8, -133);
  const double steps = std::nearbyint(std::ldexp(static_cast<double>(x), -last_place));
  return static_cast<float>(std::ldexp(steps, last_place));
}

float sum_of_group(Numbers numbers) {
  numbers.resize(256, 0.0f);
  for (size_t half = 128; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) numbers[i] = numbers[i] + numbers[i + half];
  }
  return numbers[0];
}

float energy_of(const Numbers& v) {
  Numbers squares;
  for (const float number : v) squares.push_back(number * number);
  return sum_of_group(squares);
}

// The random numbers of a group.
struct Randoms {
  uint64_t seed;
  int64_t group;

  PhiloxWords words(size_t k) const {
    return philox_words(seed, (uint64_t{1} << 63) + 16 * static_cast<uint64_t>(group) + k);
  }
  bool is_negative(int rotation, int transform, size_t i) const {
    return words(static_cast<size_t>(4 * rotation + 2 * transform) + i / 128).words[i / 32 % 4] >> i % 32 & 1;
  }
  uint32_t draw() const { return words(8).words[0] & 0xFFFFu; }
};

size_t power_of_two(size_t m) {
  size_t power = 1;
  while (2 * power <= m) power *= 2;
  return power;
}

void hadamard(float* y, size_t size) {
  for (size_t h = size / 2; h > 0; h /= 2) {
    for (size_t i = 0; i < size; ++i) {
      if (i / h % 2 != 0) continue;
      const float a = y[i], b = y[i + h];
      y[i] = a + b;
      y[i + h] = a - b;
    }
  }
}

// One rotation of the m numbers of a group, or its inverse with a factor.
struct Rotation {
  const Randoms& randoms;
  size_t m;
  int number;

  size_t size() const { return power_of_two(m); }
  float root() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(size()))); }
  void multiply(float* y, size_t i, float factor, int transform) const {
    y[i] = y[i] * (randoms.is_negative(number, transform, i) ? -factor : factor);
  }

  void apply(float* y) const {
    for (size_t i = 0; i < m; ++i) multiply(y, i, i < size() ? root() : 1.0f, 0);
    hadamard(y, size());
    if (size() == m) return;
    for (size_t i = m - size(); i < m; ++i) multiply(y, i, root(), 1);
    hadamard(y + m - size(), size());
  }

  void undo(float* y, float scale) const {
    if (size() < m) {
      hadamard(y + m - size(), size());
      for (size_t i = m - size(); i < m; ++i) multiply(y, i, root(), 1);
    }
    hadamard(y, size());
    for (size_t i = 0; i < m; ++i) multiply(y, i, i < size() ? scale * root() : scale, 0);
  }
};

// All rotations of a group, or their inverse.
struct Rotations {
  const Randoms& randoms;
  size_t m;
  bool is_spiky;

  bool are_two() const { return is_spiky || power_of_two(m) != m; }
  Numbers moved(const float* y, size_t places) const {
    Numbers numbers;
    for (size_t i = 0; i < m; ++i) numbers.push_back(y[(i + places) % m]);
    return numbers;
  }

  void apply(float* y) const {
    Rotation{randoms, m, 0}.apply(y);
    if (!are_two()) return;
    const Numbers numbers = moved(y, (m - power_of_two(m)) / 2);
    std::copy(numbers.begin(), numbers.end(), y);
    Rotation{randoms, m, 1}.apply(y);
  }

  void undo(float* y, float scale) const {
    if (are_two()) {
      Rotation{randoms, m, 1}.undo(y, 1.0f);
      const Numbers numbers = moved(y, m - (m - power_of_two(m)) / 2);
      std::copy(numbers.begin(), numbers.end(), y);
    }
    Rotation{randoms, m, 0}.undo(y, scale);
  }
};

// The remainders of a group after rescue. If masked, elements that are 0 are left out.
struct Rescued {
  Numbers v;
  float mean, energy, u;
  size_t count = 0;

  Rescued(const Numbers& x, bool fp32_min, bool is_masked) {
    const auto is_counted = [=](float number) { return !is_masked || number != 0.0f; };
    for (const float number : x) count += is_counted(number);
    mean = count > 0 ? sum_of_group(x) / static_cast<float>(count) : 0.0f;
    if (!fp32_min) mean = nearest_bfloat16(mean);
    if (mean == 0.0f) mean = 0.0f;
    for (const float number : x) v.push_back(is_counted(number) ? number - mean : 0.0f);
    energy = energy_of(v);
    u = 1.0f;
    if (energy < std::ldexp(1.0f, -80)) u = std::ldexp(1.0f, 96);
    if (!(energy < std::ldexp(1.0f, 100))) u = std::ldexp(1.0f, -96);
    for (float& number : v) number = number * u;
    energy = energy_of(v);
  }

  bool has_values() const { return std::isfinite(energy) && std::isfinite(mean); }
};

// Returns the energy that `squares` computes.
float energy_of_copy(const Numbers& x, bool is_masked) {
  const Rescued of(x, true, is_masked);
  if (!of.has_values()) return NAN;
  const float energy = of.energy * (1 / of.u) * (1 / of.u);
  return is_masked ? energy * static_cast<float>(of.count) / static_cast<float>(x.size()) : energy;
}

// Checks the mean of a group, and returns whether the group has codes. If not, it also checks the scale and fills `copy`.
bool check_codes_exist(const Rescued& of, const GroupScale& stored, ExpectedCopy& copy) {
  if (!of.has_values()) {
    CHECK(std::isnan(stored.mean) && std::isnan(stored.scale));
    return false;
  }
  CHECK(equal(stored.mean, of.mean));
  if (of.energy > 0.0f) return true;
  CHECK(equal(stored.scale, 0.0f) && !stored.is_twice);
  copy.values.assign(of.v.size(), of.mean);
  return false;
}

// Checks the mean and the scale of a group, and returns its copy.
ExpectedCopy copy_of(const TestedGroup& group, bool is_masked, const uint16_t* ranges) {
  const Numbers& x = group.elements;
  const GroupScale stored = load_scale(ranges, group.fp32_min, group.number);
  ExpectedCopy copy{std::vector<int>(x.size(), 0), Numbers(x.size(), NAN), energy_of_copy(x, is_masked)};
  Rescued of(x, group.fp32_min, is_masked);
  if (!check_codes_exist(of, stored, copy)) return copy;
  float greatest = 0.0f;
  for (const float number : of.v) greatest = std::fmax(greatest, std::fabs(number));
  const bool is_spiky = greatest * greatest * 8.0f > of.energy;
  const Randoms randoms{group.seed, group.number};
  const Rotations rotations{randoms, x.size(), is_spiky};
  rotations.apply(of.v.data());
  const float rms = std::sqrt(of.energy / static_cast<float>(x.size()));
  const int half = 1 << (group.bits - 1);
  Numbers products, signed_levels;
  for (size_t i = 0; i < x.size(); ++i) {
    int index = 0;
    for (int k = 0; k < half - 1; ++k) {
      if (kNormalLevels.breaks[breaks_begin(group.bits) + k] * rms < std::fabs(of.v[i])) ++index;
    }
    copy.codes[i] = index + (std::signbit(of.v[i]) ? half : 0);
    const float level = kNormalLevels.levels[levels_begin(group.bits) + index];
    products.push_back(std::fabs(of.v[i]) * level);
    signed_levels.push_back(std::signbit(of.v[i]) ? -level : level);
  }
  const float most = std::ldexp(255.0f, 120);  // the greatest bfloat16
  const float exact = std::fmin(of.energy / sum_of_group(products) * (1 / of.u), most);
  const float scale = float_of((bits_of(exact) + randoms.draw()) & 0xFFFF0000u);
  CHECK(equal(stored.scale, scale) && stored.is_twice == is_spiky);
  rotations.undo(signed_levels.data(), scale);
  for (size_t i = 0; i < x.size(); ++i) copy.values[i] = of.mean + signed_levels[i];
  return copy;
}

// -- unbiased copies ---------------------------------------------------------------------------------------------

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

// Returns the random number of element i, whose group has 32 counters from this one on.
uint32_t draw_of_element(uint64_t seed, uint64_t counter, size_t i) {
  return philox_words(seed, counter + i % 32).words[i / 64] >> (i / 32 % 2 * 16) & 0xFFFFu;
}

// Checks the mean and the scale of a group, and returns its copy.
ExpectedCopy unbiased_copy_of(const TestedGroup& group, const float* all, const uint16_t* ranges) {
  const Numbers& x = group.elements;
  const GroupScale stored = load_scale(ranges, group.fp32_min, group.number);
  ExpectedCopy copy{std::vector<int>(x.size(), 0), Numbers(x.size(), NAN), energy_of_copy(x, false)};
  Rescued of(x, group.fp32_min, false);
  if (!check_codes_exist(of, stored, copy)) return copy;
  const Randoms randoms{group.seed, group.number};
  const Rotations rotations{randoms, x.size(), false};
  rotations.apply(of.v.data());
  float unit = 0.0f;
  for (const float number : of.v) unit = std::fmax(unit, std::fabs(number) * all[group.bits - 1]);
  unit = std::fmax(unit, std::sqrt(of.energy / static_cast<float>(x.size())));
  const float exact = std::fmin(unit * (1 / of.u), std::ldexp(255.0f, 120));
  float scale = float_of(bits_of(exact) & 0xFFFF0000u);
  if (scale < exact) scale = float_of(bits_of(scale) + 0x10000u);
  CHECK(equal(stored.scale, scale) && !stored.is_twice);
  const float inverse = 1 / (scale * of.u);
  const int size = code_size(group.bits), columns = 1 << group.bits;
  const float* levels = all + 8 + 3 * code_sizes_before(group.bits);
  const uint64_t counter = (uint64_t{1} << 62) + 64 * static_cast<uint64_t>(group.number);
  Numbers y;
  for (size_t i = 0; i < x.size(); ++i) {
    const float* row = levels + static_cast<int>(draw_of_element(group.seed, counter, i)) % (size / columns) * columns;
    const float own = std::ldexp(static_cast<float>(2 * draw_of_element(group.seed, counter + 32, i) + 1), -17);
    int code = 0;
    for (int c = 0; c < columns - 1; ++c) code += of.v[i] * inverse > row[size + c] + own * row[2 * size + c];
    copy.codes[i] = code;
    y.push_back(row[code]);
  }
  rotations.undo(y.data(), scale);
  for (size_t i = 0; i < x.size(); ++i) copy.values[i] = of.mean + y[i];
  return copy;
}

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
    const auto oracle = [=](const TestedGroup& group, const uint16_t* ranges) { return copy_of(group, is_masked, ranges); };
    const auto test = [&](const Case& c) { test_all_types(kernels, kind, oracle, c); };
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
  const auto oracle = [&](const TestedGroup& group, const uint16_t* ranges) {
    return unbiased_copy_of(group, codes.all.data(), ranges);
  };
  const auto test = [&](const Case& c) { test_all_types(kernels, CopyKind::unbiased, oracle, c, codes.all.data()); };
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
