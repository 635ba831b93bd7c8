#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "bindings/entry.h"
#include "bindings/module.h"
#include "bindings/torch_ops.h"
#include "cuda/kernels.h"

namespace fewbit::bindings {

namespace {

int item_of(DType dtype) { return static_cast<int>(dtype); }

// A kernel runs in torch's current stream of the device of a tensor.
struct Where {
  int device;
  void* stream;

  Where(const char* entry, const Buffer& tensor) : device(tensor.device) {
    if (device < 0) refuse(entry, "tensors on a CUDA device", "tensors on the CPU");
    // torch would set an error of Python, for which this thread may lack Python's lock.
    const int count = cuda::device_count();
    if (device >= count) refuse(entry, "one of " + std::to_string(count) + " CUDA devices", "device " + std::to_string(device));
    stream = torch_stream(device);
  }
};

// The CUDA kernels. Entries make the same checks as those of `Cpu`, apart from those that need the bits of each sample.
struct Cuda {
  int runtime_version() const { return cuda::runtime_version(); }

  std::vector<int> architectures() const { return cuda::architectures(); }

  std::pair<bool, std::string> available(int device) const { return cuda::available(device); }

  int64_t batch_norm_floats(int64_t channels) const { return cuda::batch_norm_floats(channels); }

  void pack(const Buffer& codes, int bits, const Buffer& packed) const {
    const Codes of = codes_at(Entry("pack", codes.device), codes, packed, bits);
    const Where at("pack", codes);
    cuda::pack(of.codes, of.n, bits, words_at(of.packed), at.device, at.stream);
  }

  void unpack(const Buffer& packed, int bits, const Buffer& codes) const {
    const Codes of = codes_at(Entry("unpack", codes.device), codes, packed, bits);
    const Where at("unpack", codes);
    cuda::unpack(words_at(of.packed), of.n, bits, of.codes, at.device, at.stream);
  }

  void encode(const OwnedTable& table, const Buffer& x, const Buffer& packed, const SeedArgument& seed) const {
    const Elements of = encoded(Entry("encode", x.device), table, x, packed, seed);
    const Where at("encode", x);
    cuda::encode(table.get(), of.from, item_of(of.dtype), of.n, words_at(of.packed), of.seed, at.device, at.stream);
  }

  void decode_mul(const OwnedTable& table, const Buffer& grad, const Buffer& packed, const Buffer& out) const {
    const Elements of = multiplied(Entry("decode_mul", out.device), table, grad, packed, out);
    const bool is_scalar = grad.count != of.n;
    const Where at("decode_mul", out);
    cuda::decode_mul(table.get(), of.from, item_of(of.dtype), of.n, words_at(of.packed), of.to, is_scalar, at.device, at.stream);
  }

  void forward(int function, double p0, double p1, const OwnedTable& table, const Buffer& x, const Buffer& y,
               const Buffer& packed, const SeedArgument& seed) const {
    const Elements of = activated(Entry("forward", x.device), function, table, x, y, packed, seed);
    const Where at("forward", x);
    cuda::forward(function, p0, p1, table.get(), of.from, item_of(of.dtype), of.n, of.to, words_at(of.packed), of.seed, at.device,
                  at.stream);
  }

  // Returns false and does nothing if the kernel does not fit.
  bool relu_quantized(const Buffer& x, const CopyShape& shape, const Buffer& y, const Buffer& mask, const SeedArgument& seed,
                      const Buffer& packed, const Buffer& ranges) const {
    const Entry entry("relu_quantized", x.device);
    check_kind(entry, shape, CopyKind::masked, "2 (masked)");
    const DType dtype = numbers_of(entry, "x", x, shape);
    auto* result = entry.exactly<void>("y", y, x.count, x.item);
    auto* bits_of_mask = entry.packed("mask", mask, x.count, 1);
    const int64_t* const address = seed.is_value ? nullptr : entry.seed("seed", seed);
    const auto [of, copy] = quantized(entry, shape, {}, {}, packed, ranges);
    const Where at("relu_quantized", x);
    return cuda::relu_quantized(of, address_of<const void>(x), item_of(dtype), {address, seed.value}, result,
                                words_at(bits_of_mask), words_at(copy.packed), copy.ranges, at.device, at.stream);
  }

