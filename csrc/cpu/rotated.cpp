// The kernels of copies whose groups are rotated, for one instruction set. The file is compiled as kernels.cpp is: several times, without standard
// library templates.
//
// The sum of a group has to be known before its energy, and the energy before its codes. Several groups are handled together,
// step by step, so that a processor does not wait for the end of such a chain: each group's step is independent of the others'.

// The flag is in the .flags files for other loops. Here it would begin with all loads, for which there are not enough registers.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-schedule-insns")
#endif

#include <cstring>

#include "../common/planes.h"
#include "../common/rotate.h"
#include "../common/streams.h"
#include "kernels.h"

#if defined(FEWBIT_AVX512)
#include "quantize_avx512.h"
#include "rotate_avx512.h"
#elif defined(FEWBIT_AVX2)
#include "quantize_avx2.h"
#include "rotate_avx2.h"
#else
#include "quantize_baseline.h"
#include "rotate_baseline.h"
#endif

#include "group_io.h"
#include "rotated_codes.h"
#include "rotations.h"
#include "signs.h"
#include "word_writer.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

extern const QuantizerKernels rotated_kernels;
extern const QuantizerKernels masked_kernels;

namespace {

static_assert(kPart == kFullGroup, "a group is read and written at a time");

// -- Groups ----------------------------------------------------------------------------------------------------

// The elements of a group in float32.
struct Elements {
  const float* values;  // m numbers, followed by zeros up to kFullGroup
  int m;
  int count;  // the number of elements that the mean is taken of
  GroupSum sum;
};

inline int count_nonzero(const float* values, int m) {
  int count = 0;
  for (int i = 0; i < m; ++i) count += values[i] != 0.0f;
  return count;
}

// Reads groups.
template <class Number>
class GroupReader {
  typedef typename Number::Type T;

 public:
  GroupReader(const T* x, const Normalization& normalization, bool is_masked)
      : x_(x), normalizer_(normalization), is_masked_(is_masked) {}

  Normalizer& normalizer() { return normalizer_; }

  // Reads the cursor's group. wide: kFullGroup numbers that the elements may be in.
  Elements read(const Cursor& cursor, float* wide) {
    const int m = cursor.group().length;
    const float* values = FEWBIT_NAMESPACE::read<Number>(cursor, x_, 0, m, copy_, wide);
    values = normalized(normalizer_, cursor, 0, m, values, wide);
    if (static_cast<const void*>(values) == copy_) {
      // The next group is read into the same copy, before the batch is done with this one.
      memcpy(wide, values, blocks_of(m) * kBlock * sizeof(float));
      values = wide;
    }
    GroupSum sum{0.0f, __builtin_inff(), -__builtin_inff()};
    if (m == kFullGroup) {
      sum = sum_of_group(values);
    } else {
      extremes(values, blocks_of(m) * kBlock, sum.least, sum.greatest);
      if (values != wide) memcpy(wide, values, m * sizeof(float));
      memset(wide + m, 0, (kFullGroup - m) * sizeof(float));
      sum.sum = sum_of_group(wide).sum;
      values = wide;
    }
    return {values, m, is_masked_ ? count_nonzero(values, m) : m, sum};
  }

 private:
  alignas(64) T copy_[kPart];
  const T* x_;
  Normalizer normalizer_;
  bool is_masked_;
};

// Replaces elements that are 0 by the mean, so that their remainders are 0. The zeros after the elements are replaced too, and
// the sum becomes that of all kFullGroup numbers. to: memory for these numbers, which may be the elements'.
inline void fill_zeros(Elements& elements, float mean, float* to) {
  const float* from = elements.values;
  for (int i = 0; i < kFullGroup; ++i) to[i] = from[i] == 0.0f ? mean : from[i];
  elements.values = to;
  elements.sum = sum_of_group(to);
}

// Returns the energy of m elements minus `mean`, times `factor`.
inline float energy_of(const float* values, int m, float mean, float factor) {
  if (m == kFullGroup && factor == 1.0f) return energy_of_group(values, mean);
  alignas(64) float remainders[kFullGroup];
  subtract(values, m, mean, factor, remainders);
  return energy_of_group(remainders, 0.0f);
}

inline Remainders remainders_of(const Elements& elements, float mean) {
  Remainders of;
  of.mean = mean;
  of.energy = energy_of(elements.values, elements.m, mean, 1.0f);
  of.factor = rescue_factor(of.energy);
  if (of.factor != 1.0f) of.energy = energy_of(elements.values, elements.m, mean, of.factor);
  const float above = elements.sum.greatest - mean, below = mean - elements.sum.least;
  of.greatest = (above > below ? above : below) * of.factor;
  return of;
}

// Several groups, which are handled together.
template <class Number>
class Batch {
 public:
  explicit Batch(bool is_masked) : is_masked_(is_masked) {}

