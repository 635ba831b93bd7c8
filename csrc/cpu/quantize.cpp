// The kernels of uniform copies for one instruction set. The file is compiled as kernels.cpp is: several times, without
// standard library templates.
//
// A group is read from memory once. It is still in the first cache when its extremes are known and its codes are computed.

#include <cstring>

#include "../common/planes.h"
#include "../common/quantize.h"
#include "../common/streams.h"
#include "kernels.h"

#if defined(FEWBIT_AVX512)
#include "quantize_avx512.h"
#elif defined(FEWBIT_AVX2)
#include "quantize_avx2.h"
#else
#include "quantize_baseline.h"
#endif

#include "draws.h"
#include "group_io.h"
#include "word_writer.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

extern const QuantizerKernels uniform_kernels;

namespace {

// -- bits as a constant ----------------------------------------------------------------------------------------

struct OfBits {
  void (*quantize)(const float* x, int blocks, const GroupLimits& limits, const uint32_t* draws, uint32_t* words);
  void (*restore)(const uint32_t* words, int blocks, const GroupLimits& limits, float* out);
};

// These functions are not inlined, because each is a loop of its own.
template <int BITS>
void quantize_part(const float* x, int blocks, const GroupLimits& limits, const uint32_t* draws, uint32_t* words) {
  quantize_blocks<BITS>(x, blocks, limits, draws, words);
}

template <int BITS>
void restore_part(const uint32_t* words, int blocks, const GroupLimits& limits, float* out) {
  restore_blocks<BITS>(words, blocks, limits, out);
}

template <int BITS>
constexpr OfBits of_bits = {quantize_part<BITS>, restore_part<BITS>};

constexpr OfBits kOfBits[] = {of_bits<1>, of_bits<2>, of_bits<3>, of_bits<4>,
                              of_bits<5>, of_bits<6>, of_bits<7>, of_bits<8>};

// -- quantize --------------------------------------------------------------------------------------------------

template <class Number>
void quantize_groups(const Streams& streams, const int64_t* order, const typename Number::Type* x,
                     const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
                     uint16_t* ranges) {
  alignas(64) typename Number::Type copy[kPart];
  alignas(64) float wide[kPart];
  alignas(64) uint32_t draws[4 * kDrawCounters];
  uint32_t words[kPartBlocks * kMaxBits];
  const DrawKeys keys(seed);
  Normalizer normalizer(normalization);
  const float infinity = __builtin_inff();
  while (begin < end) {
    const Stream& stream = stream_of(streams, begin);
    const int64_t last = stream.first_group + stream.groups < end ? stream.first_group + stream.groups : end;
    const int bits = stream.bits;
    const auto quantize_part = kOfBits[bits - 1].quantize;
    Cursor cursor(streams, stream, order, begin - stream.first_group, last - stream.first_group);
    WordWriter writer(packed + stream.first_word, bits, cursor.group().first);
    for (; cursor.exists(); cursor.advance()) {
      const Group& group = cursor.group();
      float least = infinity, greatest = -infinity;
      bool clean = true;
      const float* values = wide;
      for (int at = 0; at < group.length; at += kPart) {
        const int m = part_size(group, at);
        values = normalized(normalizer, cursor, at, m, read<Number>(cursor, x, at, m, copy, wide), wide);
        clean &= extremes(values, blocks_of(m) * kBlock, least, greatest);
      }
      const GroupLimits limits = limits_of(least, greatest, clean, bits);
      store_limits(limits, cursor.number(), ranges);
      for (int at = 0; at < group.length; at += kPart) {
        const int m = part_size(group, at);
        uint32_t* direct = writer.direct(m);
        uint32_t* to = direct ? direct : words;
        if (is_kept(limits)) {
          if (group.length > kPart) {
            values = normalized(normalizer, cursor, at, m, read<Number>(cursor, x, at, m, copy, wide), wide);
          }
          draw_words(keys, first_counter(cursor.number(), at / kPart, streams.group_size), draws);
          quantize_part(values, blocks_of(m), limits, draws, to);
        } else {
          memset(to, 0, blocks_of(m) * bits * sizeof(uint32_t));
        }
        if (!direct) writer.put(words, m);
      }
    }
    writer.finish(last == stream.first_group + stream.groups);
    begin = last;
  }
}

void quantize(const Streams& streams, const int64_t* order, const void* x, DType dtype,
              const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
              uint16_t* ranges) {
  with_number(dtype, [=, &streams, &normalization](auto number) {
    typedef decltype(number) Number;
    quantize_groups<Number>(streams, order, static_cast<const typename Number::Type*>(x), normalization, seed, begin,
                            end, packed, ranges);
  });
}

// -- squares ---------------------------------------------------------------------------------------------------

template <class Number>
void squares_of_groups(const Streams& streams, const typename Number::Type* x, const Normalization& normalization,
                       int64_t begin, int64_t end, float* out) {
  alignas(64) typename Number::Type copy[kPart];
  alignas(64) float wide[kPart];
  Normalizer normalizer(normalization);
  const float infinity = __builtin_inff();
  Cursor cursor(streams, streams.of[0], nullptr, begin, end);
  for (; cursor.exists(); cursor.advance()) {
    const Group& group = cursor.group();
    float least = infinity, greatest = -infinity;
    bool clean = true;
    for (int at = 0; at < group.length; at += kPart) {
      const int m = part_size(group, at);
      const float* values =
          normalized(normalizer, cursor, at, m, read<Number>(cursor, x, at, m, copy, wide), wide);
      clean &= extremes(values, blocks_of(m) * kBlock, least, greatest);
    }
    const float range = limits_of(least, greatest, clean, 1).range;  // NaN if there is none
    out[cursor.number()] = static_cast<float>(group.length) * (range * range);
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

template <class Number>
void dequantize_groups(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                       const ValueMap& value_map, int64_t begin, int64_t end, typename Number::Type* out,
                       bool past_caches) {
  uint32_t buffer[(kPartBlocks + 1) * kMaxBits];
  ValueWriter<Number> writer(out, value_map, past_caches);
  while (begin < end) {
    const Stream& stream = stream_of(streams, begin);
    const int64_t last = stream.first_group + stream.groups < end ? stream.first_group + stream.groups : end;
    const auto restore_part = kOfBits[stream.bits - 1].restore;
    Cursor cursor(streams, stream, order, begin - stream.first_group, last - stream.first_group);
    for (; cursor.exists(); cursor.advance()) {
      const Group& group = cursor.group();
      const GroupLimits limits = load_limits(ranges, cursor.number());
      for (int at = 0; at < group.length; at += kPart) {
        const int m = part_size(group, at);
        const uint32_t* words =
            words_from(packed + stream.first_word, group.first + at, m, stream.bits, buffer);
        writer.put(cursor, at, m, [=](float* to) { restore_part(words, blocks_of(m), limits, to); });
      }
    }
    begin = last;
  }
  writer.finish();
}

void dequantize(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                uint64_t, const ValueMap& value_map, int64_t begin, int64_t end, void* out, DType dtype,
                bool past_caches) {
  with_number(dtype, [=, &streams, &value_map](auto number) {
    typedef decltype(number) Number;
    dequantize_groups<Number>(streams, order, packed, ranges, value_map, begin, end,
                              static_cast<typename Number::Type*>(out), past_caches);
  });
}

}  // namespace

const QuantizerKernels uniform_kernels = {quantize, squares, dequantize};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
