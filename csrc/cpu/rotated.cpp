// The kernels of rotated copies for one instruction set. The file is compiled as kernels.cpp is: several times, without standard
// library templates.
//
// The sum of a group has to be known before its energy, and the energy before its codes. Several groups are handled together,
// step by step, so that a processor does not wait for the end of such a chain: each group's step is independent of the others'.

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
  uint64_t of_transform[kSignQuarters];
  signs.of(part, rotation, 0, of_transform);
  multiply_signed(y, 0, size, root, of_transform);
  multiply_signed(y, size, m, 1.0f, of_transform);
  transform(y, size);
  if (size == m) return;
  signs.of(part, rotation, 1, of_transform);
  multiply_signed(y, m - size, m, root, of_transform);
  transform(y + m - size, size);
}

// Undoes a rotation, and multiplies the numbers by `scale`.
void rotate_back(float* y, int m, Signs& signs, int64_t part, int rotation, float scale) {
  const int size = transform_size(m);
  const float root = inverse_root(size);
  uint64_t of_transform[kSignQuarters];
  if (size < m) {
    signs.of(part, rotation, 1, of_transform);
    transform(y + m - size, size);
    multiply_signed(y, m - size, m, root, of_transform);
  }
  signs.of(part, rotation, 0, of_transform);
  transform(y, size);
  multiply_signed(y, 0, size, scale * root, of_transform);
  multiply_signed(y, size, m, scale, of_transform);
}

// -- Groups ----------------------------------------------------------------------------------------------------

// The settings of a stream's copy.
struct Settings {
  int bits, group_size;
  bool fp32_min;
  OfBits kernels;

  Settings(const Streams& streams, const Stream& stream)
      : bits(stream.bits),
        group_size(streams.group_size),
        fp32_min(streams.fp32_min),
        kernels(kOfBits[stream.bits - 1]) {}

  // Returns the number of a part among all parts, see Signs.
  int64_t part_number(int64_t group, int part) const {
    return group * quotient_up(group_size, kRotatedPart) + part;
  }
};

// What is known of a group's elements.
struct Summary {
  float sum = 0.0f, least = __builtin_inff(), greatest = -__builtin_inff();

  // Adds the next part.
  void add(const PartSum& part) {
    sum += part.sum;
    least = part.least < least ? part.least : least;
    greatest = part.greatest > greatest ? part.greatest : greatest;
  }
};

// What is known of a group's remainders, the elements minus their mean.
struct Remainders {
  float mean, energy, factor, greatest;  // energy and greatest magnitude after the multiplication by `factor`

  bool has_values() const { return FEWBIT_NAMESPACE::has_values(energy, mean); }
  bool has_codes() const { return has_values() && energy > 0.0f; }
  bool is_twice() const { return needs_second_rotation(greatest, energy); }
};

// The m elements of a part in float32, m > 0, followed by zeros up to kRotatedPart.
struct Part {
  const float* values;
  int m;
  int64_t number;  // among all parts, see Signs
};

// Reads the parts of groups.
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

