// The kernels of rotated copies for one instruction set. The file is compiled as kernels.cpp is: several times, without standard
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
#include "signs.h"
#include "word_writer.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

extern const QuantizerKernels rotated_kernels;
extern const QuantizerKernels masked_kernels;

namespace {

static_assert(kPart == kRotatedPart, "a part is read, rotated and written at a time");

// -- bits as a constant ----------------------------------------------------------------------------------------

struct OfBits {
  float (*code_part)(const float* x, float shift, const uint64_t* signs, float rms, uint32_t* words);
  float (*code_blocks)(const float* y, int blocks, float rms, uint32_t* words);
  void (*restore_part)(const uint32_t* words, const uint64_t* signs, float mean, float scale, float* out);
  void (*levels_of_blocks)(const uint32_t* words, int blocks, float* y);
};

template <int BITS>
constexpr OfBits of_bits = {code_part<BITS>, code_blocks<BITS>, restore_part<BITS>, levels_of_blocks<BITS>};

constexpr OfBits kOfBits[] = {of_bits<1>, of_bits<2>, of_bits<3>, of_bits<4>,
                              of_bits<5>, of_bits<6>, of_bits<7>, of_bits<8>};

// -- Rotations of parts of any length --------------------------------------------------------------------------

// Rotates the m numbers of part number `part`. rotation: 0 or 1.
void rotate(float* y, int m, Signs& signs, int64_t part, int rotation) {
  const int size = transform_size(m);
  const float root = inverse_root(size);
  const uint64_t* of_transform = signs.of(part, rotation, 0);
  multiply_signed(y, 0, size, root, of_transform);
  multiply_signed(y, size, m, 1.0f, of_transform);
  transform(y, size);
  if (size == m) return;
  of_transform = signs.of(part, rotation, 1);
  multiply_signed(y, m - size, m, root, of_transform);
  transform(y + m - size, size);
}

// Moves the m numbers of a part by `places` to the left, around the end.
void move(float* y, int m, int places) {
  if (places == 0) return;
  float first[kRotatedPart];
  memcpy(first, y, places * sizeof(float));
  memmove(y, y + places, (m - places) * sizeof(float));
  memcpy(y + m - places, first, places * sizeof(float));
}

// Undoes a rotation, and multiplies the numbers by `scale`.
void rotate_back(float* y, int m, Signs& signs, int64_t part, int rotation, float scale) {
  const int size = transform_size(m);
  const float root = inverse_root(size);
  if (size < m) {
    transform(y + m - size, size);
    multiply_signed(y, m - size, m, root, signs.of(part, rotation, 1));
  }
  const uint64_t* of_transform = signs.of(part, rotation, 0);
  transform(y, size);
  multiply_signed(y, 0, size, scale * root, of_transform);
  multiply_signed(y, size, m, scale, of_transform);
}

// -- Groups ----------------------------------------------------------------------------------------------------

// The settings of a stream's copy.
struct Settings {
  int bits, group_size;
  bool fp32_min, is_masked;
  OfBits kernels;

  Settings(const Streams& streams, const Stream& stream, bool is_masked)
      : bits(stream.bits),
        group_size(streams.group_size),
        fp32_min(streams.fp32_min),
        is_masked(is_masked),
        kernels(kOfBits[stream.bits - 1]) {}

  // Returns the number of a part among all parts, see Signs.
  int64_t part_number(int64_t group, int part) const {
    return group * quotient_up(group_size, kRotatedPart) + part;
  }
};

// The sum, the extremes and the count of a group's elements.
struct Summary {
  float sum = 0.0f, least = __builtin_inff(), greatest = -__builtin_inff();
  int count = 0;  // the number of elements that the mean is taken of

  // Adds the next part, with `elements` elements that the mean is taken of.
  void add(const PartSum& part, int elements) {
    sum += part.sum;
    count += elements;
    extend(part.least, part.greatest);
  }

  void extend(float low, float high) {
    least = low < least ? low : least;
    greatest = high > greatest ? high : greatest;
  }

