// Tests of rotated copies of every instruction set, on heap buffers of exactly the right size, against a transcription of
// docs/quantizer.md that computes one number at a time.

#include <cmath>
#include <random>
#include <vector>

#include "../common/normal_levels.h"
#include "../common/philox.h"
#include "../common/planes.h"
#include "../common/rotate.h"
#include "../cpu/quantizer.h"
#include "checks.h"

using namespace fewbit;

namespace {

std::mt19937_64 generator(20260101);

typedef std::vector<float> Numbers;

// The kinds of data that cases have.
enum class Look { normal, offset, huge, tiny, constant, zero, one_hot, nan, infinite, heavy, last = heavy };

struct Case {
  int64_t samples, features;
  int group_size;
  bool fp32_min;
  int bits;
  bool mixed;
  bool fused;  // with normalization, and an affine map unless samples are mixed
  Look look;
  int threads;
};

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

float sum_of_256(Numbers numbers) {
  numbers.resize(256, 0.0f);
  for (size_t half = 128; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) numbers[i] = numbers[i] + numbers[i + half];
  }
  return numbers[0];
}

float sum_of_group(const Numbers& numbers) {
  float sum = 0.0f;
  for (size_t at = 0; at < numbers.size(); at += 256) {
    const size_t end = std::min(at + 256, numbers.size());
    const float* data = numbers.data();
    const float part = sum_of_256(Numbers(data + at, data + end));
    sum = at == 0 ? part : sum + part;
  }
  return sum;
}

float energy_of_group(const Numbers& v) {
  Numbers squares;
  for (const float number : v) squares.push_back(number * number);
  return sum_of_group(squares);
}

// The random numbers of a group's parts.
struct Randoms {
  uint64_t seed, first_part;

  uint64_t counter(size_t part, int k) const {
    return (uint64_t{1} << 63) + 16 * (first_part + part) + static_cast<uint64_t>(k);
  }
  bool is_negative(size_t part, int rotation, int transform, size_t i) const {
    const PhiloxWords words = philox_words(seed, counter(part, 4 * rotation + 2 * transform + static_cast<int>(i / 128)));
    return words.words[i / 32 % 4] >> i % 32 & 1;
  }
  uint32_t draw() const { return philox_words(seed, counter(0, 8)).words[0] & 0xFFFFu; }
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

// One rotation of the m numbers of a part, or its inverse with a factor.
struct Rotation {
  const Randoms& randoms;
  size_t part, m;
  int number;

