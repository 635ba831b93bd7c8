// The streams and groups of a quantized tensor, which docs/concepts/quantizer.md defines. All sizes are 64-bit.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "planes.h"

namespace fewbit {

constexpr int kLeastFeatures = 64;     // of a sample with groups of its own
constexpr int kMostGroupSize = 65536;  // groups are multiples of kBlock
constexpr int kColumns = 2;            // of the ranges: two numbers for each group

// The samples of one width. Their elements, words and groups follow those of the previous streams.
struct Stream {
  int bits;
  int64_t samples;
  int64_t first_sample;  // in the order of streams
  int64_t first_group;
  int64_t groups;
  int64_t first_word;
};

struct Streams {
  int64_t features;  // of a sample
  int group_size;
  int count;       // streams; some may be empty
  int64_t groups;  // of all streams
  int64_t words;   // of all streams
  Stream of[kMaxBits];
};

// A part of a stream whose elements share a minimum and a range.
struct Group {
  int64_t first;   // the group's first element in the stream
  int64_t sample;  // the sample in the stream; 0 if groups run across samples
  int length;
};

inline namespace FEWBIT_NAMESPACE {

FEWBIT_HD constexpr int64_t quotient_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

FEWBIT_HD constexpr bool by_sample(const Streams& streams) { return streams.features >= kLeastFeatures; }

FEWBIT_HD constexpr int64_t elements(const Streams& streams, const Stream& stream) {
  return stream.samples * streams.features;
}

// Makes `streams` empty. It is written in place, since CUDA has it in shared memory.
FEWBIT_HD inline void clear(Streams& streams, int64_t features, int group_size) {
  streams.features = features;
  streams.group_size = group_size;
  streams.count = 0;
  streams.groups = 0;
  streams.words = 0;
}

// Appends a stream.
FEWBIT_HD inline void append(Streams& streams, int bits, int64_t samples, int64_t first_sample) {
  Stream& stream = streams.of[streams.count++];
  const int64_t n = samples * streams.features;
  stream.bits = bits;
  stream.samples = samples;
  stream.first_sample = first_sample;
  stream.first_group = streams.groups;
  stream.groups = by_sample(streams) ? samples * quotient_up(streams.features, streams.group_size)
                                     : quotient_up(n, streams.group_size);
  stream.first_word = streams.words;
  streams.groups += stream.groups;
  streams.words += packed_words(n, bits);
}

// Appends streams of counts[bits] samples of each width in ascending order; counts[0] samples without a width come first.
FEWBIT_HD inline void append_mixed(Streams& streams, const int64_t* counts) {
  int64_t first = counts[0];
  for (int bits = 1; bits <= kMaxBits; ++bits) {
    append(streams, bits, counts[bits], first);
    first += counts[bits];
  }
}

// Returns the streams of samples that all have one width.
inline Streams one_stream(int64_t samples, int64_t features, int group_size, int bits) {
  Streams streams;
  clear(streams, features, group_size);
  append(streams, bits, samples, 0);
  return streams;
}

// Returns the streams of samples of several widths.
inline Streams mixed_streams(const int64_t* counts, int64_t features, int group_size) {
  Streams streams;
  clear(streams, features, group_size);
  append_mixed(streams, counts);
  return streams;
}

// Returns the stream of group number `group`.
FEWBIT_HD inline const Stream& stream_of(const Streams& streams, int64_t group) {
  int i = 0;
  while (group >= streams.of[i].first_group + streams.of[i].groups) ++i;
  return streams.of[i];
}

// Returns group number `index` of a stream.
FEWBIT_HD inline Group group_at(const Streams& streams, const Stream& stream, int64_t index) {
  const int64_t features = streams.features;
  int64_t first = index * streams.group_size, end = elements(streams, stream), sample = 0;
  if (by_sample(streams)) {
    const int64_t per_sample = quotient_up(features, streams.group_size);
    sample = index / per_sample;
    first = sample * features + (index - sample * per_sample) * streams.group_size;
    end = (sample + 1) * features;
  }
  const int64_t left = end - first;
  return {first, sample, left < streams.group_size ? static_cast<int>(left) : streams.group_size};
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
