// Tests of the fixed-point code of every instruction set, on heap buffers of exactly the right size, against a computation of
// one element at a time.

#include "../common/fixed_point.h"

#include <random>
#include <vector>

#include "../common/planes.h"
#include "../cpu/kernels.h"
#include "checks.h"

using namespace fewbit;

namespace {

std::mt19937_64 generator(20260101);

int64_t entry_of(const VectorIndex& index, int64_t element) { return element / index.inner % index.count; }

int32_t code_at(Exact<uint32_t>& packed, int64_t i, int bits) {
  int32_t code = 0;
  for (int plane = 0; plane < bits; ++plane) {
    code |= static_cast<int32_t>(packed[word_index(block_of(i), plane, bits)] >> lane_of(i) & 1u) << plane;
  }
  return code;
}

template <class T, DType DTYPE>
void test_type(const Kernels& kernels, int64_t n, const VectorIndex& channels, const VectorIndex& statistics, int bits) {
  using N = Number<T, DTYPE>;
  std::normal_distribution<float> normal(0.0f, 2.0f);
  Exact<float> gamma(channels.count), beta(channels.count), rows(kGridRows * channels.count);
  for (int64_t i = 0; i < channels.count; ++i) {
    gamma[i] = i % 5 ? normal(generator) : 0.0f, beta[i] = normal(generator);
    make_column(gamma[i], beta[i], bits, rows.data(), i, channels.count);
  }
  Exact<float> mean(statistics.count), rstd(statistics.count);
  for (int64_t i = 0; i < statistics.count; ++i) mean[i] = normal(generator), rstd[i] = normal(generator);
  Exact<T> x(n), y(n), out(n);
  for (int64_t i = 0; i < n; ++i) x[i] = N::narrow(normal(generator)), y[i] = N::narrow(normal(generator));
  const Grid grid{rows.data(), channels};
  const Normalization normalization{mean.data(), rstd.data(), statistics};
  Exact<uint32_t> packed(packed_words(n, bits));
  const int64_t cut = n / 2 / kChunk * kChunk;  // where two threads would divide the work
  const FixedPointKernels& fixed = *kernels.fixed_point;
  fixed.encode(grid, normalization, x.data(), y.data(), DTYPE, bits, 0, cut, packed.data());
  fixed.encode(grid, normalization, x.data(), y.data(), DTYPE, bits, cut, n, packed.data());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t entry = entry_of(statistics, i), channel = entry_of(channels, i);
    const float value = (static_cast<float>(N::wide(x[i])) - mean[entry]) * rstd[entry];
    const int32_t code = fixed_code(value, !(N::wide(y[i]) <= 0), grid.start()[channel], grid.first()[channel],
                                    grid.sign()[channel], steps_per_unit(bits), 1 << bits);
    CHECK(code_at(packed, i, bits) == code);
    const bool constant = gamma[channel] == 0.0f;
    CHECK(constant || (static_cast<float>(code) >= grid.first()[channel]) == (N::wide(y[i]) > 0));
  }
  for (const bool activated : {false, true}) {
    const Scale scale{activated ? nullptr : rstd.data(), statistics};
    fixed.decode(grid, scale, packed.data(), bits, 0, n, activated, 0.25f, out.data(), DTYPE);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t channel = entry_of(channels, i);
      const int32_t code = code_at(packed, i, bits);
      const float first = grid.first()[channel];
      float value = fixed_value(code, grid.start()[channel], first, grid.low()[channel], grid.high()[channel],
                                fixed_step(bits));
      if (activated) {
        value = fixed_activated(static_cast<float>(code) >= first, value, grid.scale()[channel], grid.shift()[channel],
                                0.25f);
      } else {
        value = grid.sign()[channel] * value * rstd[entry_of(statistics, i)];
      }
      CHECK(equal<T>(out[i], N::narrow(value)));
    }
  }
  fixed.mask(grid, packed.data(), bits, 0, n, 0.5, x.data(), out.data(), DTYPE);
  for (int64_t i = 0; i < n; ++i) {
    const bool above = static_cast<float>(code_at(packed, i, bits)) >= grid.first()[entry_of(channels, i)];
    CHECK(equal<T>(out[i], above ? x[i] : N::narrow(N::wide(x[i]) / 2)));
  }
}

}  // namespace

void test_fixed_point(const Kernels& kernels) {
  struct Case {
    int64_t n;
    VectorIndex channels, statistics;
  };
  const std::vector<Case> cases = {{0, {1, 1}, {1, 1}},         {1, {1, 1}, {1, 1}},
                                   {31, {31, 1}, {1, 31}},      {600, {6, 10}, {6, 10}},
                                   {600, {600, 1}, {1, 600}},   {4200, {7, 1}, {60, 70}},
                                   {2048, {64, 1}, {64, 1}},    {6144, {3, 1024}, {3, 1024}},
                                   {5130, {513, 1}, {10, 513}}, {1400, {2, 700}, {1, 1}}};
  for (const Case& tested : cases) {
    const int bits = 1 + static_cast<int>(generator() % 8);
    test_type<float, DType::float32>(kernels, tested.n, tested.channels, tested.statistics, bits);
    test_type<double, DType::float64>(kernels, tested.n, tested.channels, tested.statistics, bits);
    test_type<uint16_t, DType::float16>(kernels, tested.n, tested.channels, tested.statistics, bits);
    test_type<uint16_t, DType::bfloat16>(kernels, tested.n, tested.channels, tested.statistics, bits);
  }
}
