// The Python module fewbit._kernels. Tensors come as addresses: there is no libtorch here.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/fixed_point.h"
#include "common/planes.h"
#include "common/table.h"
#include "cpu/allocation.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/quantiser.h"

#ifdef FEWBIT_WITH_CUDA
#include "cuda/kernels.h"
#endif

namespace py = pybind11;

namespace {

using fewbit::DType;
using fewbit::Kernels;
using fewbit::OwnedTable;

// -- Checks: std::invalid_argument becomes ValueError -------------------------------------------------------

[[noreturn]] void refuse(const char* what, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(std::string(what) + ": expected " + expected + ", got " + got);
}

void check_size(int64_t n) {
  // The packed words of anything above could not be counted.
  if (n < 0 || n > INT64_MAX / 16) refuse("n", "a number of elements, 0 or more", std::to_string(n));
}

void check_bits(int bits) {
  if (bits < 1 || bits > fewbit::kMaxBits) refuse("bits", "1 to 8", std::to_string(bits));
}

DType dtype_of(int number) {
  if (number < 0 || number > 3) {
    refuse("dtype", "0 (float32), 1 (float64), 2 (float16) or 3 (bfloat16)", std::to_string(number));
  }
  return static_cast<DType>(number);
}

DType fused_dtype_of(int number) {
  const DType dtype = dtype_of(number);
  if (dtype == DType::float64) refuse("dtype", "0 (float32), 2 (float16) or 3 (bfloat16)", "1 (float64)");
  return dtype;
}

// What a quantised tensor is.
struct QuantisedShape {
  int64_t samples, features;
  int group_size;
  bool wide;

