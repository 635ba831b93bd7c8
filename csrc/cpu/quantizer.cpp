#include "quantizer.h"

#include <algorithm>
#include <numeric>

#include "../common/planes.h"
#include "memory.h"
#include "parallel.h"

namespace fewbit {
namespace {

constexpr int64_t kInCache = 64 * kChunk;  // elements that stay in the caches from `forward` to `quantize`
constexpr int64_t kPastCaches = int64_t{24} << 20;  // bytes of one thread; kernels.cpp has the same

int64_t element_count(const Streams& streams) {
  int64_t n = 0;
  for (int i = 0; i < streams.count; ++i) n += elements(streams, streams.of[i]);
  return n;
}

// Returns the group of element number `element` of a stream.
int64_t first_unfinished(const Streams& streams, const Stream& stream, int64_t element) {
  int64_t group = element / streams.group_size;
  if (by_sample(streams)) {
    const int64_t sample = element / streams.features;
    group = sample * quotient_up(streams.features, streams.group_size) +
            (element - sample * streams.features) / streams.group_size;
  }
  return stream.first_group + group;
}

// Returns the first group of share number `index` of `count`.
int64_t share_begin(int64_t groups, int index, int count) {
  const int64_t least = groups / count, more = groups % count;
  return index * least + (index < more ? index : more);
}

// Calls work(begin, end) for each of `shares` shares of the groups, even if fewer threads run.
template <class Work>
void run_shares(int64_t groups, int shares, const Work& work) {
  auto body = [&](int index, int count) {
    for (int share = index; share < shares; share += count) {
      work(share_begin(groups, share, shares), share_begin(groups, share + 1, shares));
    }
  };
  run_parallel(shares, body);
}

// Clears the block that holds both the end of the previous group and the begin of this group, if there is such a block.
void clear_edge(const Streams& streams, int64_t group, uint32_t* packed) {
  const Stream& stream = stream_of(streams, group);
  const int64_t first = group_at(streams, stream, group - stream.first_group).first;
  if (lane_of(first) == 0) return;
  uint32_t* words = packed + stream.first_word + word_index(block_of(first), 0, stream.bits);
  for (int plane = 0; plane < stream.bits; ++plane) words[plane] = 0;
}

// The unit in which both `forward` and groups can be divided: its number of elements, a multiple of kChunk that begins and
// ends with a group or ends with the tensor, and its number of groups.
struct Unit {
  int64_t elements, groups;
};

Unit unit_of_forward(const Streams& streams) {
  const bool aligned = !by_sample(streams) || streams.features % streams.group_size == 0;
  const int64_t step = aligned ? streams.group_size : streams.features;
  const int64_t elements = std::lcm(step, int64_t{kChunk});
  return {elements, elements / step * (aligned ? 1 : quotient_up(step, streams.group_size))};
}

}  // namespace

StreamPlan plan_streams(int64_t samples, int64_t features, int group_size, int bits, const uint8_t* widths) {
  if (!widths) return {one_stream(samples, features, group_size, bits), {}};
  int64_t counts[kMaxBits + 1] = {};
  for (int64_t i = 0; i < samples; ++i) ++counts[widths[i]];
  StreamPlan plan{mixed_streams(counts, features, group_size), std::vector<int64_t>(static_cast<size_t>(samples))};
  for (int i = 0; i < plan.streams.count; ++i) counts[plan.streams.of[i].bits] = plan.streams.of[i].first_sample;
  for (int64_t i = 0; i < samples; ++i) plan.order[static_cast<size_t>(counts[widths[i]]++)] = i;
  return plan;
}

OwnedChannels::OwnedChannels(const StoredChannels& stored) : count_(stored.count) {
  if (count_ == 0) return;
  numbers_.resize(static_cast<size_t>(3 * count_));
  float *means = numbers_.data(), *scales = means + count_, *inverses = scales + count_;
  for (int64_t i = 0; i < count_; ++i) {
    means[i] = widen_bfloat16(stored.numbers[2 * i]);
    scales[i] = widen_bfloat16(stored.numbers[2 * i + 1]);
    inverses[i] = 1.0f / scales[i];
  }
}

Channels OwnedChannels::get() const {
  if (count_ == 0) return {};
  const float* means = numbers_.data();
  return {means, means + count_, means + 2 * count_, count_};
}

void channel_statistics(const Kernels& kernels, const void* x, DType dtype, const Normalization& normalization, int64_t rows,
                        int64_t channels, uint16_t* out, int threads) {
  const int64_t blocks = quotient_up(channels, kChannelBlock);
  const int wanted = threads_for(estimated_rows(rows) * channels, threads);
  run_shares(blocks, blocks < wanted ? static_cast<int>(blocks) : wanted, [&](int64_t begin, int64_t end) {
    kernels.channel_statistics(x, dtype, normalization, rows, channels, begin, end, out);
  });
}

void quantize(const Kernels& kernels, CopyKind kind, const StreamPlan& plan, const void* x, DType dtype,
              const Normalization& normalization, uint64_t seed, uint32_t* packed, uint16_t* ranges, int threads) {
  const Streams& streams = plan.streams;
  if (streams.groups == 0) return;
  will_write(packed, streams.words * static_cast<int64_t>(sizeof(uint32_t)));
  will_write(ranges, streams.groups * kColumns * static_cast<int64_t>(sizeof(uint16_t)));
  const int shares = threads_for(element_count(streams), threads);
  for (int share = 1; share < shares; ++share) {
    const int64_t group = share_begin(streams.groups, share, shares);
    if (group < streams.groups) clear_edge(streams, group, packed);
  }
  run_shares(streams.groups, shares, [&](int64_t begin, int64_t end) {
    kernels.quantizer(kind).quantize(streams, plan.order_or_null(), x, dtype, normalization, seed, begin, end, packed, ranges);
  });
}

void squares(const Kernels& kernels, CopyKind kind, const Streams& streams, const void* x, DType dtype,
             const Normalization& normalization, float* out, int threads) {
  if (streams.groups == 0) return;
  run_shares(streams.groups, threads_for(element_count(streams), threads), [&](int64_t begin, int64_t end) {
    kernels.quantizer(kind).squares(streams, x, dtype, normalization, begin, end, out);
  });
}

int threads_of_forward(const Streams& streams, int threads) {
  const int64_t n = element_count(streams), units = quotient_up(n, unit_of_forward(streams).elements);
  const int wanted = threads_for(n, threads);
  return n > 0 && units < wanted ? static_cast<int>(units) : wanted;
}

void forward_quantized(const Kernels& kernels, CopyKind kind, const Streams& streams, const Forward& forward,
                       uint64_t seed, uint32_t* packed, uint16_t* ranges, int threads) {
  if (streams.groups == 0) return;
  const Stream& stream = streams.of[0];
  const int64_t n = element_count(streams), word = static_cast<int64_t>(sizeof(uint32_t));
  will_write(forward.y, n * item_size(forward.dtype));
  will_write(forward.codes, packed_words(n, forward.table->bits) * word);
  will_write(packed, streams.words * word);
  will_write(ranges, streams.groups * kColumns * static_cast<int64_t>(sizeof(uint16_t)));
  const Unit unit = unit_of_forward(streams);
  const int shares = threads_of_forward(streams, threads);
  run_shares(quotient_up(n, unit.elements), shares, [&](int64_t begin, int64_t end) {
    const int64_t elements_end = std::min(end * unit.elements, n);
    const int64_t groups_end = std::min(end * unit.groups, streams.groups);
    int64_t done = begin * unit.elements, group = begin * unit.groups;
    while (done < elements_end) {
      const int64_t next = std::min(done + kInCache, elements_end);
      kernels.forward(forward.function, forward.p0, forward.p1, *forward.table, forward.x, forward.dtype, done, next,
                      forward.y, forward.codes, forward.seed);
      done = next;
      const int64_t ready = done == elements_end ? groups_end : first_unfinished(streams, stream, done);
      if (ready == group) continue;
      if (ready < groups_end) clear_edge(streams, ready, packed);
      kernels.quantizer(kind).quantize(streams, nullptr, forward.y, forward.dtype, {}, seed, group, ready, packed,
                                       ranges);
      group = ready;
    }
  });
}

void dequantize(const Kernels& kernels, CopyKind kind, const StreamPlan& plan, const uint32_t* packed,
                const uint16_t* ranges, uint64_t seed, const ValueMap& value_map, void* out, DType dtype, int threads) {
  const Streams& streams = plan.streams;
  if (streams.groups == 0) return;
  const int64_t n = element_count(streams), bytes = n * item_size(dtype);
  will_write(out, bytes);
  const int shares = threads_for(n, threads);
  const bool past_caches = bytes / shares >= kPastCaches;
  run_shares(streams.groups, shares, [&](int64_t begin, int64_t end) {
    kernels.quantizer(kind).dequantize(streams, plan.order_or_null(), packed, ranges, seed, value_map, begin, end, out,
                                       dtype, past_caches);
  });
}

}  // namespace fewbit