  // Returns false and does nothing if the kernels do not support these arguments. out: none if only the gradients of weight and
  // bias are computed.
  bool batch_norm_backward(const Buffer& packed, const Buffer& ranges, const CopyShape& shape, const Buffer& grad,
                           const Buffer& rstd, const Buffer& weight, const Buffer& memory, const Buffer& out,
                           const Buffer& grad_weight, const Buffer& grad_bias) const {
    const Entry entry("batch_norm_backward", grad.device);
    check_kind(entry, shape, CopyKind::rotated, "1 (rotated)");
    const DType dtype = numbers_of(entry, "grad", grad, shape);
    const int64_t n = rstd.count;
    const auto floats = [&](const char* name, const Buffer& buffer, int64_t count) {
      return entry.exactly<float>(name, buffer, count, 0);
    };
    const cuda::BatchNorm norm = {n,
                                  floats("rstd", rstd, n),
                                  weight.exists ? floats("weight", weight, n) : nullptr,
                                  floats("grad_weight", grad_weight, n),
                                  floats("grad_bias", grad_bias, n),
                                  floats("memory", memory, cuda::batch_norm_floats(n))};
    auto* to = out.exists ? entry.exactly<void>("out", out, grad.count, grad.item) : nullptr;
    const auto [of, copy] = quantized(entry, shape, {}, {}, packed, ranges);
    const Where at("batch_norm_backward", grad);
    return cuda::batch_norm_backward(of, norm, words_at(copy.packed), copy.ranges, address_of<const void>(grad), item_of(dtype),
                                     to, at.device, at.stream);
  }

  void quantize(const Buffer& x, const CopyShape& shape, const Buffer& order, const Buffer& counts, const SeedArgument& seed,
                const Buffer& packed, const Buffer& ranges, const Buffer& mean, const Buffer& rstd, int64_t inner,
                const Buffer& channels) const {
    const Entry entry("quantize", x.device);
    const DType dtype = numbers_of(entry, "x", x, shape);
    const auto normalization = entry.normalization(mean, rstd, inner, shape.elements());
    const StoredChannels numbers = entry.channels(channels, shape);
    const int64_t* const address = seed.is_value ? nullptr : entry.seed("seed", seed);
    const cuda::Seed key = {address, seed.value};
    const auto [of, copy] = quantized(entry, shape, order, counts, packed, ranges);
    const Where at("quantize", x);
    const auto* from = address_of<const void>(x);
    if (shape.kind == CopyKind::uniform) {
      cuda::quantize(of, from, item_of(dtype), normalization, key, words_at(copy.packed), copy.ranges, at.device, at.stream);
    } else {
      cuda::quantize_rotated(of, shape.kind == CopyKind::masked, from, item_of(dtype), normalization, numbers, key,
                             words_at(copy.packed), copy.ranges, at.device, at.stream);
    }
  }

  // Quantizes a tensor whose samples all have the bits of `shape`, and which nothing changes before.
  void quantize_alike(const Buffer& x, const CopyShape& shape, const SeedArgument& seed, const Buffer& packed,
                      const Buffer& ranges, const Buffer& channels) const {
    quantize(x, shape, {}, {}, seed, packed, ranges, {}, {}, 1, channels);
  }

  // Dequantizes such a tensor.
  void dequantize_alike(const Buffer& packed, const Buffer& ranges, const CopyShape& shape, const Buffer& out,
                        const Buffer& channels) const {
    dequantize(packed, ranges, shape, {}, {}, out, {}, {}, 1, {}, channels);
  }

  bool register_ops(const OwnedTable& step) const { return Ops<Cuda>::use("CUDA", *this, step); }

  void unregister_ops() const { Ops<Cuda>::use_none(); }

  void share_bits(const Buffer& squares, int64_t extra, const std::vector<float>& gains, const Buffer& widths) const {
    const SharedBits of = shared_bits(Entry("share_bits", squares.device), squares, extra, gains, widths);
    cuda::Gains by;
    std::copy(gains.begin(), gains.end(), by.of);
    const Where at("share_bits", squares);
    cuda::share_bits(by, of.squares, of.samples, extra, of.widths, at.device, at.stream);
  }

  void draw_seeds(const Buffer& counter, const Buffer& out) const {
    const Seeds of = seeds_at(Entry("draw_seeds", out.device), counter, out);
    const Where at("draw_seeds", out);
    cuda::draw_seeds(of.counter, of.count, of.out, at.device, at.stream);
  }

  void order_samples(const Buffer& widths, const Buffer& order, const Buffer& counts) const {
    const Entry entry("order_samples", widths.device);
    const auto* from = entry.exactly<const uint8_t>("widths", widths, order.count, kUint8);
    auto* to = entry.exactly<int64_t>("order", order, order.count, kInt64);
    auto* found = entry.exactly<int64_t>("counts", counts, kMaxBits + 1, kInt64);
    const Where at("order_samples", widths);
    cuda::order_samples(from, order.count, to, found, at.device, at.stream);
  }

