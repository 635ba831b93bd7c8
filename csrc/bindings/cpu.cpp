#include <algorithm>

#include "bindings/entry.h"
#include "bindings/module.h"
#include "bindings/torch_ops.h"
#include "common/seeds.h"
#include "cpu/allocation.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/quantizer.h"

namespace fewbit::bindings {

namespace {

// The CPU kernels of one instruction set, run by several threads.
class Cpu {
 public:
  explicit Cpu(const std::string& isa) : kernels_(kernels_of(isa)) {
    if (kernels_) return;
    std::string names;
    for (const std::string& name : cpu_isas()) names += (names.empty() ? "" : ", ") + name;
    refuse("isa", "one of " + names, isa);
  }

  std::string isa() const { return kernels_->isa; }

  void pack(const Buffer& codes, int bits, const Buffer& packed) const {
    const Codes of = codes_at(Entry("pack", kDevice), codes, packed, bits);
    will_write(of.packed, packed_bytes(of.n, bits));
    run(of.n, [=](int64_t begin, int64_t end) { kernels_->pack(of.codes, begin, end, bits, of.packed); });
  }

  void unpack(const Buffer& packed, int bits, const Buffer& codes) const {
    const Codes of = codes_at(Entry("unpack", kDevice), codes, packed, bits);
    will_write(of.codes, of.n);
    run(of.n, [=](int64_t begin, int64_t end) { kernels_->unpack(of.packed, begin, end, bits, of.codes); });
  }

  void encode(const OwnedTable& table, const Buffer& x, const Buffer& packed, const SeedArgument& seed) const {
    const Elements of = encoded(Entry("encode", kDevice), table, x, packed, seed);
    const uint64_t key = seed_at(of.seed);
    will_write(of.packed, packed_bytes(of.n, table.get().bits));
    run(of.n, [=, &table](int64_t begin, int64_t end) {
      kernels_->encode(table.get(), of.from, of.dtype, begin, end, of.packed, key);
    });
  }

  void decode_mul(const OwnedTable& table, const Buffer& grad, const Buffer& packed, const Buffer& out) const {
    const Elements of = multiplied(Entry("decode_mul", kDevice), table, grad, packed, out);
    const bool is_scalar = grad.count != of.n;
    will_write(of.to, of.bytes());
    run(of.n, [=, &table](int64_t begin, int64_t end) {
      kernels_->decode_mul(table.get(), of.from, of.dtype, begin, end, of.packed, of.to, is_scalar);
    });
  }

  void forward(int function, double p0, double p1, const OwnedTable& table, const Buffer& x, const Buffer& y,
               const Buffer& packed, const SeedArgument& seed) const {
    const Elements of = activated(Entry("forward", kDevice), function, table, x, y, packed, seed);
    const uint64_t key = seed_at(of.seed);
    will_write(of.to, of.bytes());
    will_write(of.packed, packed_bytes(of.n, table.get().bits));
    run(of.n, [=, &table](int64_t begin, int64_t end) {
      kernels_->forward(function, p0, p1, table.get(), of.from, of.dtype, begin, end, of.to, of.packed, key);
    });
  }

  void quantize(const Buffer& x, const CopyShape& shape, const Buffer& widths, const SeedArgument& seed, const Buffer& packed,
                const Buffer& ranges, const Buffer& mean, const Buffer& rstd, int64_t inner, const Buffer& channels) const {
    const Entry entry("quantize", kDevice);
    const DType dtype = numbers_of(entry, "x", x, shape);
    auto normalization = entry.normalization(mean, rstd, inner, shape.elements());
    const OwnedChannels numbers(entry.channels(channels, shape));
    normalization.channels = numbers.get();
    const uint64_t key = seed_at(entry.seed("seed", seed));
    const StreamPlan plan = plan_of(entry, shape, widths);
    const Copy copy = copy_at(entry, packed, ranges, plan.streams, widths.exists, shape.is_rotated());
    const int threads = torch_threads();
    fewbit::quantize(*kernels_, shape.kind, plan, address_of<const void>(x), dtype, normalization, key, copy.packed, copy.ranges,
                     threads);
    // When memory was allocated, only a bound on the number of words was known, so some may be left over.
    std::fill(copy.packed + plan.streams.words, copy.packed + copy.words, 0u);
    std::fill(copy.ranges + plan.streams.groups * kColumns, copy.seed_rows(), uint16_t{0});
    if (shape.is_rotated()) store_seed(key, copy.seed_rows());
  }

  // Quantizes a tensor whose samples all have the bits of `shape`, and which nothing changes before.
  void quantize_alike(const Buffer& x, const CopyShape& shape, const SeedArgument& seed, const Buffer& packed,
                      const Buffer& ranges, const Buffer& channels) const {
    quantize(x, shape, {}, seed, packed, ranges, {}, {}, 1, channels);
  }