  // Reads the next groups and moves the cursor on.
  void read(Cursor& cursor, GroupReader<Number>& reader) {
    for (count_ = 0; count_ < kMost && cursor.exists(); ++count_, cursor.advance()) {
      entries_[count_].number = cursor.number();
      entries_[count_].place = cursor.group().first;
      entries_[count_].elements = reader.read(cursor, wide_[count_]);
    }
  }

  void find_remainders() {
    for (int i = 0; i < count_; ++i) {
      Elements& elements = entries_[i].elements;
      const float mean = elements.count > 0 ? group_mean(elements.sum.sum, elements.count) : 0.0f;
      if (is_masked_) fill_zeros(elements, mean, wide_[i]);
      entries_[i].remainders = remainders_of(elements, mean);
    }
  }

  void store_codes(const RotatedCodes& codes, int bits, Signs& signs, WordWriter& writer, uint16_t* ranges) {
    float rms[kMost];
    for (int i = 0; i < count_; ++i) {
      rms[i] = root_mean_square(entries_[i].remainders.energy, entries_[i].elements.m);
    }
    for (int i = 0; i < count_; ++i) {
      const Entry& entry = entries_[i];
      const int m = entry.elements.m;
      uint32_t words[kPartBlocks * kMaxBits];
      uint32_t* direct = writer.direct(m);
      uint32_t* to = direct ? direct : words;
      uint16_t scale = 0;
      if (entry.remainders.has_codes()) {
        scale = codes.encode(entry.elements.values, m, entry.number, entry.remainders, rms[i], signs, to);
      } else {
        memset(to, 0, blocks_of(m) * bits * sizeof(uint32_t));
      }
      if (!direct) writer.put(words, m);
      if (entry.remainders.has_values()) {
        store_scale(entry.remainders.mean, scale, entry.number, ranges);
      } else {
        store_no_scale(entry.number, ranges);
      }
    }
  }

  // The samples have to be in order.
  void store_squares(Normalizer& normalizer, float* out) const {
    for (int i = 0; i < count_; ++i) {
      const Remainders& of = entries_[i].remainders;
      const Elements& elements = entries_[i].elements;
      const float back = inverse_rescue(of.factor);
      float energy = of.energy * back * back;
      // Errors of elements that are left out do not count.
      if (is_masked_) energy = energy * static_cast<float>(elements.count) / static_cast<float>(elements.m);
      // Errors are multiplied by the scales of channels.
      if (normalizer.has_channels()) energy *= normalizer.mean_square_scale(entries_[i].place, elements.m);
      out[entries_[i].number] = of.has_values() ? energy : __builtin_nanf("");
    }
  }

 private:
  static constexpr int kMost = 8;  // groups; their elements stay in the first cache

  struct Entry {
    int64_t number;
    int64_t place;  // of the first element in the stream
    Elements elements;
    Remainders remainders;
  };