  void squares(const Buffer& x, const CopyShape& shape, const Buffer& out, const Buffer& mean, const Buffer& rstd,
               int64_t inner, const Buffer& channels) const {
    const Entry entry("squares", x.device);
    const DType dtype = numbers_of(entry, "x", x, shape);
    const auto normalization = entry.normalization(mean, rstd, inner, shape.elements());
    const StoredChannels numbers = entry.channels(channels, shape);
    const Streams streams = shape.streams();
    auto* to = entry.exactly<float>("out", out, streams.groups, 0);
    const Where at("squares", x);
    const auto* from = address_of<const void>(x);
    if (shape.kind == CopyKind::uniform) {
      cuda::squares(streams, from, item_of(dtype), normalization, to, at.device, at.stream);
    } else {
      cuda::squares_rotated(streams, shape.kind == CopyKind::masked, from, item_of(dtype), normalization, numbers, to, at.device,
                            at.stream);
    }
  }

  void channel_statistics(const Buffer& x, const Buffer& out, const Buffer& mean, const Buffer& rstd, int64_t inner) const {
    const ChannelEstimate of = channel_estimate(Entry("channel_statistics", x.device), x, out, mean, rstd, inner);
    const Where at("channel_statistics", x);
    cuda::channel_statistics(of.from, item_of(of.dtype), of.normalization, of.rows, of.channels, of.to, at.device, at.stream);
  }

  void dequantize(const Buffer& packed, const Buffer& ranges, const CopyShape& shape, const Buffer& order, const Buffer& counts,
                  const Buffer& out, const Buffer& scale, const Buffer& shift, int64_t inner, const Buffer& mask,
                  const Buffer& channels) const {
    const Entry entry("dequantize", out.device);
    const DType dtype = numbers_of(entry, "out", out, shape);
    const bool scattered = counts.exists && shape.features < kLeastFeatures;
    const auto value_map = entry.value_map(mask, scale, shift, inner, shape, scattered);
    const StoredChannels numbers = entry.channels(channels, shape, scattered);
    const auto [of, copy] = quantized(entry, shape, order, counts, packed, ranges);
    const Where at("dequantize", out);
    if (shape.is_rotated()) {
      cuda::dequantize_rotated(of, words_at(copy.packed), copy.ranges, value_map, numbers, address_of<void>(out), item_of(dtype),
                               at.device, at.stream);
    } else {
      cuda::dequantize(of, words_at(copy.packed), copy.ranges, value_map, address_of<void>(out), item_of(dtype), at.device, at.stream);
    }
  }

  void grid_fixed(const Buffer& gamma, const Buffer& beta, int bits, const Buffer& grid) const {
    check_fixed(Entry("grid_fixed", gamma.device), gamma, beta, bits, grid);
    const Where at("grid_fixed", gamma);
    cuda::grid_fixed(address_of<const float>(gamma), address_of<const float>(beta), gamma.count, bits, address_of<float>(grid),
                     at.device, at.stream);
  }

  void encode_fixed(const Buffer& x, const Buffer& y, const Buffer& grid, int64_t inner, int bits, const Buffer& packed,
                    const Buffer& mean, const Buffer& rstd, int64_t inner_of_entries) const {
    const Entry entry("encode_fixed", x.device);
    const DType dtype = entry.floating("x", x);
    const int64_t n = x.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto normalization = entry.normalization(mean, rstd, inner_of_entries, n);
    const auto* from = entry.exactly<const void>("x", x, n, x.item);
    const auto* result = entry.exactly<const void>("y", y, n, x.item);
    auto* to = entry.packed("packed", packed, n, bits);
    const Where at("encode_fixed", x);
    cuda::encode_fixed(by, normalization, from, result, item_of(dtype), n, bits, words_at(to), at.device, at.stream);
  }

  void decode_fixed(const Buffer& packed, const Buffer& grid, int64_t inner, int bits, bool activated, float slope,
                    const Buffer& out, const Buffer& scale, int64_t inner_of_entries) const {
    const Entry entry("decode_fixed", out.device);
    const DType dtype = entry.floating("out", out);
    const int64_t n = out.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto times = entry.scale(scale, inner_of_entries, n);
    auto* codes = entry.packed("packed", packed, n, bits);
    auto* to = entry.exactly<void>("out", out, n, out.item);
    const Where at("decode_fixed", out);
    cuda::decode_fixed(by, times, words_at(codes), n, bits, activated, slope, to, item_of(dtype), at.device, at.stream);
  }

  void mask_fixed(const Buffer& grad, const Buffer& packed, const Buffer& grid, int64_t inner, int bits, double slope,
                  const Buffer& out) const {
    const Entry entry("mask_fixed", grad.device);
    const DType dtype = entry.floating("grad", grad);
    const int64_t n = grad.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto* from = entry.exactly<const void>("grad", grad, n, grad.item);
    auto* codes = entry.packed("packed", packed, n, bits);
    auto* to = entry.exactly<void>("out", out, n, grad.item);
    const Where at("mask_fixed", grad);
    cuda::mask_fixed(by, words_at(codes), n, bits, slope, from, to, item_of(dtype), at.device, at.stream);
  }

