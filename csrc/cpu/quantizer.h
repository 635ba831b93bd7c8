// The group quantizer on the CPU: its streams, and how threads divide the work.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/dtype.h"
#include "../common/streams.h"
#include "kernels.h"

namespace fewbit {

// The streams and the order of their samples.
struct StreamPlan {
  Streams streams;
  std::vector<int64_t> order;  // (samples,) by stream; empty if samples are in order already

  const int64_t* order_or_null() const { return order.empty() ? nullptr : order.data(); }
};

// Returns the streams of samples. widths: (samples,), each 1 to 8; null: `bits` for all.
StreamPlan plan_streams(int64_t samples, int64_t features, int group_size, int bits, const uint8_t* widths);

// The numbers of channels in float32, from those that `channel_statistics` stored.
class OwnedChannels {
 public:
  explicit OwnedChannels(const StoredChannels& stored);

  // Valid as long as this object.
  Channels get() const;

 private:
  int64_t count_;
  std::vector<float> numbers_;  // (3, count)
};

// Estimates the numbers of the channels of a tensor of `rows` rows. normalization: without channels. out: (channels, 2).
void channel_statistics(const Kernels& kernels, const void* x, DType dtype, const Normalization& normalization, int64_t rows,
                        int64_t channels, uint16_t* out, int threads);

// Writes all words and ranges of the streams, but not the rows of the seed.
void quantize(const Kernels& kernels, CopyKind kind, const StreamPlan& plan, const void* x, DType dtype,
              const Normalization& normalization, uint64_t seed, uint32_t* packed, uint16_t* ranges, int threads);

// Computes the number to which the variance of each group is proportional (QuantizerKernels), for a stream whose samples are in
// order. out: (groups,).
void squares(const Kernels& kernels, CopyKind kind, const Streams& streams, const void* x, DType dtype,
             const Normalization& normalization, float* out, int threads);

// The arguments of the kernel `forward`, for an x of a dtype that it takes. y may be x.
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

// Returns the number of threads that can run `forward_quantized`, each with whole chunks and whole groups.
int threads_of_forward(const Streams& streams, int threads);

// Runs `forward`, and `quantize` on its y, in one pass over memory, for samples that all have one width.
void forward_quantized(const Kernels& kernels, CopyKind kind, const Streams& streams, const Forward& forward, uint64_t seed,
                       uint32_t* packed, uint16_t* ranges, int threads);

// Dequantizes. seed: a uniform copy needs none. value_map: not affine if samples of several widths share groups.
void dequantize(const Kernels& kernels, CopyKind kind, const StreamPlan& plan, const uint32_t* packed,
                const uint16_t* ranges, uint64_t seed, const ValueMap& value_map, void* out, DType dtype, int threads);

}  // namespace fewbit