  const bool is_masked_;
  int count_ = 0;
  Entry entries_[kMost];
  alignas(64) float wide_[kMost][kFullGroup];
};

// -- quantize --------------------------------------------------------------------------------------------------

template <class Number>
void quantize_groups(const Streams& streams, const int64_t* order, const typename Number::Type* x,
                     const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
                     uint16_t* ranges, bool is_masked) {
  GroupReader<Number> reader(x, normalization, is_masked);
  Batch<Number> batch(is_masked);
  Signs signs(seed);
  while (begin < end) {
    const Stream& stream = stream_of(streams, begin);
    const int64_t last = stream.first_group + stream.groups < end ? stream.first_group + stream.groups : end;
    Cursor cursor(streams, stream, order, begin - stream.first_group, last - stream.first_group);
    const RotatedCodes codes(stream.bits);
    WordWriter writer(packed + stream.first_word, stream.bits, cursor.group().first);
    while (cursor.exists()) {
      batch.read(cursor, reader);
      batch.find_remainders();
      batch.store_codes(codes, stream.bits, signs, writer, ranges);
    }
    writer.finish(last == stream.first_group + stream.groups);
    begin = last;
  }
}

template <bool IsMasked>
void quantize(const Streams& streams, const int64_t* order, const void* x, DType dtype,
              const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
              uint16_t* ranges) {
  with_number(dtype, [=, &streams, &normalization](auto number) {
    typedef decltype(number) Number;
    quantize_groups<Number>(streams, order, static_cast<const typename Number::Type*>(x), normalization, seed,
                            begin, end, packed, ranges, IsMasked);
  });
}

// -- squares ---------------------------------------------------------------------------------------------------

template <class Number>
void squares_of_groups(const Streams& streams, const typename Number::Type* x, const Normalization& normalization,
                       int64_t begin, int64_t end, float* out, bool is_masked) {
  GroupReader<Number> reader(x, normalization, is_masked);
  Batch<Number> batch(is_masked);
  Cursor cursor(streams, streams.of[0], nullptr, begin, end);
  while (cursor.exists()) {
    batch.read(cursor, reader);
    batch.find_remainders();
    batch.store_squares(reader.normalizer(), out);
  }
}

template <bool IsMasked>
void squares(const Streams& streams, const void* x, DType dtype, const Normalization& normalization, int64_t begin,
             int64_t end, float* out) {
  with_number(dtype, [=, &streams, &normalization](auto number) {
    typedef decltype(number) Number;
    squares_of_groups<Number>(streams, static_cast<const typename Number::Type*>(x), normalization, begin, end, out, IsMasked);
  });
}

// -- dequantize ------------------------------------------------------------------------------------------------

template <class Number>
void dequantize_groups(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                       uint64_t seed, const ValueMap& value_map, int64_t begin, int64_t end, typename Number::Type* out,
                       bool past_caches) {
  uint32_t buffer[(kPartBlocks + 1) * kMaxBits];
  ValueWriter<Number> writer(out, value_map, past_caches);
  Signs signs(seed);
  while (begin < end) {
    const Stream& stream = stream_of(streams, begin);
    const int64_t last = stream.first_group + stream.groups < end ? stream.first_group + stream.groups : end;
    const RotatedCodes codes(stream.bits);
    Cursor cursor(streams, stream, order, begin - stream.first_group, last - stream.first_group);
    for (; cursor.exists(); cursor.advance()) {
      const Group& group = cursor.group();
      const GroupScale scale = load_scale(ranges, cursor.number());
      const uint32_t* words = words_from(packed + stream.first_word, group.first, group.length, stream.bits, buffer);
      writer.put(cursor, 0, group.length, [&](float* to) {
        codes.restore(words, group.length, cursor.number(), scale, signs, to);
      });
    }
    begin = last;
  }
  writer.finish();
}

void dequantize(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                uint64_t seed, const ValueMap& value_map, int64_t begin, int64_t end, void* out, DType dtype,
                bool past_caches) {
  with_number(dtype, [=, &streams, &value_map](auto number) {
    typedef decltype(number) Number;
    dequantize_groups<Number>(streams, order, packed, ranges, seed, value_map, begin, end,
                              static_cast<typename Number::Type*>(out), past_caches);
  });
}

}  // namespace

const QuantizerKernels rotated_kernels = {quantize<false>, squares<false>, dequantize};
const QuantizerKernels masked_kernels = {quantize<true>, squares<true>, dequantize};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