 private:
  static void check_kind(const Entry& entry, const CopyShape& shape, CopyKind kind, const char* expected) {
    if (shape.kind != kind) entry.wrong("kind", expected, std::to_string(static_cast<int>(shape.kind)));
  }

  // Only the device knows the bits of samples that have different bits, so the kernel checks that words and groups suffice.
  static std::pair<cuda::Quantized, Copy> quantized(const Entry& entry, const CopyShape& shape, const Buffer& order,
                                                    const Buffer& counts, const Buffer& packed, const Buffer& ranges) {
    const bool is_mixed = order.exists || counts.exists;
    Streams streams = shape.streams();
    const int64_t *samples = nullptr, *widths = nullptr;
    if (is_mixed) {
      samples = entry.exactly<const int64_t>("order", order, shape.samples, kInt64);
      widths = entry.exactly<const int64_t>("counts", counts, kMaxBits + 1, kInt64);
      streams.words = streams.groups = 0;
    }
    const Copy copy = copy_at(entry, packed, ranges, streams, is_mixed, shape.is_rotated());
    return {{shape.samples, shape.features, shape.group_size, shape.bits, samples, widths, copy.words, copy.groups}, copy};
  }

  static int32_t* words_at(uint32_t* packed) { return reinterpret_cast<int32_t*>(packed); }
};

}  // namespace

void bind_cuda(PyObject* module) {
  static PyMethodDef methods[] = {
      method<&Cuda::available>("available(device=-1)", "Return (usable, reason if not) for the kernels on this machine."),
      method<&Cuda::batch_norm_floats>("batch_norm_floats(channels)",
                                       "Return the number of float32 in the argument `memory` of batch_norm_backward."),
      method<&Cuda::pack>("pack(codes, bits, packed)"),
      method<&Cuda::unpack>("unpack(packed, bits, codes)"),
      method<&Cuda::encode>("encode(table, x, packed, seed)"),
      method<&Cuda::decode_mul>("decode_mul(table, grad, packed, out)"),
      method<&Cuda::forward>("forward(function, p0, p1, table, x, y, packed, seed)"),
      method<&Cuda::quantize>("quantize(x, shape, order, counts, seed, packed, ranges, mean=None, rstd=None, inner=1, "
                              "channels=None)"),
      method<&Cuda::channel_statistics>("channel_statistics(x, out, mean=None, rstd=None, inner=1)"),
      method<&Cuda::share_bits>("share_bits(squares, extra, gains, widths)"),
      method<&Cuda::draw_seeds>("draw_seeds(counter, out)"),
      method<&Cuda::register_ops>("register_ops(step)"),
      method<&Cuda::unregister_ops>("unregister_ops()"),
      method<&Cuda::relu_quantized>("relu_quantized(x, shape, y, mask, seed, packed, ranges)"),
      method<&Cuda::batch_norm_backward>("batch_norm_backward(packed, ranges, shape, grad, rstd, weight, memory, out, "
                                         "grad_weight, grad_bias)"),
      method<&Cuda::order_samples>("order_samples(widths, order, counts)"),
      method<&Cuda::squares>("squares(x, shape, out, mean=None, rstd=None, inner=1, channels=None)"),
      method<&Cuda::dequantize>("dequantize(packed, ranges, shape, order, counts, out, scale=None, shift=None, inner=1, "
                                "mask=None, channels=None)"),
      method<&Cuda::grid_fixed>("grid_fixed(gamma, beta, bits, grid)"),
      method<&Cuda::encode_fixed>("encode_fixed(x, y, grid, inner, bits, packed, mean=None, rstd=None, inner_of_entries=1)"),
      method<&Cuda::decode_fixed>("decode_fixed(packed, grid, inner, bits, activated, slope, out, scale=None, "
                                  "inner_of_entries=1)"),
      method<&Cuda::mask_fixed>("mask_fixed(grad, packed, grid, inner, bits, slope, out)"),
      {}};
  static PyGetSetDef properties[] = {
      property<&Cuda::runtime_version>("runtime_version", "The version of the CUDA runtime, such as 13000 for 13.0."),
      property<&Cuda::architectures>("architectures", "The compute capabilities of the kernels, times 10."),
      {}};
  make_class<Cuda>("fewbit._kernels.Cuda",
                   "The kernels for CUDA devices. Buffers are as for Cpu. A kernel runs in torch's current stream of the "
                   "buffers' device.",
                   methods, properties);
  add(module, "cuda", made(std::make_unique<Cuda>()));
}

}  // namespace fewbit::bindings
