// The kernels of the group quantizer for one instruction set. The file is compiled as kernels.cpp is: several times, without
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
#include "entries.h"
#include "word_writer.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

extern const QuantizerKernels quantizer_kernels;

namespace {

constexpr int kPart = kDrawBlock;  // elements of a group that are handled at a time
constexpr int kPartBlocks = kPart / kBlock;

constexpr int blocks_of(int m) { return (m + kBlock - 1) / kBlock; }

// -- Element types: n is a multiple of kBlock ------------------------------------------------------------------

struct Float32 {
  typedef float Type;
  static const float* widen(const float* in, float*, int) { return in; }
  static const float* narrow(const float* in, float*, int) { return in; }
};

struct Float64 {
  typedef double Type;
  static const float* widen(const double* in, float* out, int n) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]);
    return out;
  }
  static const double* narrow(const float* in, double* out, int n) {
    for (int i = 0; i < n; ++i) out[i] = in[i];
    return out;
  }
};

struct Float16 {
  typedef uint16_t Type;
  static const float* widen(const uint16_t* in, float* out, int n) {
    FEWBIT_NAMESPACE::widen(in, out, n);
    return out;
  }
  static const uint16_t* narrow(const float* in, uint16_t* out, int n) {
    alignas(64) float within[kDrawBlock];
    for (int i = 0; i < n; ++i) within[i] = within_float16(in[i]);
    FEWBIT_NAMESPACE::narrow(within, out, n);
    return out;
  }
};

struct BFloat16 {
  typedef uint16_t Type;
  static const float* widen(const uint16_t* in, float* out, int n) {
    for (int i = 0; i < n; ++i) out[i] = widen_bfloat16(in[i]);
    return out;
  }
  static const uint16_t* narrow(const float* in, uint16_t* out, int n) {
    for (int i = 0; i < n; ++i) out[i] = narrow_bfloat16(in[i]);
    return out;
  }
};

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

// -- The places of a group's elements ------------------------------------------------------------------------------

// A walk over the groups [begin, end) of one stream.
class Cursor {
 public:
  Cursor(const Streams& streams, const Stream& stream, const int64_t* order, int64_t begin, int64_t end)
      : streams_(streams), stream_(stream), order_(order), index_(begin), end_(end) {
    group_ = group_at(streams, stream, begin);
    inside_ = group_.first - group_.sample * streams.features;  // unused if groups run across samples
  }

  bool exists() const { return index_ < end_; }
  int64_t number() const { return stream_.first_group + index_; }
  const Group& group() const { return group_; }

  // Returns true if the elements of a group lie side by side in the tensor.
  bool contiguous() const { return !order_ || by_sample(streams_); }

  // Returns the place of the first of them.
  int64_t place() const {
    if (!order_) return group_.first;
    return order_[stream_.first_sample + group_.sample] * streams_.features + inside_;
  }

  void advance() {
    ++index_;
    group_.first += group_.length;
    int64_t left = elements(streams_, stream_) - group_.first;
    if (by_sample(streams_)) {
      inside_ += group_.length;
      if (inside_ == streams_.features) inside_ = 0, ++group_.sample;
      left = streams_.features - inside_;
    }
    group_.length = left < streams_.group_size ? static_cast<int>(left) : streams_.group_size;
  }

  // Calls copy(place in the tensor, place in the part, count) for the pieces of the m elements from `first` on
  // of the stream, sample by sample.
  template <class Copy>
  void pieces(int64_t first, int m, const Copy& copy) const {
    int64_t sample = first / streams_.features, inside = first % streams_.features;
    for (int done = 0; done < m; ++sample, inside = 0) {
      const int64_t left = streams_.features - inside;
      const int count = left < m - done ? static_cast<int>(left) : m - done;
      copy(order_[stream_.first_sample + sample] * streams_.features + inside, done, count);
      done += count;
    }
  }

 private:
  const Streams& streams_;
  const Stream& stream_;
  const int64_t* order_;
  int64_t index_, end_;
  Group group_;
  int64_t inside_;
};

inline int part_size(const Group& group, int begin) {
  return group.length - begin < kPart ? group.length - begin : kPart;
}