// Returns the remainders of a group of n elements. energy(mean, factor) computes their energy.
template <class Energy>
inline Remainders remainders_of(const Summary& summary, int n, bool fp32_min, const Energy& energy) {
  Remainders of;
  of.mean = group_mean(summary.sum, n, fp32_min);
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
  const bool is_twice = of.is_twice();
  if (m == kRotatedPart && of.factor == 1.0f && !is_twice) {
    return kernels.code_part(values, of.mean, signs.first(number), rms, words);
  }
  alignas(64) float y[kRotatedPart];
  subtract(values, m, of.mean, of.factor, y);
  rotate(y, m, signs, number, 0);
  if (is_twice) rotate(y, m, signs, number, 1);
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
      entry.summary.add(sum);
    }
  }

  void quantize(Signs& signs, WordWriter& writer, uint16_t* ranges) {
    for (int i = 0; i < count_; ++i) {
      Entry& entry = entries_[i];
      const auto energy = [&](float mean, float factor) { return energy_of(entry.values, entry.m, mean, factor); };
      entry.remainders = remainders_of(entry.summary, entry.m, settings_.fp32_min, energy);
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
    const float* values = reader.read(cursor, at, wide, &sum);
    extend(spread, sum, values, part_size(group, at));
    summary.add(sum);
  }
  const Remainders of = remainders_of(summary, group.length, settings.fp32_min, [&](float mean, float factor) {
    float energy = 0.0f;
    for (int at = 0; at < group.length; at += kRotatedPart) {
      energy += energy_of(reader.read(cursor, at, wide, nullptr), part_size(group, at), mean, factor);
    }
    return energy;
  });
  const float rms = root_mean_square(of.energy, group.length);
  float inner = 0.0f;
  for (int at = 0; at < group.length; at += kRotatedPart) {
    const int m = part_size(group, at);
    put_words(writer, m, settings.bits, of.has_codes(), [&](uint32_t* words) {
      const int64_t number = settings.part_number(cursor.number(), at / kRotatedPart);
      inner += code(settings.kernels, reader.read(cursor, at, wide, nullptr), m, number, of, rms, signs, words);
    });
  }
  store(settings, cursor.number(), of, inner, signs, ranges);
}

template <class Number>
void quantize_groups(const Streams& streams, const int64_t* order, const typename Number::Type* x,
                     const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
                     uint16_t* ranges, Spread& spread) {
  PartReader<Number> reader(x, normalization);
  Signs signs(seed);
  while (begin < end) {
    const Stream& stream = stream_of(streams, begin);
    const int64_t last = stream.first_group + stream.groups < end ? stream.first_group + stream.groups : end;
    const Settings settings(streams, stream);
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

void quantize(const Streams& streams, const int64_t* order, const void* x, DType dtype,
              const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
              uint16_t* ranges, Spread& spread) {
  with_number(dtype, [=, &streams, &normalization, &spread](auto number) {
    typedef decltype(number) Number;
    quantize_groups<Number>(streams, order, static_cast<const typename Number::Type*>(x), normalization, seed, begin,
                            end, packed, ranges, spread);
  });
}

// -- squares ---------------------------------------------------------------------------------------------------

template <class Number>
void squares_of_groups(const Streams& streams, const typename Number::Type* x, const Normalization& normalization,
                       int64_t begin, int64_t end, float* out) {
  alignas(64) float wide[kRotatedPart];
  PartReader<Number> reader(x, normalization);
  Cursor cursor(streams, streams.of[0], nullptr, begin, end);
  for (; cursor.exists(); cursor.advance()) {
    const Group& group = cursor.group();
    const float* values = wide;
    Summary summary;
    for (int at = 0; at < group.length; at += kRotatedPart) {
      PartSum sum;
      values = reader.read(cursor, at, wide, &sum);
      summary.add(sum);
    }
    const Remainders of = remainders_of(summary, group.length, true, [&](float mean, float factor) {
      float energy = 0.0f;
      for (int at = 0; at < group.length; at += kRotatedPart) {
        if (group.length > kRotatedPart) values = reader.read(cursor, at, wide, nullptr);
        energy += energy_of(values, part_size(group, at), mean, factor);
      }
      return energy;
    });
    const float back = inverse_rescue(of.factor);
    out[cursor.number()] = of.has_values() ? of.energy * back * back : __builtin_nanf("");
  }
}

void squares(const Streams& streams, const void* x, DType dtype, const Normalization& normalization, int64_t begin,
             int64_t end, float* out) {
  with_number(dtype, [=, &streams, &normalization](auto number) {
    typedef decltype(number) Number;
    squares_of_groups<Number>(streams, static_cast<const typename Number::Type*>(x), normalization, begin, end, out);
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
  if (group.is_twice) rotate_back(y, m, signs, number, 1, 1.0f);
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
    const Settings settings(streams, stream);
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

const QuantizerKernels rotated_kernels = {quantize, squares, dequantize};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