  size_t size() const { return power_of_two(m); }
  float root() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(size()))); }
  void multiply(float* y, size_t i, float factor, int transform) const {
    y[i] = y[i] * (randoms.is_negative(part, number, transform, i) ? -factor : factor);
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

// All rotations of a part, or their inverse.
struct Rotations {
  const Randoms& randoms;
  size_t part, m;
  bool is_spiky;

  bool are_two() const { return is_spiky || power_of_two(m) != m; }
  Numbers moved(const float* y, size_t places) const {
    Numbers numbers;
    for (size_t i = 0; i < m; ++i) numbers.push_back(y[(i + places) % m]);
    return numbers;
  }

  void apply(float* y) const {
    Rotation{randoms, part, m, 0}.apply(y);
    if (!are_two()) return;
    const Numbers numbers = moved(y, (m - power_of_two(m)) / 2);
    std::copy(numbers.begin(), numbers.end(), y);
    Rotation{randoms, part, m, 1}.apply(y);
  }

  void undo(float* y, float scale) const {
    if (are_two()) {
      Rotation{randoms, part, m, 1}.undo(y, 1.0f);
      const Numbers numbers = moved(y, m - (m - power_of_two(m)) / 2);
      std::copy(numbers.begin(), numbers.end(), y);
    }
    Rotation{randoms, part, m, 0}.undo(y, scale);
  }
};

// A group's copy.
struct GroupCopy {
  float mean, scale;  // both NaN if the group has no values
  bool is_spiky;      // one element has more than an eighth of the energy
  float energy;  // with a mean in float32, as `squares` computes it
  std::vector<int> codes;
};

// The remainders of a group after rescue.
struct Rescued {
  Numbers v;
  float mean, energy, u;

  Rescued(const Numbers& x, bool fp32_min) {
    mean = sum_of_group(x) / static_cast<float>(x.size());
    if (!fp32_min) mean = nearest_bfloat16(mean);
    if (mean == 0.0f) mean = 0.0f;
    for (const float number : x) v.push_back(number - mean);
    energy = energy_of_group(v);
    u = 1.0f;
    if (energy < std::ldexp(1.0f, -80)) u = std::ldexp(1.0f, 96);
    if (!(energy < std::ldexp(1.0f, 100))) u = std::ldexp(1.0f, -96);
    for (float& number : v) number = number * u;
    energy = energy_of_group(v);
  }

  bool has_values() const { return std::isfinite(energy) && std::isfinite(mean); }
};

GroupCopy copy_of(const Numbers& x, int bits, bool fp32_min, const Randoms& randoms) {
  const Rescued exact(x, true);
  const float nan = NAN;
  GroupCopy copy{nan, nan, false, exact.has_values() ? exact.energy * (1 / exact.u) * (1 / exact.u) : nan,
                 std::vector<int>(x.size(), 0)};
  Rescued of(x, fp32_min);
  if (!of.has_values()) return copy;
  copy.mean = of.mean;
  copy.scale = 0.0f;
  if (of.energy == 0.0f) return copy;
  float greatest = 0.0f;
  for (const float number : of.v) greatest = std::fmax(greatest, std::fabs(number));
  copy.is_spiky = greatest * greatest * 8.0f > of.energy;
  for (size_t at = 0; at < x.size(); at += 256) {
    const size_t m = std::min(x.size() - at, size_t{256});
    Rotations{randoms, at / 256, m, copy.is_spiky}.apply(of.v.data() + at);
  }
  const float rms = std::sqrt(of.energy / static_cast<float>(x.size()));
  Numbers products;
  for (size_t i = 0; i < x.size(); ++i) {
    int index = 0;
    for (int k = 0; k < (1 << (bits - 1)) - 1; ++k) {
      if (kNormalLevels.breaks[breaks_begin(bits) + k] * rms < std::fabs(of.v[i])) ++index;
    }
    copy.codes[i] = index + (std::signbit(of.v[i]) ? 1 << (bits - 1) : 0);
    products.push_back(std::fabs(of.v[i]) * kNormalLevels.levels[levels_begin(bits) + index]);
  }
  const float most = std::ldexp(255.0f, 120);  // the greatest bfloat16
  const float scale = std::fmin(of.energy / sum_of_group(products) * (1 / of.u), most);
  copy.scale = float_of((bits_of(scale) + randoms.draw()) & 0xFFFF0000u);
  return copy;
}

Numbers values_of(const GroupCopy& copy, int bits, const Randoms& randoms) {
  Numbers y;
  const int half = 1 << (bits - 1);
  for (const int code : copy.codes) {
    const float level = kNormalLevels.levels[levels_begin(bits) + code % half];
    y.push_back(code >= half ? -level : level);
  }
  for (size_t at = 0; at < y.size(); at += 256) {
    const size_t m = std::min(y.size() - at, size_t{256});
    Rotations{randoms, at / 256, m, copy.is_spiky}.undo(y.data() + at, copy.scale);
  }
  for (float& number : y) number = copy.mean + number;
  return y;
}

// -- Cases -------------------------------------------------------------------------------------------------------

template <class T, DType DTYPE>
std::vector<T> elements_of(const Case& c) {
  std::normal_distribution<float> normal;
  const int64_t n = c.samples * c.features;
  std::vector<T> numbers;
  const int64_t special = n > 0 ? static_cast<int64_t>(generator() % static_cast<uint64_t>(n)) : 0;
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
    numbers.push_back(Number<T, DTYPE>::narrow(x));
  }
  return numbers;
}

// A vector over n elements, and its index.
struct Vectors {
  VectorIndex index;
  Exact<float> first, second;

  explicit Vectors(int64_t n) : Vectors(index_for(n)) {}
  explicit Vectors(const VectorIndex& index) : index(index), first(index.count), second(index.count) {
    std::normal_distribution<float> normal(1.0f, 1.0f);
    for (int64_t i = 0; i < index.count; ++i) first[i] = normal(generator), second[i] = normal(generator);
  }