  // Dequantizes such a tensor.
  void dequantize_alike(const Buffer& packed, const Buffer& ranges, const CopyShape& shape, const Buffer& out,
                        const Buffer& channels) const {
    dequantize(packed, ranges, shape, {}, out, {}, {}, 1, {}, channels);
  }

  bool register_ops(const OwnedTable& step) const { return Ops<Cpu>::use("CPU", *this, step); }

  void unregister_ops() const { Ops<Cpu>::use_none(); }

  void share_bits(const Buffer& squares, int64_t extra, const std::vector<float>& gains, const Buffer& widths) const {
    const SharedBits of = shared_bits(Entry("share_bits", kDevice), squares, extra, gains, widths);
    fewbit::share_bits(gains.data(), of.squares, of.samples, extra, of.widths);
  }

  void draw_seeds(const Buffer& counter, const Buffer& out) const {
    const Seeds of = seeds_at(Entry("draw_seeds", kDevice), counter, out);
    const auto start = static_cast<uint64_t>(*of.counter);
    for (int64_t i = 0; i < of.count; ++i) of.out[i] = static_cast<int64_t>(drawn_seed(start, i));
    *of.counter = static_cast<int64_t>(advanced(start, of.count));
  }

  void squares(const Buffer& x, const CopyShape& shape, const Buffer& out, const Buffer& mean, const Buffer& rstd,
               int64_t inner, const Buffer& channels) const {
    const Entry entry("squares", kDevice);
    const DType dtype = numbers_of(entry, "x", x, shape);
    auto normalization = entry.normalization(mean, rstd, inner, shape.elements());
    const OwnedChannels numbers(entry.channels(channels, shape));
    normalization.channels = numbers.get();
    const Streams streams = shape.streams();
    auto* to = entry.exactly<float>("out", out, streams.groups, 0);
    const int threads = torch_threads();
    fewbit::squares(*kernels_, shape.kind, streams, address_of<const void>(x), dtype, normalization, to, threads);
  }

  void channel_statistics(const Buffer& x, const Buffer& out, const Buffer& mean, const Buffer& rstd, int64_t inner) const {
    const Entry entry("channel_statistics", kDevice);
    const ChannelEstimate of = channel_estimate(entry, x, out, mean, rstd, inner);
    const int threads = torch_threads();
    fewbit::channel_statistics(*kernels_, of.from, of.dtype, of.normalization, of.rows, of.channels, of.to, threads);
  }

  // Returns false and does nothing if the threads' shares would cut a group.
  bool forward_quantized(int function, double p0, double p1, const OwnedTable& table, const Buffer& x, const CopyShape& shape,
                         const Buffer& y, const Buffer& codes, const SeedArgument& seed, const SeedArgument& quantizer_seed,
                         const Buffer& packed, const Buffer& ranges) const {
    const Entry entry("forward_quantized", kDevice);
    const Elements of = activated(entry, function, table, x, y, codes, seed, "codes");
    numbers_of(entry, "x", x, shape);
    const uint64_t key = seed_at(entry.seed("quantizer_seed", quantizer_seed));
    const Streams streams = shape.streams();
    const Copy copy = copy_at(entry, packed, ranges, streams, false, shape.is_rotated());
    const Forward forward{function, p0, p1, &table.get(), of.from, of.dtype, of.to, of.packed, seed_at(of.seed)};
    const int threads = torch_threads();
    if (threads_of_forward(streams, threads) < threads_for(of.n, threads)) return false;
    fewbit::forward_quantized(*kernels_, shape.kind, streams, forward, key, copy.packed, copy.ranges, threads);
    if (shape.is_rotated()) store_seed(key, copy.seed_rows());
    return true;
  }

  void dequantize(const Buffer& packed, const Buffer& ranges, const CopyShape& shape, const Buffer& widths, const Buffer& out,
                  const Buffer& scale, const Buffer& shift, int64_t inner, const Buffer& mask, const Buffer& channels) const {
    const Entry entry("dequantize", kDevice);
    const DType dtype = numbers_of(entry, "out", out, shape);
    const bool scattered = widths.exists && shape.features < kLeastFeatures;
    auto value_map = entry.value_map(mask, scale, shift, inner, shape, scattered);
    const OwnedChannels numbers(entry.channels(channels, shape, scattered));
    value_map.channels = numbers.get();
    const StreamPlan plan = plan_of(entry, shape, widths);
    const Copy copy = copy_at(entry, packed, ranges, plan.streams, widths.exists, shape.is_rotated());
    const int threads = torch_threads();
    const uint64_t seed = shape.is_rotated() ? load_seed(copy.seed_rows()) : 0;
    fewbit::dequantize(*kernels_, shape.kind, plan, copy.packed, copy.ranges, seed, value_map, address_of<void>(out), dtype,
                       threads);
  }