// Returns the m elements from `begin` on of the cursor's group in float32, followed by copies of the first one up to a
// multiple of kBlock.
template <class Number>
inline const float* read(const Cursor& cursor, const typename Number::Type* x, int begin, int m,
                         typename Number::Type* copy, float* wide) {
  typedef typename Number::Type T;
  const int n = blocks_of(m) * kBlock;
  if (!cursor.contiguous()) {
    cursor.pieces(cursor.group().first + begin, m, [=](int64_t place, int at, int count) {
      memcpy(copy + at, x + place, count * sizeof(T));
    });
  } else {
    x += cursor.place() + begin;
    if (m == n) return Number::widen(x, wide, n);
    memcpy(copy, x, m * sizeof(T));
  }
  for (int i = m; i < n; ++i) copy[i] = copy[0];
  return Number::widen(copy, wide, n);
}

// -- quantize --------------------------------------------------------------------------------------------------

// Normalizes the m elements that `read` returned, and appends copies of the first one again.
inline const float* normalized(Normalizer& normalizer, const Cursor& cursor, int begin, int m, const float* values,
                               float* out) {
  if (!normalizer.exists()) return values;
  if (cursor.contiguous()) {
    normalizer.apply(cursor.place() + begin, m, values, out);
  } else {
    cursor.pieces(cursor.group().first + begin, m, [&](int64_t place, int at, int count) {
      normalizer.apply(place, count, values + at, out + at);
    });
  }
  for (int i = m; i % kBlock != 0; ++i) out[i] = out[0];
  return out;
}

inline bool has_nan(const float* x, int n) {
  for (int i = 0; i < n; ++i) {
    if (x[i] != x[i]) return true;
  }
  return false;
}

template <class Number>
void quantize_groups(const Streams& streams, const int64_t* order, const typename Number::Type* x,
                     const Normalization& normalization, uint64_t seed, int64_t begin, int64_t end, uint32_t* packed,
                     uint16_t* ranges, Spread& spread) {
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
        const bool finite = extremes(values, blocks_of(m) * kBlock, least, greatest);
        clean &= finite;
        if (!finite) spread.nan |= has_nan(values, m);
      }
      spread.least = least < spread.least ? least : spread.least;
      spread.greatest = greatest > spread.greatest ? greatest : spread.greatest;
      const GroupLimits limits = limits_of(least, greatest, clean, bits, streams.fp32_min);
      store_limits(limits, streams.fp32_min, cursor.number(), ranges);
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
              uint16_t* ranges, Spread& spread) {
  switch (dtype) {
    case DType::float32:
      return quantize_groups<Float32>(streams, order, static_cast<const float*>(x), normalization, seed, begin, end,
                                      packed, ranges, spread);
    case DType::float64:
      return quantize_groups<Float64>(streams, order, static_cast<const double*>(x), normalization, seed, begin, end,
                                      packed, ranges, spread);
    case DType::float16:
      return quantize_groups<Float16>(streams, order, static_cast<const uint16_t*>(x), normalization, seed, begin,
                                      end, packed, ranges, spread);
    case DType::bfloat16:
      return quantize_groups<BFloat16>(streams, order, static_cast<const uint16_t*>(x), normalization, seed, begin,
                                       end, packed, ranges, spread);
  }
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
    const float range = greatest - least;
    out[cursor.number()] = clean ? static_cast<float>(group.length) * (range * range) : __builtin_nanf("");
  }
}

void squares(const Streams& streams, const void* x, DType dtype, const Normalization& normalization, int64_t begin,
             int64_t end, float* out) {
  switch (dtype) {
    case DType::float32:
      return squares_of_groups<Float32>(streams, static_cast<const float*>(x), normalization, begin, end, out);
    case DType::float64:
      return squares_of_groups<Float64>(streams, static_cast<const double*>(x), normalization, begin, end, out);
    case DType::float16:
      return squares_of_groups<Float16>(streams, static_cast<const uint16_t*>(x), normalization, begin, end, out);
    case DType::bfloat16:
      return squares_of_groups<BFloat16>(streams, static_cast<const uint16_t*>(x), normalization, begin, end, out);
  }
}

// -- dequantize ------------------------------------------------------------------------------------------------