  int64_t elements() const { return samples * features; }
};

QuantisedShape quantised_shape(int64_t samples, int64_t features, int group_size, bool wide) {
  if (samples < 0) refuse("samples", "0 or more", std::to_string(samples));
  if (features < 0) refuse("features", "0 or more", std::to_string(features));
  if (features > 0 && samples > INT64_MAX / 16 / features) {
    refuse("samples", "a number of elements that can be counted",
           std::to_string(samples) + " samples of " + std::to_string(features));
  }
  if (group_size < fewbit::kBlock || group_size > fewbit::kMostGroupSize || group_size % fewbit::kBlock != 0) {
    refuse("group_size", "a multiple of 32 from 32 to 65536", std::to_string(group_size));
  }
  return {samples, features, group_size, wide};
}

void check_room(const fewbit::Streams& streams, int64_t words, int64_t groups) {
  if (words < streams.words) refuse("words", std::to_string(streams.words) + " or more", std::to_string(words));
  if (groups < streams.groups) refuse("groups", std::to_string(streams.groups) + " or more", std::to_string(groups));
}

// The streams of `squares`, which needs no bits; out has a number for each of their groups.
fewbit::Streams streams_of_squares(const QuantisedShape& shape, int64_t groups) {
  const auto streams = fewbit::one_stream(shape.samples, shape.features, shape.group_size, false, 1);
  if (groups != streams.groups) refuse("groups", std::to_string(streams.groups), std::to_string(groups));
  return streams;
}

void check_threads(int threads) {
  if (threads < 1) refuse("threads", "1 or more", std::to_string(threads));
}

void check_function(int function) {
  const int count = static_cast<int>(fewbit::fused_functions().size());
  if (function < 0 || function >= count) {
    refuse("function", "a number below " + std::to_string(count), std::to_string(function));
  }
}

void check_seed(const OwnedTable& table, uintptr_t seed) {
  if (table.get().unbiased() != (seed != 0)) {
    refuse("seed", seed ? "none, as the table is not unbiased" : "the address of one, as the table is unbiased",
           seed ? "one" : "none");
  }
}

// The address of n > 0 elements.
template <class T>
T* pointer(const char* name, uintptr_t address, int64_t n) {
  if (n > 0 && address == 0) refuse(name, "the address of " + std::to_string(n) + " elements", "0");
  return reinterpret_cast<T*>(address);
}

// n bits for tensors of those sensitivities and sizes, within a budget of bits in all.
void allocate(uintptr_t sensitivity, uintptr_t at_one, uintptr_t elements, int64_t n, int64_t budget, int least,
              int most, uintptr_t bits) {
  check_size(n);
  check_bits(least);
  check_bits(most);
  if (least > most) refuse("least", std::to_string(most) + " or less", std::to_string(least));
  const auto* weights = pointer<const double>("sensitivity_ptr", sensitivity, n);
  const auto* coarsest = pointer<const double>("at_one_ptr", at_one, n);
  const auto* sizes = pointer<const int64_t>("elements_ptr", elements, n);
  auto* to = pointer<uint8_t>("bits_ptr", bits, n);
  py::gil_scoped_release release;
  fewbit::allocate(weights, coarsest, sizes, n, budget, least, most, to);
}

// The index of vectors over n elements.
fewbit::VectorIndex vector_index(int64_t count, int64_t inner, int64_t n) {
  if (n > 0 && (count < 1 || inner < 1 || count > n / inner || n % (count * inner) != 0)) {
    refuse("entries", "entries * inner to divide the number of elements, " + std::to_string(n),
           std::to_string(count) + " * " + std::to_string(inner));
  }
  return {count, inner};
}

// None where both addresses are 0.
fewbit::Normalisation normalisation_at(uintptr_t mean, uintptr_t rstd, int64_t entries, int64_t inner, int64_t n) {
  if (mean == 0 && rstd == 0) return {};
  const auto* scales = pointer<const float>("rstd_ptr", rstd, n);
  return {reinterpret_cast<const float*>(mean), scales, vector_index(entries, inner, n)};
}

// None where both addresses are 0. scattered: groups run across samples that do not lie side by side.
fewbit::Affine affine_at(uintptr_t scale, uintptr_t shift, int64_t entries, int64_t inner, int64_t n, bool scattered) {
  if (scale == 0 && shift == 0) return {};
  if (scattered) refuse("scale_ptr, shift_ptr", "none for short samples of several widths", "one");
  return {reinterpret_cast<const float*>(scale), reinterpret_cast<const float*>(shift),
          vector_index(entries, inner, n)};
}

// n elements of x~ or y in `bits` bits each, by a grid of `channels` columns.
fewbit::Grid grid_at(uintptr_t grid, int64_t channels, int64_t inner, int bits, int64_t n) {
  check_size(n);
  check_bits(bits);
  return {pointer<const float>("grid_ptr", grid, n), vector_index(channels, inner, n)};
}

// None where the address is 0.
fewbit::Scale scale_at(uintptr_t scale, int64_t entries, int64_t inner, int64_t n) {
  if (scale == 0) return {};
  return {reinterpret_cast<const float*>(scale), vector_index(entries, inner, n)};
}

// -- Table ------------------------------------------------------------------------------------------------

template <class T>
std::vector<T> vector_of(const char* name, const py::object& object, const char* dtype) {
  if (object.is_none()) return {};
  if (!py::isinstance<py::array_t<T>>(object) || py::reinterpret_borrow<py::array>(object).ndim() != 1) {
    std::string got = Py_TYPE(object.ptr())->tp_name;
    if (py::isinstance<py::array>(object)) {
      const auto array = py::reinterpret_borrow<py::array>(object);
      got = std::to_string(array.ndim()) + "-D " + py::str(array.dtype()).cast<std::string>();
    }
    refuse(name, std::string("a 1-D ") + dtype + " array", got);
  }
  const auto array = py::reinterpret_borrow<py::array_t<T>>(object);
  const auto items = array.template unchecked<1>();
  std::vector<T> values(static_cast<size_t>(items.shape(0)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = items(static_cast<py::ssize_t>(i));
  return values;
}

std::unique_ptr<OwnedTable> make_table(int64_t bits, int64_t initial, const py::object& breaks32,
                                       const py::object& flips32, const py::object& breaks64,
                                       const py::object& flips64, const py::object& lut32, const py::object& lut64,
                                       const py::object& points, const py::object& origins,
                                       const py::object& values, const py::object& slopes,
                                       const py::object& levels, const py::object& inverse_gaps) {
  fewbit::TableArrays arrays;
  arrays.breaks32 = vector_of<float>("breaks32", breaks32, "float32");
  arrays.flips32 = vector_of<uint8_t>("flips32", flips32, "uint8");
  arrays.breaks64 = vector_of<double>("breaks64", breaks64, "float64");
  arrays.flips64 = vector_of<uint8_t>("flips64", flips64, "uint8");
  arrays.lut32 = vector_of<float>("lut32", lut32, "float32");
  arrays.lut64 = vector_of<double>("lut64", lut64, "float64");
  arrays.points = vector_of<float>("points", points, "float32");
  arrays.origins = vector_of<float>("origins", origins, "float32");
  arrays.values = vector_of<float>("values", values, "float32");
  arrays.slopes = vector_of<float>("slopes", slopes, "float32");
  arrays.levels = vector_of<float>("levels", levels, "float32");
  arrays.inverse_gaps = vector_of<float>("inverse_gaps", inverse_gaps, "float32");
  return std::make_unique<OwnedTable>(bits, initial, std::move(arrays));
}

// -- CPU --------------------------------------------------------------------------------------------------

// The kernels of an instruction set, with threads.
class Cpu {
 public:
  explicit Cpu(const std::string& isa) : kernels_(fewbit::kernels_of(isa)) {
    if (kernels_) return;
    std::string names;
    for (const std::string& name : fewbit::cpu_isas()) names += (names.empty() ? "" : ", ") + name;
    refuse("isa", "one of " + names, isa);
  }

  std::string isa() const { return kernels_->isa; }

  void pack(uintptr_t codes, int64_t n, int bits, uintptr_t packed, int threads) const {
    check_size(n);
    check_bits(bits);
    const auto* from = pointer<const uint8_t>("codes_ptr", codes, n);
    auto* to = pointer<uint32_t>("packed_ptr", packed, n);
    fewbit::will_write(to, packed_bytes(n, bits));
    run(n, threads, [=](int64_t begin, int64_t end) { kernels_->pack(from, begin, end, bits, to); });
  }

  void unpack(uintptr_t packed, int64_t n, int bits, uintptr_t codes, int threads) const {
    check_size(n);
    check_bits(bits);
    const auto* from = pointer<const uint32_t>("packed_ptr", packed, n);
    auto* to = pointer<uint8_t>("codes_ptr", codes, n);
    fewbit::will_write(to, n);
    run(n, threads, [=](int64_t begin, int64_t end) { kernels_->unpack(from, begin, end, bits, to); });
  }

  void encode(const OwnedTable& table, uintptr_t x, int dtype_number, int64_t n, uintptr_t packed, uintptr_t seed,
              int threads) const {
    check_size(n);
    const DType dtype = dtype_of(dtype_number);
    check_seed(table, seed);
    const auto* from = pointer<const void>("x_ptr", x, n);
    auto* to = pointer<uint32_t>("packed_ptr", packed, n);
    const uint64_t key = seed_at(seed);
    fewbit::will_write(to, packed_bytes(n, table.get().bits));
    run(n, threads, [=, &table](int64_t begin, int64_t end) {
      kernels_->encode(table.get(), from, dtype, begin, end, to, key);
    });
  }

  void decode_mul(const OwnedTable& table, uintptr_t grad, int dtype_number, int64_t n, uintptr_t packed,
                  uintptr_t out, bool grad_is_scalar, int threads) const {
    check_size(n);
    const DType dtype = dtype_of(dtype_number);
    const auto* from = pointer<const void>("grad_ptr", grad, n);
    const auto* codes = pointer<const uint32_t>("packed_ptr", packed, n);
    auto* to = pointer<void>("out_ptr", out, n);
    fewbit::will_write(to, n * fewbit::item_size(dtype));
    run(n, threads, [=, &table](int64_t begin, int64_t end) {
      kernels_->decode_mul(table.get(), from, dtype, begin, end, codes, to, grad_is_scalar);
    });
  }

  void forward(int function, double p0, double p1, const OwnedTable& table, uintptr_t x, int dtype_number,
               int64_t n, uintptr_t y, uintptr_t packed, uintptr_t seed, int threads) const {
    check_size(n);
    check_function(function);
    const DType dtype = fused_dtype_of(dtype_number);
    check_seed(table, seed);
    const auto* from = pointer<const void>("x_ptr", x, n);
    auto* to = pointer<void>("y_ptr", y, n);
    auto* codes = pointer<uint32_t>("packed_ptr", packed, n);
    const uint64_t key = seed_at(seed);
    fewbit::will_write(to, n * fewbit::item_size(dtype));
    fewbit::will_write(codes, packed_bytes(n, table.get().bits));
    run(n, threads, [=, &table](int64_t begin, int64_t end) {
      kernels_->forward(function, p0, p1, table.get(), from, dtype, begin, end, to, codes, key);
    });
  }

  std::pair<float, float> quantise(uintptr_t x, int dtype_number, int64_t samples, int64_t features, int group_size,
                                   int bits, uintptr_t widths, bool wide, uintptr_t seed, uintptr_t packed,
                                   int64_t words, uintptr_t ranges, int64_t groups, int threads, uintptr_t mean,
                                   uintptr_t rstd, int64_t entries, int64_t inner) const {
    const QuantisedShape shape = quantised_shape(samples, features, group_size, wide);
    const DType dtype = dtype_of(dtype_number);
    const auto* from = pointer<const void>("x_ptr", x, shape.elements());
    const auto normalisation = normalisation_at(mean, rstd, entries, inner, shape.elements());
    if (seed == 0) refuse("seed", "the address of one", "none");
    check_threads(threads);
    const fewbit::StreamPlan plan = plan_of(shape, bits, widths, words, groups);
    auto* codes = pointer<uint32_t>("packed_ptr", packed, words);
    auto* rows = pointer<uint16_t>("ranges_ptr", ranges, groups);
    const uint64_t key = seed_at(seed);
    py::gil_scoped_release release;
    const fewbit::Extent extent =
        fewbit::quantise(*kernels_, plan, from, dtype, normalisation, key, codes, rows, threads);
    // More was allocated than is taken where only a bound was known.
    std::fill(codes + plan.streams.words, codes + words, 0u);
    const int columns = fewbit::columns(wide);
    std::fill(rows + plan.streams.groups * columns, rows + groups * columns, uint16_t{0});
    return {extent.least, extent.greatest};
  }

  void squares(uintptr_t x, int dtype_number, int64_t samples, int64_t features, int group_size, uintptr_t out,
               int64_t groups, int threads, uintptr_t mean, uintptr_t rstd, int64_t entries, int64_t inner) const {
    const QuantisedShape shape = quantised_shape(samples, features, group_size, false);
    const DType dtype = dtype_of(dtype_number);
    const auto* from = pointer<const void>("x_ptr", x, shape.elements());
    const auto normalisation = normalisation_at(mean, rstd, entries, inner, shape.elements());
    check_threads(threads);
    const fewbit::Streams streams = streams_of_squares(shape, groups);
    auto* to = pointer<float>("out_ptr", out, groups);
    py::gil_scoped_release release;
    fewbit::squares(*kernels_, streams, from, dtype, normalisation, to, threads);
  }

  // None, with nothing done, where the threads' shares would cut a group.
  std::optional<std::pair<float, float>> forward_quantised(
      int function, double p0, double p1, const OwnedTable& table, uintptr_t x, int dtype_number, int64_t samples,
      int64_t features, uintptr_t y, uintptr_t codes, uintptr_t seed, int group_size, int bits, bool wide,
      uintptr_t quantiser_seed, uintptr_t packed, int64_t words, uintptr_t ranges, int64_t groups, int threads) const {
    const QuantisedShape shape = quantised_shape(samples, features, group_size, wide);
    const int64_t n = shape.elements();
    check_function(function);
    const DType dtype = fused_dtype_of(dtype_number);
    check_seed(table, seed);
    if (quantiser_seed == 0) refuse("quantiser_seed", "the address of one", "none");
    check_threads(threads);
    const fewbit::StreamPlan plan = plan_of(shape, bits, 0, words, groups);
    const fewbit::Forward forward{function,
                                  p0,
                                  p1,
                                  &table.get(),
                                  pointer<const void>("x_ptr", x, n),
                                  dtype,
                                  pointer<void>("y_ptr", y, n),
                                  pointer<uint32_t>("codes_ptr", codes, n),
                                  seed_at(seed)};
    auto* to = pointer<uint32_t>("packed_ptr", packed, words);
    auto* rows = pointer<uint16_t>("ranges_ptr", ranges, groups);
    if (fewbit::threads_of_forward(plan.streams, threads) < fewbit::threads_for(n, threads)) return std::nullopt;
    const uint64_t key = seed_at(quantiser_seed);
    py::gil_scoped_release release;
    const fewbit::Extent extent =
        fewbit::forward_quantised(*kernels_, plan.streams, forward, key, to, rows, threads);
    return std::pair(extent.least, extent.greatest);
  }

  void dequantise(uintptr_t packed, int64_t words, uintptr_t ranges, int64_t groups, int bits, uintptr_t widths,
                  bool wide, int64_t samples, int64_t features, int group_size, uintptr_t out, int dtype_number,
                  int threads, uintptr_t scale, uintptr_t shift, int64_t entries, int64_t inner) const {
    const QuantisedShape shape = quantised_shape(samples, features, group_size, wide);
    const DType dtype = dtype_of(dtype_number);
    auto* to = pointer<void>("out_ptr", out, shape.elements());
    const bool scattered = widths != 0 && features < fewbit::kLeastFeatures;
    const auto affine = affine_at(scale, shift, entries, inner, shape.elements(), scattered);
    check_threads(threads);
    const fewbit::StreamPlan plan = plan_of(shape, bits, widths, words, groups);
    const auto* codes = pointer<const uint32_t>("packed_ptr", packed, words);
    const auto* rows = pointer<const uint16_t>("ranges_ptr", ranges, groups);
    py::gil_scoped_release release;
    fewbit::dequantise(*kernels_, plan, codes, rows, affine, to, dtype, threads);
  }

  void grid_fixed(uintptr_t gamma, uintptr_t beta, int64_t n, int bits, uintptr_t grid, int) const {
    check_size(n);
    check_bits(bits);
    const auto *scales = pointer<const float>("gamma_ptr", gamma, n), *shifts = pointer<const float>("beta_ptr", beta, n);
    auto* to = pointer<float>("grid_ptr", grid, n);
    for (int64_t i = 0; i < n; ++i) fewbit::make_column(scales[i], shifts[i], bits, to, i, n);
  }

  void encode_fixed(uintptr_t x, uintptr_t y, int dtype_number, int64_t n, uintptr_t grid, int64_t channels,
                    int64_t inner, int bits, uintptr_t packed, int threads, uintptr_t mean, uintptr_t rstd,
                    int64_t entries, int64_t inner_of_entries) const {
    const DType dtype = dtype_of(dtype_number);
    const auto by = grid_at(grid, channels, inner, bits, n);
    const auto normalisation = normalisation_at(mean, rstd, entries, inner_of_entries, n);
    const auto* from = pointer<const void>("x_ptr", x, n);
    const auto* result = pointer<const void>("y_ptr", y, n);
    auto* to = pointer<uint32_t>("packed_ptr", packed, n);
    fewbit::will_write(to, packed_bytes(n, bits));
    run(n, threads, [=](int64_t begin, int64_t end) {
      kernels_->fixed_point->encode(by, normalisation, from, result, dtype, bits, begin, end, to);
    });
  }

  void decode_fixed(uintptr_t packed, int64_t n, uintptr_t grid, int64_t channels, int64_t inner, int bits,
                    bool activated, float slope, uintptr_t out, int dtype_number, int threads, uintptr_t scale,
                    int64_t entries, int64_t inner_of_entries) const {
    const DType dtype = dtype_of(dtype_number);
    const auto by = grid_at(grid, channels, inner, bits, n);
    const auto times = scale_at(scale, entries, inner_of_entries, n);
    const auto* codes = pointer<const uint32_t>("packed_ptr", packed, n);
    auto* to = pointer<void>("out_ptr", out, n);
    fewbit::will_write(to, n * fewbit::item_size(dtype));
    run(n, threads, [=](int64_t begin, int64_t end) {
      kernels_->fixed_point->decode(by, times, codes, bits, begin, end, activated, slope, to, dtype);
    });
  }

  void mask_fixed(uintptr_t grad, int dtype_number, int64_t n, uintptr_t packed, uintptr_t grid, int64_t channels,
                  int64_t inner, int bits, double slope, uintptr_t out, int threads) const {
    const DType dtype = dtype_of(dtype_number);
    const auto by = grid_at(grid, channels, inner, bits, n);
    const auto* from = pointer<const void>("grad_ptr", grad, n);
    const auto* codes = pointer<const uint32_t>("packed_ptr", packed, n);
    auto* to = pointer<void>("out_ptr", out, n);
    fewbit::will_write(to, n * fewbit::item_size(dtype));
    run(n, threads, [=](int64_t begin, int64_t end) {
      kernels_->fixed_point->mask(by, codes, bits, begin, end, slope, from, to, dtype);
    });
  }

 private:
  // The streams of a tensor whose codes have `words` words and whose ranges `groups` rows.
  static fewbit::StreamPlan plan_of(const QuantisedShape& shape, int bits, uintptr_t widths, int64_t words,
                                    int64_t groups) {
    const uint8_t* widths_of = reinterpret_cast<const uint8_t*>(widths);
    if (widths_of) {
      for (int64_t i = 0; i < shape.samples; ++i) check_bits(widths_of[i]);
    } else {
      check_bits(bits);
    }
    const fewbit::StreamPlan plan =
        fewbit::plan_streams(shape.samples, shape.features, shape.group_size, shape.wide, bits, widths_of);
    check_room(plan.streams, words, groups);
    return plan;
  }

  static int64_t packed_bytes(int64_t n, int bits) {
    return fewbit::packed_words(n, bits) * static_cast<int64_t>(sizeof(uint32_t));
  }

  static uint64_t seed_at(uintptr_t address) {
    return address ? static_cast<uint64_t>(*reinterpret_cast<const int64_t*>(address)) : 0;
  }

  template <class Work>
  static void run(int64_t n, int threads, const Work& work) {
    check_threads(threads);
    if (n == 0) return;
    py::gil_scoped_release release;
    auto share = [&](int index, int count) {
      const fewbit::Range range = fewbit::share_of(n, index, count);
      work(range.begin, range.end);
    };
    fewbit::run_parallel(fewbit::threads_for(n, threads), share);
  }

  const Kernels* kernels_;
};

// -- CUDA -------------------------------------------------------------------------------------------------

#ifdef FEWBIT_WITH_CUDA
// The kernels for CUDA devices: the same checks, then a launch on the caller's stream.
struct Cuda {
  void pack(uintptr_t codes, int64_t n, int bits, uintptr_t packed, int device, uintptr_t stream) const {
    check_size(n);
    check_bits(bits);
    const auto* from = pointer<const uint8_t>("codes_ptr", codes, n);
    auto* to = pointer<int32_t>("packed_ptr", packed, n);
    py::gil_scoped_release release;
    fewbit::cuda::pack(from, n, bits, to, device, stream_at(stream));
  }

  void unpack(uintptr_t packed, int64_t n, int bits, uintptr_t codes, int device, uintptr_t stream) const {
    check_size(n);
    check_bits(bits);
    const auto* from = pointer<const int32_t>("packed_ptr", packed, n);
    auto* to = pointer<uint8_t>("codes_ptr", codes, n);
    py::gil_scoped_release release;
    fewbit::cuda::unpack(from, n, bits, to, device, stream_at(stream));
  }

  void encode(const OwnedTable& table, uintptr_t x, int dtype, int64_t n, uintptr_t packed, uintptr_t seed,
              int device, uintptr_t stream) const {
    check_size(n);
    dtype_of(dtype);
    check_seed(table, seed);
    const auto* from = pointer<const void>("x_ptr", x, n);
    auto* to = pointer<int32_t>("packed_ptr", packed, n);
    py::gil_scoped_release release;
    fewbit::cuda::encode(table.get(), from, dtype, n, to, reinterpret_cast<const int64_t*>(seed), device,
                         stream_at(stream));
  }

  void decode_mul(const OwnedTable& table, uintptr_t grad, int dtype, int64_t n, uintptr_t packed, uintptr_t out,
                  bool grad_is_scalar, int device, uintptr_t stream) const {
    check_size(n);
    dtype_of(dtype);
    const auto* from = pointer<const void>("grad_ptr", grad, n);
    const auto* codes = pointer<const int32_t>("packed_ptr", packed, n);
    auto* to = pointer<void>("out_ptr", out, n);
    py::gil_scoped_release release;
    fewbit::cuda::decode_mul(table.get(), from, dtype, n, codes, to, grad_is_scalar, device, stream_at(stream));
  }

  void forward(int function, double p0, double p1, const OwnedTable& table, uintptr_t x, int dtype, int64_t n,
               uintptr_t y, uintptr_t packed, uintptr_t seed, int device, uintptr_t stream) const {
    check_size(n);
    check_function(function);
    fused_dtype_of(dtype);
    check_seed(table, seed);
    const auto* from = pointer<const void>("x_ptr", x, n);
    auto* to = pointer<void>("y_ptr", y, n);
    auto* codes = pointer<int32_t>("packed_ptr", packed, n);
    py::gil_scoped_release release;
    fewbit::cuda::forward(function, p0, p1, table.get(), from, dtype, n, to, codes,
                          reinterpret_cast<const int64_t*>(seed), device, stream_at(stream));
  }

  void quantise(uintptr_t x, int dtype, int64_t samples, int64_t features, int group_size, int bits, uintptr_t order,
                uintptr_t counts, bool wide, uintptr_t seed, uintptr_t packed, int64_t words, uintptr_t ranges,
                int64_t groups, int device, uintptr_t stream, uintptr_t mean, uintptr_t rstd, int64_t entries,
                int64_t inner) const {
    const QuantisedShape shape = quantised_shape(samples, features, group_size, wide);
    const auto of = quantised(shape, bits, order, counts, words, groups);
    const auto normalisation = normalisation_at(mean, rstd, entries, inner, shape.elements());
    dtype_of(dtype);
    const auto* from = pointer<const void>("x_ptr", x, shape.elements());
    if (seed == 0) refuse("seed", "the address of one", "none");
    auto* codes = pointer<int32_t>("packed_ptr", packed, words);
    auto* rows = pointer<uint16_t>("ranges_ptr", ranges, groups);
    py::gil_scoped_release release;
    fewbit::cuda::quantise(of, from, dtype, normalisation, reinterpret_cast<const int64_t*>(seed), codes, words, rows,
                           groups, device, stream_at(stream));
  }

  void squares(uintptr_t x, int dtype, int64_t samples, int64_t features, int group_size, uintptr_t out, int64_t groups,
               int device, uintptr_t stream, uintptr_t mean, uintptr_t rstd, int64_t entries, int64_t inner) const {
    const QuantisedShape shape = quantised_shape(samples, features, group_size, false);
    dtype_of(dtype);
    const auto* from = pointer<const void>("x_ptr", x, shape.elements());
    const auto normalisation = normalisation_at(mean, rstd, entries, inner, shape.elements());
    const fewbit::Streams streams = streams_of_squares(shape, groups);
    auto* to = pointer<float>("out_ptr", out, groups);
    py::gil_scoped_release release;
    fewbit::cuda::squares(streams, from, dtype, normalisation, to, device, stream_at(stream));
  }

  void dequantise(uintptr_t packed, int64_t words, uintptr_t ranges, int64_t groups, int bits, uintptr_t order,
                  uintptr_t counts, bool wide, int64_t samples, int64_t features, int group_size, uintptr_t out,
                  int dtype, int device, uintptr_t stream, uintptr_t scale, uintptr_t shift, int64_t entries,
                  int64_t inner) const {
    const QuantisedShape shape = quantised_shape(samples, features, group_size, wide);
    const auto of = quantised(shape, bits, order, counts, words, groups);
    const bool scattered = counts != 0 && features < fewbit::kLeastFeatures;
    const auto affine = affine_at(scale, shift, entries, inner, shape.elements(), scattered);
    dtype_of(dtype);
    auto* to = pointer<void>("out_ptr", out, shape.elements());
    const auto* codes = pointer<const int32_t>("packed_ptr", packed, words);
    const auto* rows = pointer<const uint16_t>("ranges_ptr", ranges, groups);
    py::gil_scoped_release release;
    fewbit::cuda::dequantise(of, codes, rows, groups, affine, to, dtype, device, stream_at(stream));
  }

  void grid_fixed(uintptr_t gamma, uintptr_t beta, int64_t n, int bits, uintptr_t grid, int device,
                  uintptr_t stream) const {
    check_size(n);
    check_bits(bits);
    const auto *scales = pointer<const float>("gamma_ptr", gamma, n), *shifts = pointer<const float>("beta_ptr", beta, n);
    auto* to = pointer<float>("grid_ptr", grid, n);
    py::gil_scoped_release release;
    fewbit::cuda::grid_fixed(scales, shifts, n, bits, to, device, stream_at(stream));
  }

  void encode_fixed(uintptr_t x, uintptr_t y, int dtype, int64_t n, uintptr_t grid, int64_t channels, int64_t inner,
                    int bits, uintptr_t packed, int device, uintptr_t stream, uintptr_t mean, uintptr_t rstd,
                    int64_t entries, int64_t inner_of_entries) const {
    dtype_of(dtype);
    const auto by = grid_at(grid, channels, inner, bits, n);
    const auto normalisation = normalisation_at(mean, rstd, entries, inner_of_entries, n);
    const auto* from = pointer<const void>("x_ptr", x, n);
    const auto* result = pointer<const void>("y_ptr", y, n);
    auto* to = pointer<int32_t>("packed_ptr", packed, n);
    py::gil_scoped_release release;
    fewbit::cuda::encode_fixed(by, normalisation, from, result, dtype, n, bits, to, device, stream_at(stream));
  }

  void decode_fixed(uintptr_t packed, int64_t n, uintptr_t grid, int64_t channels, int64_t inner, int bits,
                    bool activated, float slope, uintptr_t out, int dtype, int device, uintptr_t stream,
                    uintptr_t scale, int64_t entries, int64_t inner_of_entries) const {
    dtype_of(dtype);
    const auto by = grid_at(grid, channels, inner, bits, n);
    const auto times = scale_at(scale, entries, inner_of_entries, n);
    const auto* codes = pointer<const int32_t>("packed_ptr", packed, n);
    auto* to = pointer<void>("out_ptr", out, n);
    py::gil_scoped_release release;
    fewbit::cuda::decode_fixed(by, times, codes, n, bits, activated, slope, to, dtype, device, stream_at(stream));
  }

  void mask_fixed(uintptr_t grad, int dtype, int64_t n, uintptr_t packed, uintptr_t grid, int64_t channels,
                  int64_t inner, int bits, double slope, uintptr_t out, int device, uintptr_t stream) const {
    dtype_of(dtype);
    const auto by = grid_at(grid, channels, inner, bits, n);
    const auto* from = pointer<const void>("grad_ptr", grad, n);
    const auto* codes = pointer<const int32_t>("packed_ptr", packed, n);
    auto* to = pointer<void>("out_ptr", out, n);
    py::gil_scoped_release release;
    fewbit::cuda::mask_fixed(by, codes, n, bits, slope, from, to, dtype, device, stream_at(stream));
  }

 private:
  // Widths are only known on the device: then the caller answers for `words` and `groups`.
  static fewbit::cuda::Quantised quantised(const QuantisedShape& shape, int bits, uintptr_t order, uintptr_t counts,
                                           int64_t words, int64_t groups) {
    check_bits(bits);
    if ((order == 0) != (counts == 0)) refuse("order_ptr", "one where there is counts_ptr, and only there", "one");
    if (counts == 0) {
      check_room(fewbit::one_stream(shape.samples, shape.features, shape.group_size, shape.wide, bits), words, groups);
    }
    return {shape.samples,
            shape.features,
            shape.group_size,
            shape.wide,
            bits,
            reinterpret_cast<const int64_t*>(order),
            reinterpret_cast<const int64_t*>(counts)};
  }

  static void* stream_at(uintptr_t address) { return reinterpret_cast<void*>(address); }
};

void bind_cuda(py::module_& module) {
  py::class_<Cuda> cuda(module, "Cuda", "The kernels for CUDA devices. Pointers are addresses on the device.");
  cuda.def_property_readonly_static("runtime_version", [](const py::object&) { return fewbit::cuda::runtime_version(); })
      .def_property_readonly_static("architectures",
                                    [](const py::object&) { return py::tuple(py::cast(fewbit::cuda::architectures())); })
      .def("available", [](const Cuda&, int device) { return fewbit::cuda::available(device); },
           py::arg("device") = -1,
           "(usable, why not): whether the kernels can run here.")
      .def("pack", &Cuda::pack, py::arg("codes_ptr"), py::arg("n"), py::arg("bits"), py::arg("packed_ptr"),
           py::arg("device_index"), py::arg("stream_ptr"))
      .def("unpack", &Cuda::unpack, py::arg("packed_ptr"), py::arg("n"), py::arg("bits"), py::arg("codes_ptr"),
           py::arg("device_index"), py::arg("stream_ptr"))
      .def("encode", &Cuda::encode, py::arg("table"), py::arg("x_ptr"), py::arg("dtype"), py::arg("n"),
           py::arg("packed_ptr"), py::arg("seed_ptr"), py::arg("device_index"), py::arg("stream_ptr"))
      .def("decode_mul", &Cuda::decode_mul, py::arg("table"), py::arg("grad_ptr"), py::arg("dtype"), py::arg("n"),
           py::arg("packed_ptr"), py::arg("out_ptr"), py::arg("grad_is_scalar"), py::arg("device_index"),
           py::arg("stream_ptr"))
      .def("forward", &Cuda::forward, py::arg("function"), py::arg("p0"), py::arg("p1"), py::arg("table"),
           py::arg("x_ptr"), py::arg("dtype"), py::arg("n"), py::arg("y_ptr"), py::arg("packed_ptr"),
           py::arg("seed_ptr"), py::arg("device_index"), py::arg("stream_ptr"))
      .def("quantise", &Cuda::quantise, py::arg("x_ptr"), py::arg("dtype"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("bits"), py::arg("order_ptr"), py::arg("counts_ptr"), py::arg("wide"),
           py::arg("seed_ptr"), py::arg("packed_ptr"), py::arg("words"), py::arg("ranges_ptr"), py::arg("groups"),
           py::arg("device_index"), py::arg("stream_ptr"), py::arg("mean_ptr") = 0, py::arg("rstd_ptr") = 0,
           py::arg("entries") = 0, py::arg("inner") = 1)
      .def("squares", &Cuda::squares, py::arg("x_ptr"), py::arg("dtype"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("out_ptr"), py::arg("groups"), py::arg("device_index"), py::arg("stream_ptr"),
           py::arg("mean_ptr") = 0, py::arg("rstd_ptr") = 0, py::arg("entries") = 0, py::arg("inner") = 1)
      .def("dequantise", &Cuda::dequantise, py::arg("packed_ptr"), py::arg("words"), py::arg("ranges_ptr"),
           py::arg("groups"), py::arg("bits"), py::arg("order_ptr"), py::arg("counts_ptr"), py::arg("wide"),
           py::arg("samples"), py::arg("features"), py::arg("group_size"), py::arg("out_ptr"), py::arg("dtype"),
           py::arg("device_index"), py::arg("stream_ptr"), py::arg("scale_ptr") = 0, py::arg("shift_ptr") = 0,
           py::arg("entries") = 0, py::arg("inner") = 1)
      .def("grid_fixed", &Cuda::grid_fixed, py::arg("gamma_ptr"), py::arg("beta_ptr"), py::arg("n"), py::arg("bits"),
           py::arg("grid_ptr"), py::arg("device_index"), py::arg("stream_ptr"))
      .def("encode_fixed", &Cuda::encode_fixed, py::arg("x_ptr"), py::arg("y_ptr"), py::arg("dtype"), py::arg("n"),
           py::arg("grid_ptr"), py::arg("channels"), py::arg("inner"), py::arg("bits"), py::arg("packed_ptr"),
           py::arg("device_index"), py::arg("stream_ptr"), py::arg("mean_ptr") = 0, py::arg("rstd_ptr") = 0,
           py::arg("entries") = 0, py::arg("inner_of_entries") = 1)
      .def("decode_fixed", &Cuda::decode_fixed, py::arg("packed_ptr"), py::arg("n"), py::arg("grid_ptr"),
           py::arg("channels"), py::arg("inner"), py::arg("bits"), py::arg("activated"), py::arg("slope"),
           py::arg("out_ptr"), py::arg("dtype"), py::arg("device_index"), py::arg("stream_ptr"),
           py::arg("scale_ptr") = 0, py::arg("entries") = 0, py::arg("inner_of_entries") = 1)
      .def("mask_fixed", &Cuda::mask_fixed, py::arg("grad_ptr"), py::arg("dtype"), py::arg("n"), py::arg("packed_ptr"),
           py::arg("grid_ptr"), py::arg("channels"), py::arg("inner"), py::arg("bits"), py::arg("slope"),
           py::arg("out_ptr"), py::arg("device_index"), py::arg("stream_ptr"));
  module.attr("cuda") = py::cast(Cuda{});
}
#endif

py::dict functions() {
  py::dict result;
  int number = 0;
  for (const fewbit::FunctionInfo& each : fewbit::fused_functions()) {
    result[each.name] = py::make_tuple(number++, each.n_parameters);
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(_kernels, module) {
  module.doc() = "Compiled kernels. Tensors are addresses; dtypes are 0 float32, 1 float64, 2 float16, 3 bfloat16.";

  py::class_<OwnedTable>(module, "Table", "A table's constants, checked and copied (fewbit.runtime.encoding).")
      .def(py::init(&make_table), py::arg("bits"), py::arg("initial"), py::arg("breaks32"), py::arg("flips32"),
           py::arg("breaks64"), py::arg("flips64"), py::arg("lut32"), py::arg("lut64"),
           py::arg("points") = py::none(), py::arg("origins") = py::none(), py::arg("values") = py::none(),
           py::arg("slopes") = py::none(), py::arg("levels") = py::none(), py::arg("inverse_gaps") = py::none())
      .def_property_readonly("bits", [](const OwnedTable& table) { return table.get().bits; })
      .def_property_readonly("unbiased", [](const OwnedTable& table) { return table.get().unbiased(); });

  py::class_<Cpu>(module, "Cpu", "The kernels of one instruction set, one of cpu_isas().")
      .def(py::init<const std::string&>(), py::arg("isa"))
      .def_property_readonly("isa", &Cpu::isa)
      .def("pack", &Cpu::pack, py::arg("codes_ptr"), py::arg("n"), py::arg("bits"), py::arg("packed_ptr"),
           py::arg("threads"), "n uint8 codes to bits * ceil(n / 32) int32 words.")
      .def("unpack", &Cpu::unpack, py::arg("packed_ptr"), py::arg("n"), py::arg("bits"), py::arg("codes_ptr"),
           py::arg("threads"), "Packed words to n uint8 codes.")
      .def("encode", &Cpu::encode, py::arg("table"), py::arg("x_ptr"), py::arg("dtype"), py::arg("n"),
           py::arg("packed_ptr"), py::arg("seed_ptr"), py::arg("threads"), "x to the packed codes of its pieces.")
      .def("decode_mul", &Cpu::decode_mul, py::arg("table"), py::arg("grad_ptr"), py::arg("dtype"), py::arg("n"),
           py::arg("packed_ptr"), py::arg("out_ptr"), py::arg("grad_is_scalar"), py::arg("threads"),
           "out = level of the code * grad, rounded once; out may be grad.")
      .def("forward", &Cpu::forward, py::arg("function"), py::arg("p0"), py::arg("p1"), py::arg("table"),
           py::arg("x_ptr"), py::arg("dtype"), py::arg("n"), py::arg("y_ptr"), py::arg("packed_ptr"),
           py::arg("seed_ptr"), py::arg("threads"), "y = f(x) and the packed codes of x; y may be x.")
      .def("forward_quantised", &Cpu::forward_quantised, py::arg("function"), py::arg("p0"), py::arg("p1"),
           py::arg("table"), py::arg("x_ptr"), py::arg("dtype"), py::arg("samples"), py::arg("features"),
           py::arg("y_ptr"), py::arg("codes_ptr"), py::arg("seed_ptr"), py::arg("group_size"), py::arg("bits"),
           py::arg("wide"), py::arg("quantiser_seed_ptr"), py::arg("packed_ptr"), py::arg("words"),
           py::arg("ranges_ptr"), py::arg("groups"), py::arg("threads"),
           "forward, with codes in codes_ptr, and quantise of y, in one pass; None, with nothing done, where threads "
           "would have to share groups.")
      .def("quantise", &Cpu::quantise, py::arg("x_ptr"), py::arg("dtype"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("bits"), py::arg("widths_ptr"), py::arg("wide"), py::arg("seed_ptr"),
           py::arg("packed_ptr"), py::arg("words"), py::arg("ranges_ptr"), py::arg("groups"), py::arg("threads"),
           py::arg("mean_ptr") = 0, py::arg("rstd_ptr") = 0, py::arg("entries") = 0, py::arg("inner") = 1,
           "x to packed codes and ranges; (least, greatest) element. widths: a uint8 a sample, or 0: bits for all. "
           "mean, rstd: of `entries` float32, or 0; element e is (x - mean[i]) rstd[i], i = e / inner % entries.")
      .def("squares", &Cpu::squares, py::arg("x_ptr"), py::arg("dtype"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("out_ptr"), py::arg("groups"), py::arg("threads"), py::arg("mean_ptr") = 0,
           py::arg("rstd_ptr") = 0, py::arg("entries") = 0, py::arg("inner") = 1,
           "length * range^2 of each group, float32; mean, rstd as in quantise.")
      .def("dequantise", &Cpu::dequantise, py::arg("packed_ptr"), py::arg("words"), py::arg("ranges_ptr"),
           py::arg("groups"), py::arg("bits"), py::arg("widths_ptr"), py::arg("wide"), py::arg("samples"),
           py::arg("features"), py::arg("group_size"), py::arg("out_ptr"), py::arg("dtype"), py::arg("threads"),
           py::arg("scale_ptr") = 0, py::arg("shift_ptr") = 0, py::arg("entries") = 0, py::arg("inner") = 1,
           "Packed codes and ranges to values, rounded once. scale, shift: as mean and rstd of quantise; element e is "
           "value scale[i] + shift[i].")
      .def("grid_fixed", &Cpu::grid_fixed, py::arg("gamma_ptr"), py::arg("beta_ptr"), py::arg("n"), py::arg("bits"),
           py::arg("grid_ptr"), py::arg("threads"), "n float32 weights and biases of a norm to GRID_ROWS rows of n.")
      .def("encode_fixed", &Cpu::encode_fixed, py::arg("x_ptr"), py::arg("y_ptr"), py::arg("dtype"), py::arg("n"),
           py::arg("grid_ptr"), py::arg("channels"), py::arg("inner"), py::arg("bits"), py::arg("packed_ptr"),
           py::arg("threads"), py::arg("mean_ptr") = 0, py::arg("rstd_ptr") = 0, py::arg("entries") = 0,
           py::arg("inner_of_entries") = 1,
           "x to packed fixed-point codes with the sign of y. grid: 7 rows of `channels` float32; element e has column "
           "e / inner % channels. mean, rstd: as in quantise.")
      .def("decode_fixed", &Cpu::decode_fixed, py::arg("packed_ptr"), py::arg("n"), py::arg("grid_ptr"),
           py::arg("channels"), py::arg("inner"), py::arg("bits"), py::arg("activated"), py::arg("slope"),
           py::arg("out_ptr"), py::arg("dtype"), py::arg("threads"), py::arg("scale_ptr") = 0, py::arg("entries") = 0,
           py::arg("inner_of_entries") = 1,
           "Fixed-point codes to values: activated: y, times slope where it is not positive; else the normalised input, "
           "times scale[i].")
      .def("mask_fixed", &Cpu::mask_fixed, py::arg("grad_ptr"), py::arg("dtype"), py::arg("n"), py::arg("packed_ptr"),
           py::arg("grid_ptr"), py::arg("channels"), py::arg("inner"), py::arg("bits"), py::arg("slope"),
           py::arg("out_ptr"), py::arg("threads"), "out = grad, times slope where y is not positive; out may be grad.");

  module.def("cpu_isas", [] { return py::tuple(py::cast(fewbit::cpu_isas())); },
             "Names of the instruction sets that can be used here, best first.");
  module.def("allocate", &allocate, py::arg("sensitivity_ptr"), py::arg("at_one_ptr"), py::arg("elements_ptr"),
             py::arg("n"), py::arg("budget"), py::arg("least"), py::arg("most"), py::arg("bits_ptr"),
             "n float64 sensitivities, variances at 1 bit and int64 sizes to n uint8 bits of which elements * bits sum up "
             "to the budget.");
  module.def("packed_words", [](int64_t n, int bits) {
        check_size(n);
        check_bits(bits);
        return fewbit::packed_words(n, bits);
      }, py::arg("n"), py::arg("bits"), "int32 words that n elements take.");
  module.def("use_openmp_of", &fewbit::use_openmp_of, py::arg("path"),
             "Use the OpenMP runtime that the loaded library at path uses; whether there is one.");
  module.attr("GRID_ROWS") = fewbit::kGridRows;
  module.attr("FUNCTIONS") = functions();
  module.attr("cuda") = py::none();
#ifdef FEWBIT_WITH_CUDA
  bind_cuda(module);
#endif
}