  float mean(bool fp32_min) const { return count == 0 ? 0.0f : group_mean(sum, count, fp32_min); }
};

inline int count_nonzero(const float* values, int m) {
  int count = 0;
  for (int i = 0; i < m; ++i) count += values[i] != 0.0f;
  return count;
}

// Writes the m values of a part to `out`, with `mean` in place of zeros, so that the remainders of these elements are 0. The
// part ends with zeros, as in `PartReader::read`. out may be values.
inline const float* fill_zeros(const float* values, int m, float mean, float* out) {
  for (int i = 0; i < m; ++i) out[i] = values[i] == 0.0f ? mean : values[i];
  if (out != values) memset(out + m, 0, (kRotatedPart - m) * sizeof(float));
  return out;
}

// Extends the extremes of a group by m > 0 values.
inline void extend_by(Summary& summary, const float* values, int m) {
  float low = values[0], high = values[0];
  for (int i = 1; i < m; ++i) {
    low = values[i] < low ? values[i] : low;
    high = values[i] > high ? values[i] : high;
  }
  summary.extend(low, high);
}

// The mean of a group, and facts about its remainders, the elements minus the mean.
struct Remainders {
  float mean, energy, factor, greatest;  // energy and greatest magnitude after the multiplication by `factor`

  bool has_values() const { return FEWBIT_NAMESPACE::has_values(energy, mean); }
  bool has_codes() const { return has_values() && energy > 0.0f; }
  bool is_twice() const { return needs_second_rotation(greatest, energy); }
};

// Reads the parts of groups: m elements in float32, m > 0, followed by zeros up to kRotatedPart.
template <class Number>
class PartReader {
  typedef typename Number::Type T;

 public:
  PartReader(const T* x, const Normalization& normalization) : x_(x), normalizer_(normalization) {}

  // Reads the part that begins with element `at` of the cursor's group. wide: kRotatedPart numbers that the result may be in.
  const float* read(const Cursor& cursor, int at, float* wide, PartSum* sum) {
    const int m = part_size(cursor.group(), at);
    const float* values = FEWBIT_NAMESPACE::read<Number>(cursor, x_, at, m, copy_, wide);
    values = normalized(normalizer_, cursor, at, m, values, wide);
    if (m == kRotatedPart) {
      if (sum) *sum = sum_of_part(values);
      return values;
    }
    float least = __builtin_inff(), greatest = -least;
    if (sum) extremes(values, blocks_of(m) * kBlock, least, greatest);
    if (values != wide) memcpy(wide, values, m * sizeof(float));
    memset(wide + m, 0, (kRotatedPart - m) * sizeof(float));
    if (sum) *sum = {sum_of_part(wide).sum, least, greatest};
    return wide;
  }

