// The group quantizer on the CPU: streams, and the work of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/dtype.h"
#include "../common/streams.h"
#include "kernels.h"

namespace fewbit {

// Streams and their samples.
struct StreamPlan {
  Streams streams;
  std::vector<int64_t> order;  // (samples,) by stream; empty: as they are

  const int64_t* order_or_null() const { return order.empty() ? nullptr : order.data(); }
};

// widths: (samples,), each 1 to 8; null: `bits` for all.
StreamPlan plan_streams(int64_t samples, int64_t features, int group_size, bool fp32_min, int bits,
                        const uint8_t* widths);

// The smallest and the largest element; NaN if an element is NaN, 0 if there is none.
struct Extent {
  float least, greatest;
};

// Writes all words and ranges of the streams, and returns the extent of the elements that are quantized.
Extent quantize(const Kernels& kernels, const StreamPlan& plan, const void* x, DType dtype,
                const Normalization& normalization, uint64_t seed, uint32_t* packed, uint16_t* ranges, int threads);

// out: (groups,), length * range^2 of each group of a stream of samples that are in order.
void squares(const Kernels& kernels, const Streams& streams, const void* x, DType dtype,
             const Normalization& normalization, float* out, int threads);

// Elements x, of a dtype for which there is `forward`, to y, codes and a seed of that kernel; y may be x.
struct Forward {
  int function;
  double p0, p1;
  const Table* table;
  const void* x;
  DType dtype;
  void* y;
  uint32_t* codes;
  uint64_t seed;
};

// The number of threads that can do it in one pass, each with whole chunks and whole groups.
int threads_of_forward(const Streams& streams, int threads);

// `forward`, and `quantize` of y, of samples that all have one width, in one pass over memory; extent of y.
Extent forward_quantized(const Kernels& kernels, const Streams& streams, const Forward& forward, uint64_t seed,
                         uint32_t* packed, uint16_t* ranges, int threads);

// affine: null if samples of several widths share groups.
void dequantize(const Kernels& kernels, const StreamPlan& plan, const uint32_t* packed, const uint16_t* ranges,
                const Affine& affine, void* out, DType dtype, int threads);

}  // namespace fewbit
