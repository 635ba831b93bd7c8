// The numbers of channels for one instruction set. The file is compiled as kernels.cpp is: several times, without standard library
// templates.

#include "../common/channels.h"

#include <cstring>

#include "../common/quantize.h"
#include "kernels.h"

#if defined(FEWBIT_AVX512)
#include "simd_avx512.h"
#elif defined(FEWBIT_AVX2)
#include "simd_avx2.h"
#else
#include "simd_baseline.h"
#endif

#include "group_io.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

ChannelStatistics channel_statistics;

namespace {

static_assert(kChannelBlock == kPart, "Normalizer takes a block of channels at a time");

// Returns the sum of the variances of a block, added up as the elements of a group. Overwrites them.
inline float sum_of_block(float* numbers) {
  for (int half = kChannelBlock / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) numbers[i] += numbers[i + half];
  }
  return numbers[0];
}

template <class Number>
void statistics(const typename Number::Type* x, const Normalization& normalization, int64_t rows, int64_t channels,
                int64_t begin, int64_t end, uint16_t* out) {
  typedef typename Number::Type T;
  alignas(64) T copy[kChannelBlock];
  alignas(64) float wide[kChannelBlock], sums[kChannelBlock], squares[kChannelBlock], variances[kChannelBlock];
  alignas(64) float of_run[kChannelBlock], squares_of_run[kChannelBlock];
  Normalizer normalizer(normalization);
  const int64_t taken = estimated_rows(rows);
  const float n = static_cast<float>(taken);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kChannelBlock, left = channels - first;
    const int m = left < kChannelBlock ? static_cast<int>(left) : kChannelBlock;
    memset(copy, 0, sizeof copy);
    memset(sums, 0, sizeof sums);
    memset(squares, 0, sizeof squares);
    for (int run = 0; run < kRowRuns; ++run) {
      memset(of_run, 0, sizeof of_run);
      memset(squares_of_run, 0, sizeof squares_of_run);
      for (int64_t i = run_begin(run, taken); i < run_begin(run + 1, taken); ++i) {
        const int64_t element = estimated_row(i, taken, rows) * channels + first;
        memcpy(copy, x + element, m * sizeof(T));
        const float* values = Number::widen(copy, wide, kChannelBlock);
        if (normalizer.exists()) {
          normalizer.apply(element, m, values, wide);
          values = wide;
        }
#pragma GCC ivdep
        for (int j = 0; j < m; ++j) {
          of_run[j] += values[j];
          squares_of_run[j] += values[j] * values[j];
        }
      }
      for (int j = 0; j < m; ++j) {
        sums[j] += of_run[j];
        squares[j] += squares_of_run[j];
      }
    }
    for (int j = 0; j < kChannelBlock; ++j) variances[j] = j < m ? channel_variance(sums[j], squares[j], n) : 0.0f;
    memcpy(squares, variances, sizeof variances);
    const float average = sum_of_block(variances) / static_cast<float>(m);
    for (int j = 0; j < m; ++j) {
      const ChannelNumbers numbers = channel_numbers(sums[j], squares[j], average, n);
      out[2 * (first + j)] = narrow_bfloat16(numbers.mean);
      out[2 * (first + j) + 1] = narrow_bfloat16(numbers.scale);
    }
  }
}

}  // namespace

void channel_statistics(const void* x, DType dtype, const Normalization& normalization, int64_t rows, int64_t channels,
                        int64_t begin, int64_t end, uint16_t* out) {
  with_number(dtype, [=, &normalization](auto number) {
    typedef decltype(number) Number;
    statistics<Number>(static_cast<const typename Number::Type*>(x), normalization, rows, channels, begin, end, out);
  });
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