// Returns the words of m elements of a stream from `first` on, shifted to the begin of a block: in place, or in `buffer`,
// which holds one block more than a part.
inline const uint32_t* words_from(const uint32_t* words, int64_t first, int m, int bits, uint32_t* buffer) {
  words += word_index(block_of(first), 0, bits);
  const int shift = lane_of(first);
  if (shift == 0) return words;
  const int there = blocks_of(shift + m) * bits, wanted = blocks_of(m) * bits;
  memcpy(buffer, words, there * sizeof(uint32_t));
  if (there == wanted) memset(buffer + there, 0, bits * sizeof(uint32_t));
  for (int i = 0; i < wanted; ++i) buffer[i] = buffer[i] >> shift | buffer[i + bits] << (kBlock - shift);
  return buffer;
}

template <class Number>
void dequantize_groups(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                       const Affine& affine, int64_t begin, int64_t end, typename Number::Type* out,
                       bool past_caches) {
  typedef typename Number::Type T;
  constexpr bool as_is = sizeof(T) == sizeof(float);
  alignas(64) float values[kPart];
  alignas(64) T narrow[kPart];
  uint32_t buffer[(kPartBlocks + 1) * kMaxBits];
  Mapper mapper(affine);
  while (begin < end) {
    const Stream& stream = stream_of(streams, begin);
    const int64_t last = stream.first_group + stream.groups < end ? stream.first_group + stream.groups : end;
    const auto restore_part = kOfBits[stream.bits - 1].restore;
    Cursor cursor(streams, stream, order, begin - stream.first_group, last - stream.first_group);
    for (; cursor.exists(); cursor.advance()) {
      const Group& group = cursor.group();
      const GroupLimits limits = load_limits(ranges, streams.fp32_min, cursor.number());
      for (int at = 0; at < group.length; at += kPart) {
        const int m = part_size(group, at), n = blocks_of(m) * kBlock;
        const uint32_t* words =
            words_from(packed + stream.first_word, group.first + at, m, stream.bits, buffer);
        if (!cursor.contiguous()) {
          restore_part(words, blocks_of(m), limits, values);
          const T* from = Number::narrow(values, narrow, n);
          cursor.pieces(group.first + at, m, [=](int64_t place, int part, int count) {
            memcpy(out + place, from + part, count * sizeof(T));
          });
          continue;
        }
        T* to = out + cursor.place() + at;
        const bool streamed = past_caches && reinterpret_cast<uintptr_t>(to) % 64 == 0 && m == n;
        if (m == n && !streamed) {
          float* there = as_is ? reinterpret_cast<float*>(to) : values;
          restore_part(words, blocks_of(m), limits, there);
          if (mapper.exists()) mapper.apply(cursor.place() + at, m, there);
          if (!as_is) Number::narrow(values, to, n);
          continue;
        }
        restore_part(words, blocks_of(m), limits, values);
        if (mapper.exists()) mapper.apply(cursor.place() + at, m, values);
        const T* from = Number::narrow(values, narrow, n);
        if (streamed) {
          FEWBIT_NAMESPACE::stream(from, to, n * sizeof(T));
        } else {
          memcpy(to, from, m * sizeof(T));
        }
      }
    }
    begin = last;
  }
  if (past_caches) finish_streaming();
}

void dequantize(const Streams& streams, const int64_t* order, const uint32_t* packed, const uint16_t* ranges,
                const Affine& affine, int64_t begin, int64_t end, void* out, DType dtype, bool past_caches) {
  switch (dtype) {
    case DType::float32:
      return dequantize_groups<Float32>(streams, order, packed, ranges, affine, begin, end, static_cast<float*>(out),
                                        past_caches);
    case DType::float64:
      return dequantize_groups<Float64>(streams, order, packed, ranges, affine, begin, end,
                                        static_cast<double*>(out), past_caches);
    case DType::float16:
      return dequantize_groups<Float16>(streams, order, packed, ranges, affine, begin, end,
                                        static_cast<uint16_t*>(out), past_caches);
    case DType::bfloat16:
      return dequantize_groups<BFloat16>(streams, order, packed, ranges, affine, begin, end,
                                         static_cast<uint16_t*>(out), past_caches);
  }
}

}  // namespace

const QuantizerKernels quantizer_kernels = {quantize, squares, dequantize};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
