// The group quantiser on the CPU: streams, threads, and what they share.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/dtype.h"
#include "../common/streams.h"
#include "kernels.h"

namespace fewbit {

// Streams, and which samples they hold.
struct StreamPlan {
  Streams streams;
  std::vector<int64_t> order;  // (samples,) by stream; empty: as they are

  const int64_t* order_or_null() const { return order.empty() ? nullptr : order.data(); }
};

// widths: (samples,), each 1 to 8; null: `bits` for all.
StreamPlan plan_streams(int64_t samples, int64_t features, int group_size, bool wide, int bits,
                        const uint8_t* widths);

// Least and greatest element; NaN if one is, 0 where there is none.
struct Extent {
  float least, greatest;
};

// Writes all of the streams' words and ranges.
Extent quantise(const Kernels& kernels, const StreamPlan& plan, const void* x, DType dtype, uint64_t seed,
                uint32_t* packed, uint16_t* ranges, int threads);

void dequantise(const Kernels& kernels, const StreamPlan& plan, const uint32_t* packed, const uint16_t* ranges,
                void* out, DType dtype, int threads);

}  // namespace fewbit