 private:
  alignas(64) T copy_[kPart];
  const T* x_;
  Normalizer normalizer_;
};

// Writes the remainders of a part of m elements, times `factor`, to `out`, followed by zeros.
inline void subtract(const float* values, int m, float mean, float factor, float* out) {
  for (int i = 0; i < m; ++i) out[i] = (values[i] - mean) * factor;
  for (int i = m; i < kRotatedPart; ++i) out[i] = 0.0f;
}

// Returns the energy of a part of m elements minus `mean`, times `factor`.
inline float energy_of(const float* values, int m, float mean, float factor) {
  if (m == kRotatedPart && factor == 1.0f) return energy_of_part(values, mean);
  alignas(64) float remainders[kRotatedPart];
  subtract(values, m, mean, factor, remainders);
  return energy_of_part(remainders, 0.0f);
}

// Returns the remainders of a group. energy(mean, factor) computes their energy.
template <class Energy>
inline Remainders remainders_of(const Summary& summary, float mean, const Energy& energy) {
  Remainders of;
  of.mean = mean;
  of.energy = energy(of.mean, 1.0f);
  of.factor = rescue_factor(of.energy);
  if (of.factor != 1.0f) of.energy = energy(of.mean, of.factor);
  const float above = summary.greatest - of.mean, below = of.mean - summary.least;
  of.greatest = (above > below ? above : below) * of.factor;
  return of;
}

// Computes the words of a part of a group that has codes. Returns the part's sum of magnitudes times their levels.
inline float code(const OfBits& kernels, const float* values, int m, int64_t number, const Remainders& of, float rms,
                  Signs& signs, uint32_t* words) {
  const bool is_twice = rotates_twice(m, of.is_twice());
  if (m == kRotatedPart && of.factor == 1.0f && !is_twice) {
    return kernels.code_part(values, of.mean, signs.first(number), rms, words);
  }
  alignas(64) float y[kRotatedPart];
  subtract(values, m, of.mean, of.factor, y);
  rotate(y, m, signs, number, 0);
  if (is_twice) {
    move(y, m, shift_of(m));
    rotate(y, m, signs, number, 1);
  }
  return kernels.code_blocks(y, blocks_of(m), rms, words);
}

// Stores mean and scale. inner: the sum of magnitudes times their levels; not used if the group has no codes.
inline void store(const Settings& settings, int64_t group, const Remainders& of, float inner, Signs& signs,
                  uint16_t* ranges) {
  if (!of.has_values()) return store_no_scale(settings.fp32_min, group, ranges);
  const uint32_t random = signs.rounding(settings.part_number(group, 0));
  const uint16_t scale = stored_scale(of.energy, inner, of.factor, random, of.is_twice());
  store_scale(of.mean, scale, settings.fp32_min, group, ranges);
}

// Writes the words of parts, from `compute(words)` or zeros.
template <class Compute>
inline void put_words(WordWriter& writer, int m, int bits, bool has_codes, const Compute& compute) {
  uint32_t words[kPartBlocks * kMaxBits];
  uint32_t* direct = writer.direct(m);
  uint32_t* to = direct ? direct : words;
  if (has_codes) {
    compute(to);
  } else {
    memset(to, 0, blocks_of(m) * bits * sizeof(uint32_t));
  }
  if (!direct) writer.put(words, m);
}

// Extends the spread of a tensor by a part.
inline void extend(Spread& spread, const PartSum& part, const float* values, int m) {
  spread.least = part.least < spread.least ? part.least : spread.least;
  spread.greatest = part.greatest > spread.greatest ? part.greatest : spread.greatest;
  if (!is_finite(part.sum)) spread.nan |= has_nan(values, m);
}

// -- quantize --------------------------------------------------------------------------------------------------

constexpr int kBatch = 8;  // groups that are handled together; their elements stay in the first cache

// Quantizes groups of one part each, up to kBatch of them.
template <class Number>
class Batch {
 public:
  explicit Batch(const Settings& settings) : settings_(settings) {}

  // Reads groups and moves the cursor on.
  void read(Cursor& cursor, PartReader<Number>& reader, Spread& spread) {
    for (count_ = 0; count_ < kBatch && cursor.exists(); ++count_, cursor.advance()) {
      Entry& entry = entries_[count_];
      PartSum sum;
      entry.m = cursor.group().length;
      entry.number = cursor.number();
      entry.values = reader.read(cursor, 0, wide_[count_], &sum);
      extend(spread, sum, entry.values, entry.m);
      entry.summary = {};
      entry.summary.add(sum, settings_.is_masked ? count_nonzero(entry.values, entry.m) : entry.m);
    }
  }

  void quantize(Signs& signs, WordWriter& writer, uint16_t* ranges) {
    for (int i = 0; i < count_; ++i) {
      Entry& entry = entries_[i];
      const float mean = entry.summary.mean(settings_.fp32_min);
      if (settings_.is_masked) {
        entry.values = fill_zeros(entry.values, entry.m, mean, wide_[i]);
        entry.summary.least = __builtin_inff(), entry.summary.greatest = -__builtin_inff();
        extend_by(entry.summary, entry.values, entry.m);
      }
      const auto energy = [&](float mean, float factor) { return energy_of(entry.values, entry.m, mean, factor); };
      entry.remainders = remainders_of(entry.summary, mean, energy);
      entry.rms = root_mean_square(entry.remainders.energy, entry.m);
    }
    for (int i = 0; i < count_; ++i) {
      const Entry& entry = entries_[i];
      const Remainders& of = entry.remainders;
      float inner = 0.0f;
      put_words(writer, entry.m, settings_.bits, of.has_codes(), [&](uint32_t* words) {
        inner = code(settings_.kernels, entry.values, entry.m, entry.number, of, entry.rms, signs, words);
      });
      store(settings_, entry.number, of, inner, signs, ranges);
    }
  }