  int64_t entry(int64_t element) const { return element / index.inner % index.count; }

 private:
  static VectorIndex index_for(int64_t n) {
    int64_t inner = n > 0 ? 1 + static_cast<int64_t>(generator() % 300) : 1;
    while (n > 0 && n % inner != 0) --inner;
    return {n > 0 ? n / inner : 1, inner};
  }
};

template <class T, DType DTYPE>
void test_case(const Kernels& kernels, const Case& c) {
  using N = Number<T, DTYPE>;
  const int64_t n = c.samples * c.features;
  Exact<T> x(elements_of<T, DTYPE>(c));
  std::vector<uint8_t> widths;
  for (int64_t i = 0; i < c.samples; ++i) widths.push_back(static_cast<uint8_t>(c.mixed ? 1 + generator() % 8 : c.bits));
  const uint64_t seed = generator();
  const StreamPlan plan = plan_streams(c.samples, c.features, c.group_size, c.fp32_min, c.bits,
                                       c.mixed ? widths.data() : nullptr);
  const Streams& streams = plan.streams;
  Vectors statistics(n), map(n);
  Normalization normalization{};
  if (c.fused) normalization = {statistics.first.data(), statistics.second.data(), statistics.index};
  Affine affine{};
  if (c.fused && !c.mixed) affine = {map.first.data(), map.second.data(), map.index};

  Exact<uint32_t> packed(streams.words);
  Exact<uint16_t> ranges(streams.groups * columns(c.fp32_min));
  for (int64_t i = 0; i < streams.words; ++i) packed[i] = 0xA5A5A5A5u;
  const Extent extent = quantize(kernels, CopyKind::rotated, plan, x.data(), DTYPE, normalization, seed, packed.data(),
                                 ranges.data(), c.threads);
  Exact<T> out(n);
  dequantize(kernels, CopyKind::rotated, plan, packed.data(), ranges.data(), seed, affine, out.data(), DTYPE,
             c.threads);
  Exact<float> squares_of_groups(streams.groups);
  if (!c.mixed) {
    squares(kernels, CopyKind::rotated, streams, x.data(), DTYPE, normalization, squares_of_groups.data(), c.threads);
  }

  std::vector<uint32_t> expected(static_cast<size_t>(streams.words));
  float least = INFINITY, greatest = -INFINITY;
  bool any_nan = false;
  for (int64_t number = 0; number < streams.groups; ++number) {
    const Stream& stream = stream_of(streams, number);
    const Group group = group_at(streams, stream, number - stream.first_group);
    const auto place = [&](int i) {
      const int64_t sample = stream.first_sample + (group.first + i) / c.features;
      const int64_t from = plan.order.empty() ? sample : plan.order[static_cast<size_t>(sample)];
      return from * c.features + (group.first + i) % c.features;
    };
    Numbers elements;
    for (int i = 0; i < group.length; ++i) {
      float value = static_cast<float>(N::wide(x[place(i)]));
      const int64_t entry = statistics.entry(place(i));
      if (c.fused) value = (value - statistics.first[entry]) * statistics.second[entry];
      elements.push_back(value);
      least = std::fmin(least, value);
      greatest = std::fmax(greatest, value);
      any_nan = any_nan || std::isnan(value);
    }
    const Randoms randoms{seed, static_cast<uint64_t>(number * ((c.group_size + 255) / 256))};
    const GroupCopy copy = copy_of(elements, stream.bits, c.fp32_min, randoms);
    const GroupScale stored = load_scale(ranges.data(), c.fp32_min, number);
    CHECK(equal(stored.mean, copy.mean) && equal(stored.scale, copy.scale) && stored.is_twice == copy.is_spiky);
    if (!c.mixed) CHECK(equal(squares_of_groups[number], copy.energy));
    const Numbers values = values_of(copy, stream.bits, randoms);
    for (int i = 0; i < group.length; ++i) {
      const int64_t element = group.first + i;
      for (int plane = 0; plane < stream.bits; ++plane) {
        const uint32_t bit = static_cast<uint32_t>(copy.codes[static_cast<size_t>(i)]) >> plane & 1;
        expected[static_cast<size_t>(stream.first_word + word_index(element / 32, plane, stream.bits))] |= bit << element % 32;
      }
      float value = values[static_cast<size_t>(i)];
      const int64_t entry = map.entry(place(i));
      if (affine.exists()) value = value * map.first[entry] + map.second[entry];
      if (DTYPE == DType::float16) value = within_float16(value);
      CHECK(equal(N::wide(out[place(i)]), N::wide(N::narrow(value))));  // NaNs may differ in their signs
    }
  }
  CHECK(packed.values() == expected);
  if (n > 0) {
    CHECK(any_nan ? std::isnan(extent.least) && std::isnan(extent.greatest)
                  : extent.least == least && extent.greatest == greatest);
  }
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
void test_forward(const Kernels& kernels, int64_t samples, int64_t features, int group_size, int bits) {
  TableArrays arrays;
  arrays.breaks32 = {0.0f};
  arrays.flips32 = {1};
  arrays.breaks64 = {0.0};
  arrays.flips64 = {1};
  arrays.lut32 = {0.0f, 1.0f};
  arrays.lut64 = {0.0, 1.0};
  const OwnedTable table(1, 0, std::move(arrays));
  const int64_t n = samples * features;
  const Case c{samples, features, group_size, false, bits, false, false, Look::normal, 3};
  Exact<float> x(elements_of<float, DType::float32>(c)), y(n), expected_y(n);
  const StreamPlan plan = plan_streams(samples, features, group_size, false, bits, nullptr);
  Exact<uint32_t> codes(packed_words(n, 1)), expected_codes(packed_words(n, 1));
  Exact<uint32_t> packed(plan.streams.words), expected(plan.streams.words);
  Exact<uint16_t> ranges(2 * plan.streams.groups), expected_ranges(2 * plan.streams.groups);
  const uint64_t seed = generator();
  kernels.forward(0, 0.0, 0.0, table.get(), x.data(), DType::float32, 0, n, expected_y.data(), expected_codes.data(), 0);
  const Extent extent = quantize(kernels, CopyKind::rotated, plan, expected_y.data(), DType::float32, {}, seed,
                                 expected.data(), expected_ranges.data(), 1);
  const Forward forward{0, 0.0, 0.0, &table.get(), x.data(), DType::float32, y.data(), codes.data(), 0};
  const Extent found = forward_quantized(kernels, CopyKind::rotated, plan.streams, forward, seed, packed.data(),
                                         ranges.data(), 3);
  CHECK(y.values() == expected_y.values() && codes.values() == expected_codes.values());
  CHECK(packed.values() == expected.values() && ranges.values() == expected_ranges.values());
  CHECK(found.least == extent.least && found.greatest == extent.greatest);
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
  const int sizes[] = {32, 64, 96, 128, 256, 288, 512, 1024};
  const auto any_size = [&] { return sizes[generator() % 8]; };
  const auto any_look = [] { return static_cast<Look>(generator() % (static_cast<uint64_t>(Look::last) + 1)); };
  const auto any_bits = [] { return 1 + static_cast<int>(generator() % 8); };
  for (int64_t features = 0; features <= 600; features += features < 70 ? 1 : 7) {
    const bool mixed = generator() % 2 == 0;
    test_all_types(kernels, {3, features, any_size(), generator() % 2 == 0, any_bits(), mixed, false, any_look(), 1});
  }
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int group_size : sizes) {
      test_all_types(kernels, {2, 1030, group_size, bits % 2 == 0, bits, false, false, Look::normal, 1});
    }
  }
  for (int look = 0; look <= static_cast<int>(Look::last); ++look) {
    for (const int64_t features : {40, 256, 300, 1025}) {
      test_all_types(kernels, {3, features, 256, look % 2 == 0, any_bits(), false, false, static_cast<Look>(look), 1});
      test_all_types(kernels, {1, features, 1024, look % 2 == 1, any_bits(), false, false, static_cast<Look>(look), 1});
    }
  }
  // Enough elements for several threads, whose groups share words.
  test_all_types(kernels, {1001, 67, 256, false, 3, true, false, Look::normal, 3});
  test_all_types(kernels, {9, 8001, 512, true, 2, false, false, Look::offset, 4});
  test_forward(kernels, 900, 96, 256, 2);
  test_forward(kernels, 200, 640, 256, 3);
  test_forward(kernels, 3, 40001, 512, 2);
}