  void grid_fixed(const Buffer& gamma, const Buffer& beta, int bits, const Buffer& grid) const {
    check_fixed(Entry("grid_fixed", kDevice), gamma, beta, bits, grid);
    const auto *scales = address_of<const float>(gamma), *shifts = address_of<const float>(beta);
    auto* to = address_of<float>(grid);
    for (int64_t i = 0; i < gamma.count; ++i) make_column(scales[i], shifts[i], bits, to, i, gamma.count);
  }

  void encode_fixed(const Buffer& x, const Buffer& y, const Buffer& grid, int64_t inner, int bits, const Buffer& packed,
                    const Buffer& mean, const Buffer& rstd, int64_t inner_of_entries) const {
    const Entry entry("encode_fixed", kDevice);
    const DType dtype = entry.floating("x", x);
    const int64_t n = x.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto normalization = entry.normalization(mean, rstd, inner_of_entries, n);
    const auto* from = entry.exactly<const void>("x", x, n, x.item);
    const auto* result = entry.exactly<const void>("y", y, n, x.item);
    auto* to = entry.packed("packed", packed, n, bits);
    will_write(to, packed_bytes(n, bits));
    run(n, [=](int64_t begin, int64_t end) {
      kernels_->fixed_point->encode(by, normalization, from, result, dtype, bits, begin, end, to);
    });
  }

  void decode_fixed(const Buffer& packed, const Buffer& grid, int64_t inner, int bits, bool activated, float slope,
                    const Buffer& out, const Buffer& scale, int64_t inner_of_entries) const {
    const Entry entry("decode_fixed", kDevice);
    const DType dtype = entry.floating("out", out);
    const int64_t n = out.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto times = entry.scale(scale, inner_of_entries, n);
    const auto* codes = entry.packed("packed", packed, n, bits);
    auto* to = entry.exactly<void>("out", out, n, out.item);
    will_write(to, n * item_size(dtype));
    run(n, [=](int64_t begin, int64_t end) {
      kernels_->fixed_point->decode(by, times, codes, bits, begin, end, activated, slope, to, dtype);
    });
  }

  void mask_fixed(const Buffer& grad, const Buffer& packed, const Buffer& grid, int64_t inner, int bits, double slope,
                  const Buffer& out) const {
    const Entry entry("mask_fixed", kDevice);
    const DType dtype = entry.floating("grad", grad);
    const int64_t n = grad.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto* from = entry.exactly<const void>("grad", grad, n, grad.item);
    const auto* codes = entry.packed("packed", packed, n, bits);
    auto* to = entry.exactly<void>("out", out, n, grad.item);
    will_write(to, n * item_size(dtype));
    run(n, [=](int64_t begin, int64_t end) { kernels_->fixed_point->mask(by, codes, bits, begin, end, slope, from, to, dtype); });
  }

 private:
  static constexpr int kDevice = -1;

  // Returns the streams of a tensor whose samples all have the bits of `shape`, or each its own number of bits.
  static StreamPlan plan_of(const Entry& entry, const CopyShape& shape, const Buffer& widths) {
    const uint8_t* of_samples = nullptr;
    if (widths.exists) {
      of_samples = entry.exactly<const uint8_t>("widths", widths, shape.samples, kUint8);
      for (int64_t i = 0; i < shape.samples; ++i) check_bits(of_samples[i]);
    }
    return plan_streams(shape.samples, shape.features, shape.group_size, shape.bits, of_samples);
  }

  static int64_t packed_bytes(int64_t n, int bits) { return packed_words(n, bits) * static_cast<int64_t>(sizeof(uint32_t)); }

  static uint64_t seed_at(const int64_t* address) { return address ? static_cast<uint64_t>(*address) : 0; }

  template <class Work>
  static void run(int64_t n, const Work& work) {
    if (n == 0) return;
    const int threads = torch_threads();
    auto share = [&](int index, int count) {
      const Range range = share_of(n, index, count);
      work(range.begin, range.end);
    };
    run_parallel(threads_for(n, threads), share);
  }