 private:
  struct Entry {
    const float* values;
    int m;
    int64_t number;
    Summary summary;
    Remainders remainders;
    float rms;
  };

  const Settings settings_;
  int count_ = 0;
  Entry entries_[kBatch];
  alignas(64) float wide_[kBatch][kRotatedPart];
};

// Quantizes the cursor's group, which may have several parts.
template <class Number>
void quantize_group(const Settings& settings, const Cursor& cursor, PartReader<Number>& reader, Signs& signs,
                    WordWriter& writer, uint16_t* ranges, Spread& spread) {
  alignas(64) float wide[kRotatedPart];
  const Group& group = cursor.group();
  Summary summary;
  for (int at = 0; at < group.length; at += kRotatedPart) {
    PartSum sum;
    const int m = part_size(group, at);
    const float* values = reader.read(cursor, at, wide, &sum);
    extend(spread, sum, values, m);
    summary.add(sum, settings.is_masked ? count_nonzero(values, m) : m);
  }
  const float mean = summary.mean(settings.fp32_min);
  const auto filled = [&](int at) {
    const float* values = reader.read(cursor, at, wide, nullptr);
    return settings.is_masked ? fill_zeros(values, part_size(group, at), mean, wide) : values;
  };
  if (settings.is_masked) {
    summary.least = __builtin_inff(), summary.greatest = -__builtin_inff();
    for (int at = 0; at < group.length; at += kRotatedPart) extend_by(summary, filled(at), part_size(group, at));
  }
  const Remainders of = remainders_of(summary, mean, [&](float mean, float factor) {
    float energy = 0.0f;
    for (int at = 0; at < group.length; at += kRotatedPart) {
      energy += energy_of(filled(at), part_size(group, at), mean, factor);
    }
    return energy;
  });
  const float rms = root_mean_square(of.energy, group.length);
  float inner = 0.0f;
  for (int at = 0; at < group.length; at += kRotatedPart) {
    const int m = part_size(group, at);
    put_words(writer, m, settings.bits, of.has_codes(), [&](uint32_t* words) {
      const int64_t number = settings.part_number(cursor.number(), at / kRotatedPart);
      inner += code(settings.kernels, filled(at), m, number, of, rms, signs, words);
    });
  }
  store(settings, cursor.number(), of, inner, signs, ranges);
}

template <class Number>
void quantize_groups(const Streams& streams, const int64_t* order, const typename Number::Type* x,
                     const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
                     uint16_t* ranges, Spread& spread, bool is_masked) {
  PartReader<Number> reader(x, normalization);
  Signs signs(seed);
  while (begin < end) {
    const Stream& stream = stream_of(streams, begin);
    const int64_t last = stream.first_group + stream.groups < end ? stream.first_group + stream.groups : end;
    const Settings settings(streams, stream, is_masked);
    Cursor cursor(streams, stream, order, begin - stream.first_group, last - stream.first_group);
    WordWriter writer(packed + stream.first_word, stream.bits, cursor.group().first);
    if (streams.group_size <= kRotatedPart) {
      Batch<Number> batch(settings);
      while (cursor.exists()) {
        batch.read(cursor, reader, spread);
        batch.quantize(signs, writer, ranges);
      }
    } else {
      for (; cursor.exists(); cursor.advance()) {
        quantize_group(settings, cursor, reader, signs, writer, ranges, spread);
      }
    }
    writer.finish(last == stream.first_group + stream.groups);
    begin = last;
  }
}

template <bool IsMasked>
void quantize(const Streams& streams, const int64_t* order, const void* x, DType dtype,
              const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
              uint16_t* ranges, Spread& spread) {
  with_number(dtype, [=, &streams, &normalization, &spread](auto number) {
    typedef decltype(number) Number;
    quantize_groups<Number>(streams, order, static_cast<const typename Number::Type*>(x), normalization, seed, begin,
                            end, packed, ranges, spread, IsMasked);
  });
}

// -- squares ---------------------------------------------------------------------------------------------------

template <class Number>
void squares_of_groups(const Streams& streams, const typename Number::Type* x, const Normalization& normalization,
                       int64_t begin, int64_t end, float* out, bool is_masked) {
  alignas(64) float wide[kRotatedPart];
  PartReader<Number> reader(x, normalization);
  Cursor cursor(streams, streams.of[0], nullptr, begin, end);
  for (; cursor.exists(); cursor.advance()) {
    const Group& group = cursor.group();
    const float* values = wide;
    Summary summary;
    for (int at = 0; at < group.length; at += kRotatedPart) {
      PartSum sum;
      const int m = part_size(group, at);
      values = reader.read(cursor, at, wide, &sum);
      summary.add(sum, is_masked ? count_nonzero(values, m) : m);
    }
    const Remainders of = remainders_of(summary, summary.mean(true), [&](float mean, float factor) {
      float energy = 0.0f;
      for (int at = 0; at < group.length; at += kRotatedPart) {
        const int m = part_size(group, at);
        if (group.length > kRotatedPart) values = reader.read(cursor, at, wide, nullptr);
        if (is_masked) values = fill_zeros(values, m, mean, wide);
        energy += energy_of(values, m, mean, factor);
      }
      return energy;
    });
    const float back = inverse_rescue(of.factor);
    float energy = of.energy * back * back;
    // Errors of elements that are left out do not count.
    if (is_masked) energy = energy * static_cast<float>(summary.count) / static_cast<float>(group.length);
    out[cursor.number()] = of.has_values() ? energy : __builtin_nanf("");
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

// Dequantizes the m numbers of a part to `out`, followed by any numbers up to whole blocks.
inline void restore(const OfBits& kernels, const uint32_t* words, int m, int64_t number, const GroupScale& group,
                    Signs& signs, float* out) {
  if (m == kRotatedPart && !group.is_twice) {
    return kernels.restore_part(words, signs.first(number), group.mean, group.scale, out);
  }
  alignas(64) float y[kRotatedPart];
  kernels.levels_of_blocks(words, blocks_of(m), y);
  if (rotates_twice(m, group.is_twice)) {
    rotate_back(y, m, signs, number, 1, 1.0f);
    move(y, m, m - shift_of(m));
  }
  rotate_back(y, m, signs, number, 0, group.scale);
  for (int i = 0; i < m; ++i) out[i] = group.mean + y[i];
  for (int i = m; i % kBlock != 0; ++i) out[i] = 0.0f;
}

template <class Number>
void dequantize_groups(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                       uint64_t seed, const Affine& affine, int64_t begin, int64_t end, typename Number::Type* out,
                       bool past_caches) {
  uint32_t buffer[(kPartBlocks + 1) * kMaxBits];
  ValueWriter<Number> writer(out, affine, past_caches);
  Signs signs(seed);
  while (begin < end) {
    const Stream& stream = stream_of(streams, begin);
    const int64_t last = stream.first_group + stream.groups < end ? stream.first_group + stream.groups : end;
    const Settings settings(streams, stream, false);
    Cursor cursor(streams, stream, order, begin - stream.first_group, last - stream.first_group);
    for (; cursor.exists(); cursor.advance()) {
      const Group& group = cursor.group();
      const GroupScale scale = load_scale(ranges, streams.fp32_min, cursor.number());
      for (int at = 0; at < group.length; at += kRotatedPart) {
        const int m = part_size(group, at);
        const uint32_t* words =
            words_from(packed + stream.first_word, group.first + at, m, stream.bits, buffer);
        const int64_t number = settings.part_number(cursor.number(), at / kRotatedPart);
        writer.put(cursor, at, m, [&](float* to) {
          restore(settings.kernels, words, m, number, scale, signs, to);
        });
      }
    }
    begin = last;
  }
  writer.finish();
}

void dequantize(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                uint64_t seed, const Affine& affine, int64_t begin, int64_t end, void* out, DType dtype,
                bool past_caches) {
  with_number(dtype, [=, &streams, &affine](auto number) {
    typedef decltype(number) Number;
    dequantize_groups<Number>(streams, order, packed, ranges, seed, affine, begin, end,
                              static_cast<typename Number::Type*>(out), past_caches);
  });
}

}  // namespace

const QuantizerKernels rotated_kernels = {quantize<false>, squares<false>, dequantize};
const QuantizerKernels masked_kernels = {quantize<true>, squares<true>, dequantize};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
