#include "quantiser.h"

#include <limits>

#include "../common/planes.h"
#include "memory.h"
#include "parallel.h"

namespace fewbit {
namespace {

constexpr int64_t kPastCaches = int64_t{24} << 20;  // bytes of one thread; kernels.cpp has the same

int64_t element_count(const Streams& streams) {
  int64_t n = 0;
  for (int i = 0; i < streams.count; ++i) n += elements(streams, streams.of[i]);
  return n;
}

// The first group of share number `index` of `count`.
int64_t share_begin(int64_t groups, int index, int count) {
  const int64_t each = groups / count, more = groups % count;
  return index * each + (index < more ? index : more);
}

// work(share, begin, end) for each of `shares` shares of the groups, however many threads there turn out to be.
template <class Work>
void run_shares(int64_t groups, int shares, const Work& work) {
  auto body = [&](int index, int count) {
    for (int share = index; share < shares; share += count) {
      work(share, share_begin(groups, share, shares), share_begin(groups, share + 1, shares));
    }
  };
  run_parallel(shares, body);
}

// Zeros in the block that holds both the end of a group and the begin of this one, if one does.
void clear_edge(const Streams& streams, int64_t group, uint32_t* packed) {
  const Stream& stream = stream_of(streams, group);
  const int64_t first = group_at(streams, stream, group - stream.first_group).first;
  if (lane_of(first) == 0) return;
  uint32_t* words = packed + stream.first_word + word_index(block_of(first), 0, stream.bits);
  for (int plane = 0; plane < stream.bits; ++plane) words[plane] = 0;
}

}  // namespace

StreamPlan plan_streams(int64_t samples, int64_t features, int group_size, bool wide, int bits,
                        const uint8_t* widths) {
  if (!widths) return {one_stream(samples, features, group_size, wide, bits), {}};
  int64_t counts[kMaxBits + 1] = {};
  for (int64_t i = 0; i < samples; ++i) ++counts[widths[i]];
  StreamPlan plan{mixed_streams(counts, features, group_size, wide),
                  std::vector<int64_t>(static_cast<size_t>(samples))};
  for (int i = 0; i < plan.streams.count; ++i) counts[plan.streams.of[i].bits] = plan.streams.of[i].first_sample;
  for (int64_t i = 0; i < samples; ++i) plan.order[static_cast<size_t>(counts[widths[i]]++)] = i;
  return plan;
}

Extent quantise(const Kernels& kernels, const StreamPlan& plan, const void* x, DType dtype, uint64_t seed,
                uint32_t* packed, uint16_t* ranges, int threads) {
  const Streams& streams = plan.streams;
  if (streams.groups == 0) return {0.0f, 0.0f};
  will_write(packed, streams.words * static_cast<int64_t>(sizeof(uint32_t)));
  will_write(ranges, streams.groups * columns(streams.wide) * static_cast<int64_t>(sizeof(uint16_t)));
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const int shares = threads_for(element_count(streams), threads);
  for (int share = 1; share < shares; ++share) {
    const int64_t group = share_begin(streams.groups, share, shares);
    if (group < streams.groups) clear_edge(streams, group, packed);
  }
  std::vector<Spread> spreads(static_cast<size_t>(shares), Spread{infinity, -infinity, false});
  run_shares(streams.groups, shares, [&](int share, int64_t begin, int64_t end) {
    Spread spread = spreads[static_cast<size_t>(share)];  // a copy: neighbours share a cache line
    kernels.quantiser->quantise(streams, plan.order_or_null(), x, dtype, seed, begin, end, packed, ranges, spread);
    spreads[static_cast<size_t>(share)] = spread;
  });
  Extent extent{infinity, -infinity};
  bool any_nan = false;
  for (const Spread& spread : spreads) {
    extent.least = spread.least < extent.least ? spread.least : extent.least;
    extent.greatest = spread.greatest > extent.greatest ? spread.greatest : extent.greatest;
    any_nan |= spread.nan;
  }
  return any_nan ? Extent{nan, nan} : extent;
}

void dequantise(const Kernels& kernels, const StreamPlan& plan, const uint32_t* packed, const uint16_t* ranges,
                void* out, DType dtype, int threads) {
  const Streams& streams = plan.streams;
  if (streams.groups == 0) return;
  const int64_t n = element_count(streams), bytes = n * item_size(dtype);
  will_write(out, bytes);
  const int shares = threads_for(n, threads);
  const bool past_caches = bytes / shares >= kPastCaches;
  run_shares(streams.groups, shares, [&](int, int64_t begin, int64_t end) {
    kernels.quantiser->dequantise(streams, plan.order_or_null(), packed, ranges, begin, end, out, dtype,
                                  past_caches);
  });
}

}  // namespace fewbit