  const Kernels* kernels_;
};

Object make_cpu(const std::string& isa) { return made(std::make_unique<Cpu>(isa)); }

}  // namespace

void bind_cpu(PyObject* module) {
  static PyMethodDef methods[] = {
      method<&Cpu::pack>("pack(codes, bits, packed)", "Pack n uint8 codes to bits * ceil(n / 32) int32 words."),
      method<&Cpu::unpack>("unpack(packed, bits, codes)", "Unpack words to n uint8 codes."),
      method<&Cpu::encode>("encode(table, x, packed, seed)", "Encode x to packed codes."),
      method<&Cpu::decode_mul>("decode_mul(table, grad, packed, out)",
                               "Compute out = level of the code * grad, rounded once. out may be grad. A grad of one element "
                               "is used for all."),
      method<&Cpu::forward>("forward(function, p0, p1, table, x, y, packed, seed)",
                            "Compute y = f(x) and the packed codes of x. y may be x."),
      method<&Cpu::forward_quantized>("forward_quantized(function, p0, p1, table, x, shape, y, codes, seed, quantizer_seed, "
                                      "packed, ranges)",
                                      "Run forward, with its codes in `codes`, and quantize on y, in one pass. Return False "
                                      "and do nothing if threads would have to share groups."),
      method<&Cpu::quantize>("quantize(x, shape, widths, seed, packed, ranges, mean=None, rstd=None, inner=1, channels=None)",
                             "Quantize x to packed codes and ranges. widths: a uint8 for each sample, or None if all samples "
                             "have the bits of `shape`. mean, rstd: float32, or None; element e is (x - mean[i]) rstd[i], i = "
                             "e / inner % their length. channels: (count, 2) bfloat16, the results of channel_statistics, "
                             "which are taken out; or None."),
      method<&Cpu::register_ops>("register_ops(step)",
                               "Let torch's dispatcher run the ops of compiled models with these kernels, if load_shim has found "
                               "its interface; return whether it does. step: the table whose code of x is x > 0; it must never "
                               "be deleted."),
      method<&Cpu::unregister_ops>("unregister_ops()", "Let the ops run their implementations in Python."),
      method<&Cpu::share_bits>("share_bits(squares, extra, gains, widths)",
                               "Divide `extra` bits, and one bit for each sample, among the samples."),
      method<&Cpu::draw_seeds>("draw_seeds(counter, out)", "Draw int64 seeds from a counter, one int64, and advance it."),
      method<&Cpu::squares>("squares(x, shape, out, mean=None, rstd=None, inner=1, channels=None)",
                            "Compute length * range^2 of each group in float32, or its energy in a rotated copy. mean, rstd, "
                            "channels as in quantize."),
      method<&Cpu::channel_statistics>("channel_statistics(x, out, mean=None, rstd=None, inner=1)",
                                       "Estimate the mean and the scale of each channel of x, whose channels are side by side."
                                       " out: (channels, 2) bfloat16. mean, rstd as in quantize."),
      method<&Cpu::dequantize>("dequantize(packed, ranges, shape, widths, out, scale=None, shift=None, inner=1, mask=None, "
                               "channels=None)",
                               "Dequantize packed codes and ranges to values, rounded once. scale, shift: as mean and rstd of "
                               "quantize; element e is value * scale[i] + shift[i]. mask: None, or a bit for each element, "
                               "packed, by which its value is multiplied; not for uniform copies, nor with scale or shift. "
                               "channels: those that quantize took out, or None."),
      method<&Cpu::grid_fixed>("grid_fixed(gamma, beta, bits, grid)",
                               "Compute the grid, GRID_ROWS rows of n, of n float32 weights and biases of a norm."),
      method<&Cpu::encode_fixed>("encode_fixed(x, y, grid, inner, bits, packed, mean=None, rstd=None, inner_of_entries=1)",
                                 "Encode x to packed fixed-point codes with the sign of y. grid: GRID_ROWS rows of float32; "
                                 "element e has column e / inner % columns. mean, rstd: as in quantize."),
      method<&Cpu::decode_fixed>("decode_fixed(packed, grid, inner, bits, activated, slope, out, scale=None, "
                                 "inner_of_entries=1)",
                                 "Decode fixed-point codes. If activated, out is y for y > 0, else y * slope, where y is the "
                                 "norm's result. Otherwise out is the normalized input * scale[i]."),
      method<&Cpu::mask_fixed>("mask_fixed(grad, packed, grid, inner, bits, slope, out)",
                               "Compute out = grad where y > 0, else grad * slope, where y is the norm's result. out may be "
                               "grad."),
      {}};
  static PyGetSetDef properties[] = {property<&Cpu::isa>("isa"), {}};
  static PyMethodDef functions[] = {
      method<&make_cpu>("Cpu(isa)", "Return the kernels of one instruction set, one of cpu_isas()."),
      method<&cpu_isas>("cpu_isas()", "Return the names of the instruction sets that can be used here, best first."),
      {}};
  make_class<Cpu>("fewbit._kernels.Cpu", "The kernels of one instruction set. They use as many threads as torch.", methods,
                  properties);
  add_functions(module, functions);
}

}  // namespace fewbit::bindings
