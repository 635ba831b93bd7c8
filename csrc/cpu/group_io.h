// Reading of a group's elements and writing of its values, for quantize.cpp and rotated.cpp: their dtypes, their places in the
// tensor, normalization and the map of values.
//
// The file that includes this one includes the code of its instruction set first (simd_*.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/planes.h"
#include "../common/quantize.h"
#include "../common/streams.h"
#include "entries.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
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

// -- Words and values of a part --------------------------------------------------------------------------------

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

// Writes the values of parts to a tensor: maps them, rounds them to the tensor's dtype and moves them to their places.
template <class Number>
class ValueWriter {
  typedef typename Number::Type T;

 public:
  // past_caches: `out` is too large to stay in the caches until it is read.
  ValueWriter(T* out, const ValueMap& value_map, bool past_caches)
      : out_(out), mapper_(value_map), past_caches_(past_caches) {}

  // Writes the m values from `at` on of the cursor's group. restore(float*) computes them, followed by any numbers up to a
  // multiple of kBlock.
  template <class Restore>
  void put(const Cursor& cursor, int at, int m, const Restore& restore) {
    constexpr bool as_is = sizeof(T) == sizeof(float);
    const int n = blocks_of(m) * kBlock;
    if (!cursor.contiguous()) {
      restore(values_);
      if (mapper_.exists()) {
        cursor.pieces(cursor.group().first + at, m,
                      [&](int64_t place, int part, int count) { mapper_.apply(place, count, values_ + part); });
      }
      const T* from = Number::narrow(values_, narrow_, n);
      T* out = out_;
      cursor.pieces(cursor.group().first + at, m, [=](int64_t place, int part, int count) {
        memcpy(out + place, from + part, count * sizeof(T));
      });
      return;
    }
    T* to = out_ + cursor.place() + at;
    const bool streamed = past_caches_ && reinterpret_cast<uintptr_t>(to) % 64 == 0 && m == n;
    if (m == n && !streamed) {
      float* there = as_is ? reinterpret_cast<float*>(to) : values_;
      restore(there);
      if (mapper_.exists()) mapper_.apply(cursor.place() + at, m, there);
      if (!as_is) Number::narrow(values_, to, n);
      return;
    }
    restore(values_);
    if (mapper_.exists()) mapper_.apply(cursor.place() + at, m, values_);
    const T* from = Number::narrow(values_, narrow_, n);
    if (streamed) {
      FEWBIT_NAMESPACE::stream(from, to, n * sizeof(T));
    } else {
      memcpy(to, from, m * sizeof(T));
    }
  }

  // Has to be called after the last part.
  void finish() {
    if (past_caches_) finish_streaming();
  }

 private:
  alignas(64) float values_[kPart];
  alignas(64) T narrow_[kPart];
  T* out_;
  Mapper mapper_;
  bool past_caches_;
};

// -- dtypes ----------------------------------------------------------------------------------------------------

// Calls run(Number{}) with the class of a dtype.
template <class Run>
inline void with_number(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::float32:
      return run(Float32{});
    case DType::float64:
      return;  // the caller has refused it
    case DType::float16:
      return run(Float16{});
    case DType::bfloat16:
      return run(BFloat16{});
  }
}

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
