// The Python module fewbit._kernels. It does not use libtorch: the arguments of entries are torch's tensors, of which `Buffer` has
// the facts that kernels need. Every entry checks that each buffer has the size that the entry reads or writes.

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
#include "common/rotate.h"
#include "common/table.h"
#include "common/unbiased.h"
#include "cpu/allocation.h"
#include "cpu/checksum.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/quantizer.h"

#ifdef FEWBIT_WITH_CUDA
#include "cuda/kernels.h"
#endif

namespace py = pybind11;

namespace {

// A buffer, which in Python is a tensor, the tuple (address, number of elements, number of their dtype, device), or None. The device
// is the index of a CUDA device, or -1 for the CPU.
struct Buffer {
  bool exists = false;
  uintptr_t address = 0;
  int64_t count = 0;
  int item = -1;
  int device = -1;
};

// A seed, which in Python is an int, a tensor of one int64, or None.
struct SeedArgument {
  int64_t value = 0;
  bool is_value = false;
  Buffer buffer;
};

// The arguments of `use_tensors` from Python. The references are never released.
struct Tensors {
  PyObject* dtypes = nullptr;       // a dict: the numbers of torch's dtypes
  PyObject* check_dense = nullptr;  // a function that raises ValueError unless a tensor is dense
} tensors;

// Returns the result of a method without arguments; throws the error that it raises.
py::object call(PyObject* object, PyObject* method) {
  PyObject* result = PyObject_CallMethodNoArgs(object, method);
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Reads the facts of a dense tensor. Python code would take twice as long, which counts for small tensors.
Buffer buffer_of(PyObject* tensor) {
  static PyObject* const is_contiguous = PyUnicode_InternFromString("is_contiguous");
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  static PyObject* const numel = PyUnicode_InternFromString("numel");
  static PyObject* const get_device = PyUnicode_InternFromString("get_device");
  static PyObject* const dtype = PyUnicode_InternFromString("dtype");
  if (call(tensor, is_contiguous).ptr() != Py_True) {
    PyObject* nothing = PyObject_CallOneArg(tensors.check_dense, tensor);
    if (!nothing) throw py::error_already_set();
    Py_DECREF(nothing);
  }
  Buffer buffer;
  buffer.exists = true;
  buffer.address = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(call(tensor, data_ptr).ptr()));
  buffer.count = PyLong_AsLongLong(call(tensor, numel).ptr());
  buffer.device = static_cast<int>(PyLong_AsLong(call(tensor, get_device).ptr()));
  PyObject* type = PyObject_GetAttr(tensor, dtype);
  if (!type) throw py::error_already_set();
  PyObject* number = PyDict_GetItem(tensors.dtypes, type);  // borrowed
  Py_DECREF(type);
  buffer.item = number ? static_cast<int>(PyLong_AsLong(number)) : -1;
  if (PyErr_Occurred()) throw py::error_already_set();
  return buffer;
}

// The numbers of the buffers' dtypes that DType does not have.
constexpr int kInt32 = 4, kUint8 = 5, kInt64 = 6;
constexpr const char* kItemNames[] = {"float32", "float64", "float16", "bfloat16", "int32", "uint8", "int64"};
constexpr int kItems = sizeof kItemNames / sizeof *kItemNames;

}  // namespace

namespace pybind11::detail {

template <>
struct type_caster<Buffer> {
  PYBIND11_TYPE_CASTER(Buffer, const_name("torch.Tensor | tuple[int, int, int, int] | None"));

  bool load(handle source, bool) {
    if (source.is_none()) return true;
    if (tensors.dtypes && PyObject_HasAttrString(source.ptr(), "data_ptr")) {
      value = buffer_of(source.ptr());
      return true;
    }
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 4) return false;
    PyObject* const* items = &PyTuple_GET_ITEM(source.ptr(), 0);
    value.exists = true;
    value.address = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(items[0]));
    value.count = PyLong_AsLongLong(items[1]);
    value.item = static_cast<int>(PyLong_AsLong(items[2]));
    value.device = static_cast<int>(PyLong_AsLong(items[3]));
    if (PyErr_Occurred()) throw error_already_set();
    return true;
  }
};

template <>
struct type_caster<SeedArgument> {
  PYBIND11_TYPE_CASTER(SeedArgument, const_name("int | torch.Tensor | tuple[int, int, int, int] | None"));

  bool load(handle source, bool convert) {
    if (PyLong_Check(source.ptr())) {
      value.value = PyLong_AsLongLong(source.ptr());
      value.is_value = true;
      if (PyErr_Occurred()) throw error_already_set();
      return true;
    }
    type_caster<Buffer> buffer;
    if (!buffer.load(source, convert)) return false;
    value.buffer = static_cast<Buffer&>(buffer);
    return true;
  }
};

}  // namespace pybind11::detail

namespace {

using fewbit::DType;
using fewbit::Kernels;
using fewbit::OwnedTable;

// -- Checks: std::invalid_argument becomes ValueError -------------------------------------------------------

[[noreturn]] void refuse(const char* what, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(std::string(what) + ": expected " + expected + ", got " + got);
}

void check_size(int64_t n) {
  // With more elements the number of packed words would overflow.
  if (n < 0 || n > INT64_MAX / 16) refuse("n", "a number of elements, 0 or more", std::to_string(n));
}

void check_bits(int bits) {
  if (bits < 1 || bits > fewbit::kMaxBits) refuse("bits", "1 to 8", std::to_string(bits));
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

// The shape of a quantized tensor.
struct QuantizedShape {
  int64_t samples, features;
  int group_size;
  bool fp32_min;
  fewbit::CopyKind kind;

  int64_t elements() const { return samples * features; }

  bool is_rotated() const { return kind != fewbit::CopyKind::uniform; }
};

// The checks of the buffers of one call.
class Entry {
 public:
  // device: the device of all buffers.
  Entry(const char* name, int device) : name_(name), device_(device) {}

  // Returns the address of a buffer of exactly n elements.
  template <class T>
  T* exactly(const char* name, const Buffer& buffer, int64_t n, int item) const {
    if (buffer.count != n || !is_usable(buffer, item)) refuse_buffer(name, buffer, n, item, "");
    return reinterpret_cast<T*>(buffer.address);
  }

  // Returns the address of a buffer that has n elements or more.
  template <class T>
  T* at_least(const char* name, const Buffer& buffer, int64_t n, int item) const {
    if (buffer.count < n || !is_usable(buffer, item)) refuse_buffer(name, buffer, n, item, " or more");
    return reinterpret_cast<T*>(buffer.address);
  }

  // Returns the address of a seed, which is valid as long as the argument exists.
  const int64_t* seed(const char* name, const SeedArgument& seed) const {
    if (!seed.is_value) return exactly<const int64_t>(name, seed.buffer, 1, kInt64);
    if (device_ >= 0) wrong(name, "a tensor" + place_of(device_), "a number");
    return &seed.value;
  }

  // Returns the address of the seed if the table's codes are drawn, else null.
  const int64_t* seed(const OwnedTable& table, const SeedArgument& given) const {
    if (table.get().unbiased()) return seed("seed", given);
    if (given.is_value) wrong("seed", "none, as the table is not unbiased", "a number");
    if (given.buffer.exists) wrong("seed", "none, as the table is not unbiased", described(given.buffer));
    return nullptr;
  }

  // Returns the dtype of a buffer of numbers, and checks that its words can be counted.
  DType floating(const char* name, const Buffer& buffer) const {
    if (!buffer.exists || buffer.item < 0 || buffer.item > 3) {
      wrong(name, "float32, float64, float16 or bfloat16", described(buffer));
    }
    check_size(buffer.count);
    return static_cast<DType>(buffer.item);
  }

  // Returns the same for a kernel that computes in float32.
  DType narrow(const char* name, const Buffer& buffer) const {
    const DType dtype = floating(name, buffer);
    if (dtype == DType::float64) wrong(name, "float32, float16 or bfloat16", described(buffer));
    return dtype;
  }

  // Returns the address of the packed words of n elements.
  uint32_t* packed(const char* name, const Buffer& buffer, int64_t n, int bits) const {
    check_size(n);
    return exactly<uint32_t>(name, buffer, fewbit::packed_words(n, bits), kInt32);
  }

  // Returns the index of vectors of `count` entries over n elements.
  fewbit::VectorIndex index(const char* name, int64_t count, int64_t inner, int64_t n) const {
    if (n > 0 && (count < 1 || inner < 1 || count > n / inner || n % (count * inner) != 0)) {
      wrong(name, "entries * inner to divide the number of elements, " + std::to_string(n),
            std::to_string(count) + " * " + std::to_string(inner));
    }
    return {count, inner};
  }

  // Returns no map if both vectors are None.
  fewbit::Normalization normalization(const Buffer& mean, const Buffer& rstd, int64_t inner, int64_t n) const {
    if (!mean.exists && !rstd.exists) return {};
    const int64_t entries = rstd.exists ? rstd.count : mean.count;
    const auto* scales = exactly<const float>("rstd", rstd, entries, 0);
    return {vector("mean", mean, entries), scales, index("rstd", entries, inner, n)};
  }

  // scattered: true if groups run across samples that do not lie side by side.
  fewbit::ValueMap value_map(const Buffer& mask, const Buffer& scale, const Buffer& shift, int64_t inner, const QuantizedShape& of,
                             bool scattered) const {
    const int64_t n = of.elements();
    const bool is_affine = scale.exists || shift.exists;
    if (mask.exists) {
      if (is_affine) wrong("scale, shift", "none with a mask", "one");
      if (!of.is_rotated()) wrong("mask", "None for uniform copies", described(mask));
      return {nullptr, nullptr, {}, packed("mask", mask, n, 1)};
    }
    if (!is_affine) return {};
    if (scattered) wrong("scale, shift", "none for short samples of several widths", "one");
    const int64_t entries = scale.exists ? scale.count : shift.count;
    return {vector("scale", scale, entries), vector("shift", shift, entries), index("scale", entries, inner, n), nullptr};
  }

  fewbit::Scale scale(const Buffer& buffer, int64_t inner, int64_t n) const {
    if (!buffer.exists) return {};
    return {vector("scale", buffer, buffer.count), index("scale", buffer.count, inner, n)};
  }

  // Returns the grid for n fixed-point codes of `bits` bits.
  fewbit::Grid grid(const Buffer& buffer, int64_t inner, int bits, int64_t n) const {
    check_size(n);
    check_bits(bits);
    const int64_t channels = buffer.count / fewbit::kGridRows;
    if (channels * fewbit::kGridRows != buffer.count) {
      wrong("grid", std::to_string(fewbit::kGridRows) + " rows of float32", described(buffer));
    }
    return {exactly<const float>("grid", buffer, buffer.count, 0), index("grid", channels, inner, n)};
  }

  [[noreturn]] void wrong(const char* what, const std::string& expected, const std::string& got) const {
    refuse((std::string(name_) + ": " + what).c_str(), expected, got);
  }

  static std::string described(const Buffer& buffer) {
    if (!buffer.exists) return "none";
    const bool is_known = buffer.item >= 0 && buffer.item < kItems;
    return std::to_string(buffer.count) + " " + (is_known ? kItemNames[buffer.item] : "of no known dtype") +
           place_of(buffer.device) + (buffer.count > 0 && !buffer.address ? " at no address" : "");
  }

  // Returns the codes of unbiased copies; null for other kinds.
  const float* levels(const Buffer& levels, fewbit::CopyKind kind) const {
    if (!is_unbiased(kind)) return nullptr;
    return exactly<const float>("levels", levels, fewbit::kUnbiasedFloats, 0);
  }

 private:
  bool is_usable(const Buffer& buffer, int item) const {
    return buffer.exists && buffer.item == item && buffer.device == device_ && (buffer.address || buffer.count == 0);
  }

  // Returns null for None.
  const float* vector(const char* name, const Buffer& buffer, int64_t entries) const {
    return buffer.exists ? exactly<const float>(name, buffer, entries, 0) : nullptr;
  }

  static std::string place_of(int device) {
    return device < 0 ? " on the CPU" : " on CUDA device " + std::to_string(device);
  }

  [[noreturn]] void refuse_buffer(const char* name, const Buffer& buffer, int64_t n, int item, const char* more) const {
    wrong(name, std::to_string(n) + " " + kItemNames[item] + more + place_of(device_), described(buffer));
  }

  const char* name_;
  int device_;
};

QuantizedShape quantized_shape(int64_t samples, int64_t features, int group_size, bool fp32_min, int kind) {
  if (samples < 0) refuse("samples", "0 or more", std::to_string(samples));
  if (features < 0) refuse("features", "0 or more", std::to_string(features));
  if (features > 0 && samples > INT64_MAX / 16 / features) {
    refuse("samples", "a number of elements that can be counted",
           std::to_string(samples) + " samples of " + std::to_string(features));
  }
  if (group_size < fewbit::kBlock || group_size > fewbit::kMostGroupSize || group_size % fewbit::kBlock != 0) {
    refuse("group_size", "a multiple of 32 from 32 to 65536", std::to_string(group_size));
  }
  if (kind < 0 || kind > 4) {
    refuse("kind", "0 (uniform), 1 (rotated), 2 (masked), 3 (unbiased) or 4 (masked, unbiased)", std::to_string(kind));
  }
  if (kind != 0 && group_size > fewbit::kFullGroup) {
    refuse("group_size", "at most 256 unless the copy is uniform", std::to_string(group_size));
  }
  return {samples, features, group_size, fp32_min, static_cast<fewbit::CopyKind>(kind)};
}

// The packed codes and ranges of a quantized tensor. For several widths there may be more than needed. After the rows of
// `groups` groups, the ranges of a rotated copy have the rows of its seed.
struct Copy {
  uint32_t* packed;
  uint16_t* ranges;
  int64_t words, groups;
  int columns;

  uint16_t* seed_rows() const { return ranges + groups * columns; }
};

Copy copy_at(const Entry& entry, const Buffer& packed, const Buffer& ranges, const fewbit::Streams& streams,
             bool is_mixed, bool is_rotated) {
  const int columns = fewbit::columns(streams.fp32_min), seed_rows = fewbit::seed_rows(is_rotated);
  const int64_t limits = (streams.groups + seed_rows) * columns;
  if (!is_mixed) {
    return {entry.exactly<uint32_t>("packed", packed, streams.words, kInt32),
            entry.exactly<uint16_t>("ranges", ranges, limits, static_cast<int>(DType::bfloat16)), streams.words,
            streams.groups, columns};
  }
  if (ranges.count % columns) entry.wrong("ranges", std::to_string(columns) + " columns", Entry::described(ranges));
  return {entry.at_least<uint32_t>("packed", packed, streams.words, kInt32),
          entry.at_least<uint16_t>("ranges", ranges, limits, static_cast<int>(DType::bfloat16)), packed.count,
          ranges.count / columns - seed_rows, columns};
}

// The streams of `squares`, which needs no bits.
fewbit::Streams streams_of_squares(const QuantizedShape& shape) {
  return fewbit::one_stream(shape.samples, shape.features, shape.group_size, false, 1);
}

int item_of(DType dtype) { return static_cast<int>(dtype); }

// Chooses the bits of n tensors from their sensitivities and sizes, within a total budget of bits.
void allocate(const Buffer& variances, const Buffer& elements, int64_t budget, int least, int most,
              const Buffer& bits) {
  const Entry entry("allocate", -1);
  const int64_t n = bits.count;
  check_size(n);
  check_bits(least);
  check_bits(most);
  if (least > most) refuse("least", std::to_string(most) + " or less", std::to_string(least));
  const auto* added = entry.exactly<const double>("variances", variances, fewbit::kMaxBits * n, item_of(DType::float64));
  const auto* sizes = entry.exactly<const int64_t>("elements", elements, n, kInt64);
  auto* to = entry.exactly<uint8_t>("bits", bits, n, kUint8);
  py::gil_scoped_release release;
  fewbit::allocate(added, sizes, n, budget, least, most, to);
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

// -- The checked arguments of entries ----------------------------------------------------------------------

struct Codes {
  int64_t n;
  uint8_t* codes;
  uint32_t* packed;
};

Codes codes_at(const Entry& entry, const Buffer& codes, const Buffer& packed, int bits) {
  check_size(codes.count);
  check_bits(bits);
  auto* at = entry.exactly<uint8_t>("codes", codes, codes.count, kUint8);
  return {codes.count, at, entry.packed("packed", packed, codes.count, bits)};
}

// The checked arguments of an entry for an x or a gradient of n elements.
struct Elements {
  DType dtype;
  int64_t n;
  const void* from;
  void* to;
  uint32_t* packed;
  const int64_t* seed;

  int64_t bytes() const { return n * fewbit::item_size(dtype); }
};

Elements encoded(const Entry& entry, const OwnedTable& table, const Buffer& x, const Buffer& packed,
                 const SeedArgument& seed) {
  const DType dtype = entry.floating("x", x);
  const auto* from = entry.exactly<const void>("x", x, x.count, x.item);
  auto* to = entry.packed("packed", packed, x.count, table.get().bits);
  return {dtype, x.count, from, nullptr, to, entry.seed(table, seed)};
}

// A gradient of one element is used for all elements.
Elements multiplied(const Entry& entry, const OwnedTable& table, const Buffer& grad, const Buffer& packed,
                    const Buffer& out) {
  const DType dtype = entry.floating("out", out);
  auto* to = entry.exactly<void>("out", out, out.count, out.item);
  const auto* from = entry.exactly<const void>("grad", grad, grad.count == 1 ? 1 : out.count, out.item);
  auto* codes = entry.packed("packed", packed, out.count, table.get().bits);
  return {dtype, out.count, from, to, codes, nullptr};
}

// The checked arguments of `forward`. name: that of the buffer of packed codes.
Elements activated(const Entry& entry, int function, const OwnedTable& table, const Buffer& x, const Buffer& y,
                   const Buffer& packed, const SeedArgument& seed, const char* name = "packed") {
  check_function(function);
  const DType dtype = entry.narrow("x", x);
  const auto* from = entry.exactly<const void>("x", x, x.count, x.item);
  auto* to = entry.exactly<void>("y", y, x.count, x.item);
  auto* codes = entry.packed(name, packed, x.count, table.get().bits);
  return {dtype, x.count, from, to, codes, entry.seed(table, seed)};
}

// Checks that a buffer has the numbers of a tensor of that shape, and returns their dtype.
DType numbers_of(const Entry& entry, const char* name, const Buffer& buffer, const QuantizedShape& shape) {
  const DType dtype = entry.narrow(name, buffer);
  entry.exactly<void>(name, buffer, shape.elements(), buffer.item);
  return dtype;
}

void check_fixed(const Entry& entry, const Buffer& gamma, const Buffer& beta, int bits, const Buffer& grid) {
  check_size(gamma.count);
  check_bits(bits);
  entry.exactly<float>("gamma", gamma, gamma.count, 0);
  entry.exactly<float>("beta", beta, gamma.count, 0);
  entry.exactly<float>("grid", grid, gamma.count * fewbit::kGridRows, 0);
}

template <class T>
T* address_of(const Buffer& buffer) {
  return reinterpret_cast<T*>(buffer.address);
}

// -- CPU --------------------------------------------------------------------------------------------------

// The CPU kernels of one instruction set, run by several threads.
class Cpu {
 public:
  explicit Cpu(const std::string& isa) : kernels_(fewbit::kernels_of(isa)) {
    if (kernels_) return;
    std::string names;
    for (const std::string& name : fewbit::cpu_isas()) names += (names.empty() ? "" : ", ") + name;
    refuse("isa", "one of " + names, isa);
  }

  std::string isa() const { return kernels_->isa; }

  void pack(const Buffer& codes, int bits, const Buffer& packed, int threads) const {
    const Codes of = codes_at(Entry("pack", kDevice), codes, packed, bits);
    fewbit::will_write(of.packed, packed_bytes(of.n, bits));
    run(of.n, threads, [=](int64_t begin, int64_t end) { kernels_->pack(of.codes, begin, end, bits, of.packed); });
  }

  void unpack(const Buffer& packed, int bits, const Buffer& codes, int threads) const {
    const Codes of = codes_at(Entry("unpack", kDevice), codes, packed, bits);
    fewbit::will_write(of.codes, of.n);
    run(of.n, threads, [=](int64_t begin, int64_t end) { kernels_->unpack(of.packed, begin, end, bits, of.codes); });
  }

  void encode(const OwnedTable& table, const Buffer& x, const Buffer& packed, const SeedArgument& seed, int threads) const {
    const Elements of = encoded(Entry("encode", kDevice), table, x, packed, seed);
    const uint64_t key = seed_at(of.seed);
    fewbit::will_write(of.packed, packed_bytes(of.n, table.get().bits));
    run(of.n, threads, [=, &table](int64_t begin, int64_t end) {
      kernels_->encode(table.get(), of.from, of.dtype, begin, end, of.packed, key);
    });
  }

  void decode_mul(const OwnedTable& table, const Buffer& grad, const Buffer& packed, const Buffer& out,
                  int threads) const {
    const Elements of = multiplied(Entry("decode_mul", kDevice), table, grad, packed, out);
    const bool is_scalar = grad.count != of.n;
    fewbit::will_write(of.to, of.bytes());
    run(of.n, threads, [=, &table](int64_t begin, int64_t end) {
      kernels_->decode_mul(table.get(), of.from, of.dtype, begin, end, of.packed, of.to, is_scalar);
    });
  }

  void forward(int function, double p0, double p1, const OwnedTable& table, const Buffer& x, const Buffer& y,
               const Buffer& packed, const SeedArgument& seed, int threads) const {
    const Elements of = activated(Entry("forward", kDevice), function, table, x, y, packed, seed);
    const uint64_t key = seed_at(of.seed);
    fewbit::will_write(of.to, of.bytes());
    fewbit::will_write(of.packed, packed_bytes(of.n, table.get().bits));
    run(of.n, threads, [=, &table](int64_t begin, int64_t end) {
      kernels_->forward(function, p0, p1, table.get(), of.from, of.dtype, begin, end, of.to, of.packed, key);
    });
  }

  std::pair<float, float> quantize(const Buffer& x, int64_t samples, int64_t features, int group_size, int bits,
                                   const Buffer& widths, bool fp32_min, int kind, const SeedArgument& seed,
                                   const Buffer& levels, const Buffer& packed, const Buffer& ranges, int threads,
                                   const Buffer& mean, const Buffer& rstd, int64_t inner) const {
    const Entry entry("quantize", kDevice);
    const QuantizedShape shape = quantized_shape(samples, features, group_size, fp32_min, kind);
    const DType dtype = numbers_of(entry, "x", x, shape);
    const auto normalization = entry.normalization(mean, rstd, inner, shape.elements());
    const fewbit::Coding coding(seed_at(entry.seed("seed", seed)), entry.levels(levels, shape.kind));
    check_threads(threads);
    const fewbit::StreamPlan plan = plan_of(entry, shape, bits, widths);
    const Copy copy = copy_at(entry, packed, ranges, plan.streams, widths.exists, shape.is_rotated());
    py::gil_scoped_release release;
    const fewbit::Extent extent = fewbit::quantize(*kernels_, shape.kind, plan, address_of<const void>(x), dtype,
                                                   normalization, coding, copy.packed, copy.ranges, threads);
    // When memory was allocated, only a bound on the number of words was known, so some may be left over.
    std::fill(copy.packed + plan.streams.words, copy.packed + copy.words, 0u);
    std::fill(copy.ranges + plan.streams.groups * copy.columns, copy.seed_rows(), uint16_t{0});
    if (shape.is_rotated()) fewbit::store_seed(coding.seed, fp32_min, copy.seed_rows());
    return {extent.least, extent.greatest};
  }

  void squares(const Buffer& x, int64_t samples, int64_t features, int group_size, int kind, const Buffer& out,
               int threads, const Buffer& mean, const Buffer& rstd, int64_t inner) const {
    const Entry entry("squares", kDevice);
    const QuantizedShape shape = quantized_shape(samples, features, group_size, false, kind);
    const DType dtype = numbers_of(entry, "x", x, shape);
    const auto normalization = entry.normalization(mean, rstd, inner, shape.elements());
    check_threads(threads);
    const fewbit::Streams streams = streams_of_squares(shape);
    auto* to = entry.exactly<float>("out", out, streams.groups, 0);
    py::gil_scoped_release release;
    fewbit::squares(*kernels_, shape.kind, streams, address_of<const void>(x), dtype, normalization, to, threads);
  }

  // Returns None and does nothing if the threads' shares would cut a group.
  std::optional<std::pair<float, float>> forward_quantized(
      int function, double p0, double p1, const OwnedTable& table, const Buffer& x, int64_t samples, int64_t features,
      const Buffer& y, const Buffer& codes, const SeedArgument& seed, int group_size, int bits, bool fp32_min,
      int kind, const SeedArgument& quantizer_seed, const Buffer& levels, const Buffer& packed, const Buffer& ranges,
      int threads) const {
    const Entry entry("forward_quantized", kDevice);
    const QuantizedShape shape = quantized_shape(samples, features, group_size, fp32_min, kind);
    const Elements of = activated(entry, function, table, x, y, codes, seed, "codes");
    numbers_of(entry, "x", x, shape);
    check_threads(threads);
    const fewbit::Coding coding(seed_at(entry.seed("quantizer_seed", quantizer_seed)), entry.levels(levels, shape.kind));
    const fewbit::StreamPlan plan = plan_of(entry, shape, bits, {});
    const Copy copy = copy_at(entry, packed, ranges, plan.streams, false, shape.is_rotated());
    const fewbit::Forward forward{function, p0,    p1,        &table.get(),    of.from,
                                  of.dtype, of.to, of.packed, seed_at(of.seed)};
    if (fewbit::threads_of_forward(plan.streams, threads) < fewbit::threads_for(of.n, threads)) return std::nullopt;
    py::gil_scoped_release release;
    const fewbit::Extent extent = fewbit::forward_quantized(*kernels_, shape.kind, plan.streams, forward, coding,
                                                            copy.packed, copy.ranges, threads);
    if (shape.is_rotated()) fewbit::store_seed(coding.seed, fp32_min, copy.seed_rows());
    return std::pair(extent.least, extent.greatest);
  }

  void dequantize(const Buffer& packed, const Buffer& ranges, int bits, const Buffer& widths, bool fp32_min,
                  int kind, const Buffer& levels, int64_t samples, int64_t features, int group_size, const Buffer& out,
                  int threads, const Buffer& scale, const Buffer& shift, int64_t inner, const Buffer& mask) const {
    const Entry entry("dequantize", kDevice);
    const QuantizedShape shape = quantized_shape(samples, features, group_size, fp32_min, kind);
    const DType dtype = numbers_of(entry, "out", out, shape);
    const bool scattered = widths.exists && features < fewbit::kLeastFeatures;
    const auto value_map = entry.value_map(mask, scale, shift, inner, shape, scattered);
    check_threads(threads);
    const fewbit::StreamPlan plan = plan_of(entry, shape, bits, widths);
    const Copy copy = copy_at(entry, packed, ranges, plan.streams, widths.exists, shape.is_rotated());
    const float* const codes = entry.levels(levels, shape.kind);
    py::gil_scoped_release release;
    const fewbit::Coding coding(shape.is_rotated() ? fewbit::load_seed(copy.seed_rows()) : 0, codes);
    fewbit::dequantize(*kernels_, shape.kind, plan, copy.packed, copy.ranges, coding, value_map, address_of<void>(out),
                       dtype, threads);
  }

  void grid_fixed(const Buffer& gamma, const Buffer& beta, int bits, const Buffer& grid, int) const {
    check_fixed(Entry("grid_fixed", kDevice), gamma, beta, bits, grid);
    const auto *scales = address_of<const float>(gamma), *shifts = address_of<const float>(beta);
    auto* to = address_of<float>(grid);
    for (int64_t i = 0; i < gamma.count; ++i) fewbit::make_column(scales[i], shifts[i], bits, to, i, gamma.count);
  }

  void encode_fixed(const Buffer& x, const Buffer& y, const Buffer& grid, int64_t inner, int bits,
                    const Buffer& packed, int threads, const Buffer& mean, const Buffer& rstd,
                    int64_t inner_of_entries) const {
    const Entry entry("encode_fixed", kDevice);
    const DType dtype = entry.floating("x", x);
    const int64_t n = x.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto normalization = entry.normalization(mean, rstd, inner_of_entries, n);
    const auto* from = entry.exactly<const void>("x", x, n, x.item);
    const auto* result = entry.exactly<const void>("y", y, n, x.item);
    auto* to = entry.packed("packed", packed, n, bits);
    fewbit::will_write(to, packed_bytes(n, bits));
    run(n, threads, [=](int64_t begin, int64_t end) {
      kernels_->fixed_point->encode(by, normalization, from, result, dtype, bits, begin, end, to);
    });
  }

  void decode_fixed(const Buffer& packed, const Buffer& grid, int64_t inner, int bits, bool activated, float slope,
                    const Buffer& out, int threads, const Buffer& scale, int64_t inner_of_entries) const {
    const Entry entry("decode_fixed", kDevice);
    const DType dtype = entry.floating("out", out);
    const int64_t n = out.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto times = entry.scale(scale, inner_of_entries, n);
    const auto* codes = entry.packed("packed", packed, n, bits);
    auto* to = entry.exactly<void>("out", out, n, out.item);
    fewbit::will_write(to, n * fewbit::item_size(dtype));
    run(n, threads, [=](int64_t begin, int64_t end) {
      kernels_->fixed_point->decode(by, times, codes, bits, begin, end, activated, slope, to, dtype);
    });
  }

  void mask_fixed(const Buffer& grad, const Buffer& packed, const Buffer& grid, int64_t inner, int bits, double slope,
                  const Buffer& out, int threads) const {
    const Entry entry("mask_fixed", kDevice);
    const DType dtype = entry.floating("grad", grad);
    const int64_t n = grad.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto* from = entry.exactly<const void>("grad", grad, n, grad.item);
    const auto* codes = entry.packed("packed", packed, n, bits);
    auto* to = entry.exactly<void>("out", out, n, grad.item);
    fewbit::will_write(to, n * fewbit::item_size(dtype));
    run(n, threads, [=](int64_t begin, int64_t end) {
      kernels_->fixed_point->mask(by, codes, bits, begin, end, slope, from, to, dtype);
    });
  }

 private:
  static constexpr int kDevice = -1;

  // Returns the streams of a tensor whose samples all have `bits`, or each its own width.
  static fewbit::StreamPlan plan_of(const Entry& entry, const QuantizedShape& shape, int bits, const Buffer& widths) {
    const uint8_t* widths_of = nullptr;
    if (widths.exists) {
      widths_of = entry.exactly<const uint8_t>("widths", widths, shape.samples, kUint8);
      for (int64_t i = 0; i < shape.samples; ++i) check_bits(widths_of[i]);
    } else {
      check_bits(bits);
    }
    return fewbit::plan_streams(shape.samples, shape.features, shape.group_size, shape.fp32_min, bits, widths_of);
  }

  static int64_t packed_bytes(int64_t n, int bits) {
    return fewbit::packed_words(n, bits) * static_cast<int64_t>(sizeof(uint32_t));
  }

  static uint64_t seed_at(const int64_t* address) { return address ? static_cast<uint64_t>(*address) : 0; }

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
// The CUDA kernels. Entries make the same checks and then launch on the caller's stream.
struct Cuda {
  void pack(const Buffer& codes, int bits, const Buffer& packed, int device, uintptr_t stream) const {
    const Codes of = codes_at(Entry("pack", device), codes, packed, bits);
    py::gil_scoped_release release;
    fewbit::cuda::pack(of.codes, of.n, bits, words_at(of.packed), device, stream_at(stream));
  }

  void unpack(const Buffer& packed, int bits, const Buffer& codes, int device, uintptr_t stream) const {
    const Codes of = codes_at(Entry("unpack", device), codes, packed, bits);
    py::gil_scoped_release release;
    fewbit::cuda::unpack(words_at(of.packed), of.n, bits, of.codes, device, stream_at(stream));
  }

  void encode(const OwnedTable& table, const Buffer& x, const Buffer& packed, const SeedArgument& seed, int device,
              uintptr_t stream) const {
    const Elements of = encoded(Entry("encode", device), table, x, packed, seed);
    py::gil_scoped_release release;
    fewbit::cuda::encode(table.get(), of.from, item_of(of.dtype), of.n, words_at(of.packed), of.seed, device,
                         stream_at(stream));
  }

  void decode_mul(const OwnedTable& table, const Buffer& grad, const Buffer& packed, const Buffer& out, int device,
                  uintptr_t stream) const {
    const Elements of = multiplied(Entry("decode_mul", device), table, grad, packed, out);
    const bool is_scalar = grad.count != of.n;
    py::gil_scoped_release release;
    fewbit::cuda::decode_mul(table.get(), of.from, item_of(of.dtype), of.n, words_at(of.packed), of.to, is_scalar,
                             device, stream_at(stream));
  }

  void forward(int function, double p0, double p1, const OwnedTable& table, const Buffer& x, const Buffer& y,
               const Buffer& packed, const SeedArgument& seed, int device, uintptr_t stream) const {
    const Elements of = activated(Entry("forward", device), function, table, x, y, packed, seed);
    py::gil_scoped_release release;
    fewbit::cuda::forward(function, p0, p1, table.get(), of.from, item_of(of.dtype), of.n, of.to, words_at(of.packed),
                          of.seed, device, stream_at(stream));
  }

  // Returns false and does nothing if the kernel does not fit.
  bool relu_quantized(const Buffer& x, int64_t samples, int64_t features, const Buffer& y, const Buffer& mask, int group_size,
                      int bits, bool fp32_min, const SeedArgument& seed, const Buffer& packed, const Buffer& ranges, int device,
                      uintptr_t stream) const {
    const Entry entry("relu_quantized", device);
    const QuantizedShape shape =
        quantized_shape(samples, features, group_size, fp32_min, static_cast<int>(fewbit::CopyKind::masked));
    const DType dtype = numbers_of(entry, "x", x, shape);
    auto* result = entry.exactly<void>("y", y, x.count, x.item);
    auto* bits_of_mask = entry.packed("mask", mask, x.count, 1);
    const int64_t* const address = seed.is_value ? nullptr : entry.seed("seed", seed);
    const auto [of, copy] = quantized(entry, shape, bits, {}, {}, packed, ranges);
    py::gil_scoped_release release;
    return fewbit::cuda::relu_quantized(of, address_of<const void>(x), item_of(dtype), {address, seed.value}, result,
                                        words_at(bits_of_mask), words_at(copy.packed), copy.ranges, device, stream_at(stream));
  }

  // Returns false and does nothing if the kernels do not support these arguments. out: none if only the gradients of weight and bias are computed.
  bool batch_norm_backward(const Buffer& packed, const Buffer& ranges, int bits, bool fp32_min, int64_t samples, int64_t features,
                           int group_size, const Buffer& grad, const Buffer& rstd, const Buffer& weight, const Buffer& memory,
                           const Buffer& out, const Buffer& grad_weight, const Buffer& grad_bias, int device,
                           uintptr_t stream) const {
    const Entry entry("batch_norm_backward", device);
    const QuantizedShape shape =
        quantized_shape(samples, features, group_size, fp32_min, static_cast<int>(fewbit::CopyKind::rotated));
    const DType dtype = numbers_of(entry, "grad", grad, shape);
    const int64_t n = rstd.count;
    const auto floats = [&](const char* name, const Buffer& buffer, int64_t count) {
      return entry.exactly<float>(name, buffer, count, 0);
    };
    const fewbit::cuda::BatchNorm norm = {n,
                                          floats("rstd", rstd, n),
                                          weight.exists ? floats("weight", weight, n) : nullptr,
                                          floats("grad_weight", grad_weight, n),
                                          floats("grad_bias", grad_bias, n),
                                          floats("memory", memory, fewbit::cuda::batch_norm_floats(n))};
    auto* to = out.exists ? entry.exactly<void>("out", out, grad.count, grad.item) : nullptr;
    const auto [of, copy] = quantized(entry, shape, bits, {}, {}, packed, ranges);
    py::gil_scoped_release release;
    return fewbit::cuda::batch_norm_backward(of, norm, words_at(copy.packed), copy.ranges, address_of<const void>(grad),
                                             item_of(dtype), to, device, stream_at(stream));
  }

  void quantize(const Buffer& x, int64_t samples, int64_t features, int group_size, int bits, const Buffer& order,
                const Buffer& counts, bool fp32_min, int kind, const SeedArgument& seed, const Buffer& levels,
                const Buffer& packed, const Buffer& ranges, int device, uintptr_t stream, const Buffer& mean, const Buffer& rstd,
                int64_t inner) const {
    const Entry entry("quantize", device);
    const QuantizedShape shape = quantized_shape(samples, features, group_size, fp32_min, kind);
    const DType dtype = numbers_of(entry, "x", x, shape);
    const auto normalization = entry.normalization(mean, rstd, inner, shape.elements());
    const int64_t* const address = seed.is_value ? nullptr : entry.seed("seed", seed);
    const fewbit::cuda::Seed key = {address, seed.value};
    const auto [of, copy] = quantized(entry, shape, bits, order, counts, packed, ranges);
    const float* const codes = entry.levels(levels, shape.kind);
    py::gil_scoped_release release;
    const auto* from = address_of<const void>(x);
    if (shape.kind == fewbit::CopyKind::uniform) {
      fewbit::cuda::quantize(of, from, item_of(dtype), normalization, key, words_at(copy.packed), copy.ranges, device,
                             stream_at(stream));
    } else if (is_unbiased(shape.kind)) {
      fewbit::cuda::quantize_unbiased(of, is_masked(shape.kind), codes, from, item_of(dtype), normalization, key, words_at(copy.packed),
                                      copy.ranges, device, stream_at(stream));
    } else {
      fewbit::cuda::quantize_rotated(of, is_masked(shape.kind), from, item_of(dtype), normalization, key,
                                     words_at(copy.packed), copy.ranges, device, stream_at(stream));
    }
  }

  void share_bits(const Buffer& squares, int64_t extra, const std::vector<float>& gains, const Buffer& widths, int device,
                  uintptr_t stream) const {
    const Entry entry("share_bits", device);
    const int64_t samples = widths.count;
    const auto* from = entry.exactly<const float>("squares", squares, samples, 0);
    auto* to = entry.exactly<uint8_t>("widths", widths, samples, kUint8);
    fewbit::cuda::Gains by;
    if (gains.size() != std::size(by.of)) refuse("gains", "7 numbers", std::to_string(gains.size()));
    if (extra < 0 || extra > samples * static_cast<int64_t>(gains.size())) {
      refuse("extra", "a number of bits from 0 to 7 a sample", std::to_string(extra));
    }
    std::copy(gains.begin(), gains.end(), by.of);
    py::gil_scoped_release release;
    fewbit::cuda::share_bits(by, from, samples, extra, to, device, stream_at(stream));
  }

  void order_samples(const Buffer& widths, const Buffer& order, const Buffer& counts, int device,
                     uintptr_t stream) const {
    const Entry entry("order_samples", device);
    const auto* from = entry.exactly<const uint8_t>("widths", widths, order.count, kUint8);
    auto* to = entry.exactly<int64_t>("order", order, order.count, kInt64);
    auto* found = entry.exactly<int64_t>("counts", counts, fewbit::kMaxBits + 1, kInt64);
    py::gil_scoped_release release;
    fewbit::cuda::order_samples(from, order.count, to, found, device, stream_at(stream));
  }

  void squares(const Buffer& x, int64_t samples, int64_t features, int group_size, int kind, const Buffer& out,
               int device, uintptr_t stream, const Buffer& mean, const Buffer& rstd, int64_t inner) const {
    const Entry entry("squares", device);
    const QuantizedShape shape = quantized_shape(samples, features, group_size, false, kind);
    const DType dtype = numbers_of(entry, "x", x, shape);
    const auto normalization = entry.normalization(mean, rstd, inner, shape.elements());
    const fewbit::Streams streams = streams_of_squares(shape);
    auto* to = entry.exactly<float>("out", out, streams.groups, 0);
    py::gil_scoped_release release;
    const auto* from = address_of<const void>(x);
    if (shape.kind == fewbit::CopyKind::uniform) {
      fewbit::cuda::squares(streams, from, item_of(dtype), normalization, to, device, stream_at(stream));
    } else {
      fewbit::cuda::squares_rotated(streams, is_masked(shape.kind), from, item_of(dtype), normalization, to,
                                    device, stream_at(stream));
    }
  }

  void dequantize(const Buffer& packed, const Buffer& ranges, int bits, const Buffer& order, const Buffer& counts,
                  bool fp32_min, int kind, const Buffer& levels, int64_t samples, int64_t features, int group_size,
                  const Buffer& out, int device, uintptr_t stream, const Buffer& scale, const Buffer& shift, int64_t inner,
                  const Buffer& mask) const {
    const Entry entry("dequantize", device);
    const QuantizedShape shape = quantized_shape(samples, features, group_size, fp32_min, kind);
    const DType dtype = numbers_of(entry, "out", out, shape);
    const bool scattered = counts.exists && features < fewbit::kLeastFeatures;
    const auto value_map = entry.value_map(mask, scale, shift, inner, shape, scattered);
    const auto [of, copy] = quantized(entry, shape, bits, order, counts, packed, ranges);
    const float* const codes = entry.levels(levels, shape.kind);
    py::gil_scoped_release release;
    if (is_unbiased(shape.kind)) {
      fewbit::cuda::dequantize_unbiased(of, codes, words_at(copy.packed), copy.ranges, value_map, address_of<void>(out),
                                        item_of(dtype), device, stream_at(stream));
      return;
    }
    const auto dequantize = shape.is_rotated() ? fewbit::cuda::dequantize_rotated : fewbit::cuda::dequantize;
    dequantize(of, words_at(copy.packed), copy.ranges, value_map, address_of<void>(out), item_of(dtype), device,
               stream_at(stream));
  }

  void grid_fixed(const Buffer& gamma, const Buffer& beta, int bits, const Buffer& grid, int device,
                  uintptr_t stream) const {
    check_fixed(Entry("grid_fixed", device), gamma, beta, bits, grid);
    py::gil_scoped_release release;
    fewbit::cuda::grid_fixed(address_of<const float>(gamma), address_of<const float>(beta), gamma.count, bits,
                             address_of<float>(grid), device, stream_at(stream));
  }

  void encode_fixed(const Buffer& x, const Buffer& y, const Buffer& grid, int64_t inner, int bits,
                    const Buffer& packed, int device, uintptr_t stream, const Buffer& mean, const Buffer& rstd,
                    int64_t inner_of_entries) const {
    const Entry entry("encode_fixed", device);
    const DType dtype = entry.floating("x", x);
    const int64_t n = x.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto normalization = entry.normalization(mean, rstd, inner_of_entries, n);
    const auto* from = entry.exactly<const void>("x", x, n, x.item);
    const auto* result = entry.exactly<const void>("y", y, n, x.item);
    auto* to = entry.packed("packed", packed, n, bits);
    py::gil_scoped_release release;
    fewbit::cuda::encode_fixed(by, normalization, from, result, item_of(dtype), n, bits, words_at(to), device,
                               stream_at(stream));
  }

  void decode_fixed(const Buffer& packed, const Buffer& grid, int64_t inner, int bits, bool activated, float slope,
                    const Buffer& out, int device, uintptr_t stream, const Buffer& scale,
                    int64_t inner_of_entries) const {
    const Entry entry("decode_fixed", device);
    const DType dtype = entry.floating("out", out);
    const int64_t n = out.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto times = entry.scale(scale, inner_of_entries, n);
    auto* codes = entry.packed("packed", packed, n, bits);
    auto* to = entry.exactly<void>("out", out, n, out.item);
    py::gil_scoped_release release;
    fewbit::cuda::decode_fixed(by, times, words_at(codes), n, bits, activated, slope, to, item_of(dtype), device,
                               stream_at(stream));
  }

  void mask_fixed(const Buffer& grad, const Buffer& packed, const Buffer& grid, int64_t inner, int bits, double slope,
                  const Buffer& out, int device, uintptr_t stream) const {
    const Entry entry("mask_fixed", device);
    const DType dtype = entry.floating("grad", grad);
    const int64_t n = grad.count;
    const auto by = entry.grid(grid, inner, bits, n);
    const auto* from = entry.exactly<const void>("grad", grad, n, grad.item);
    auto* codes = entry.packed("packed", packed, n, bits);
    auto* to = entry.exactly<void>("out", out, n, grad.item);
    py::gil_scoped_release release;
    fewbit::cuda::mask_fixed(by, words_at(codes), n, bits, slope, from, to, item_of(dtype), device,
                             stream_at(stream));
  }

 private:
  // Only the device knows the widths, so the kernel checks that words and groups suffice.
  static std::pair<fewbit::cuda::Quantized, Copy> quantized(const Entry& entry, const QuantizedShape& shape, int bits,
                                                            const Buffer& order, const Buffer& counts,
                                                            const Buffer& packed, const Buffer& ranges) {
    check_bits(bits);
    const bool is_mixed = order.exists || counts.exists;
    fewbit::Streams streams = fewbit::one_stream(shape.samples, shape.features, shape.group_size, shape.fp32_min, bits);
    const int64_t *samples = nullptr, *widths = nullptr;
    if (is_mixed) {
      samples = entry.exactly<const int64_t>("order", order, shape.samples, kInt64);
      widths = entry.exactly<const int64_t>("counts", counts, fewbit::kMaxBits + 1, kInt64);
      streams.words = streams.groups = 0;
    }
    const Copy copy = copy_at(entry, packed, ranges, streams, is_mixed, shape.is_rotated());
    return {{shape.samples, shape.features, shape.group_size, shape.fp32_min, bits, samples, widths, copy.words,
             copy.groups},
            copy};
  }

  static int32_t* words_at(uint32_t* packed) { return reinterpret_cast<int32_t*>(packed); }

  static void* stream_at(uintptr_t address) { return reinterpret_cast<void*>(address); }
};

void bind_cuda(py::module_& module) {
  py::class_<Cuda> cuda(module, "Cuda", "The kernels for CUDA devices. Buffers are as for Cpu; stream_ptr: a cudaStream_t.");
  cuda.def_property_readonly_static("runtime_version", [](const py::object&) { return fewbit::cuda::runtime_version(); })
      .def_property_readonly_static("architectures",
                                    [](const py::object&) { return py::tuple(py::cast(fewbit::cuda::architectures())); })
      .def("available", [](const Cuda&, int device) { return fewbit::cuda::available(device); },
           py::arg("device") = -1,
           "Return (usable, reason if not) for the kernels on this machine.")
      .def("pack", &Cuda::pack, py::arg("codes"), py::arg("bits"), py::arg("packed"),
           py::arg("device_index"), py::arg("stream_ptr"))
      .def("unpack", &Cuda::unpack, py::arg("packed"), py::arg("bits"), py::arg("codes"),
           py::arg("device_index"), py::arg("stream_ptr"))
      .def("encode", &Cuda::encode, py::arg("table"), py::arg("x"), py::arg("packed"), py::arg("seed"),
           py::arg("device_index"), py::arg("stream_ptr"))
      .def("decode_mul", &Cuda::decode_mul, py::arg("table"), py::arg("grad"), py::arg("packed"),
           py::arg("out"), py::arg("device_index"), py::arg("stream_ptr"))
      .def("forward", &Cuda::forward, py::arg("function"), py::arg("p0"), py::arg("p1"), py::arg("table"),
           py::arg("x"), py::arg("y"), py::arg("packed"), py::arg("seed"), py::arg("device_index"),
           py::arg("stream_ptr"))
      .def("quantize", &Cuda::quantize, py::arg("x"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("bits"), py::arg("order"), py::arg("counts"), py::arg("fp32_min"),
           py::arg("kind"), py::arg("seed"), py::arg("levels"), py::arg("packed"), py::arg("ranges"), py::arg("device_index"),
           py::arg("stream_ptr"), py::arg("mean") = py::none(), py::arg("rstd") = py::none(), py::arg("inner")
           = 1)
      .def("share_bits", &Cuda::share_bits, py::arg("squares"), py::arg("extra"), py::arg("gains"), py::arg("widths"),
           py::arg("device_index"), py::arg("stream_ptr"))
      .def("relu_quantized", &Cuda::relu_quantized, py::arg("x"), py::arg("samples"), py::arg("features"),
           py::arg("y"), py::arg("mask"), py::arg("group_size"), py::arg("bits"), py::arg("fp32_min"), py::arg("seed"),
           py::arg("packed"), py::arg("ranges"), py::arg("device_index"), py::arg("stream_ptr"))
      .def("batch_norm_backward", &Cuda::batch_norm_backward, py::arg("packed"), py::arg("ranges"), py::arg("bits"),
           py::arg("fp32_min"), py::arg("samples"), py::arg("features"), py::arg("group_size"), py::arg("grad"),
           py::arg("rstd"), py::arg("weight"), py::arg("memory"), py::arg("out"), py::arg("grad_weight"), py::arg("grad_bias"),
           py::arg("device_index"), py::arg("stream_ptr"))
      .def("batch_norm_floats", [](const Cuda&, int64_t channels) { return fewbit::cuda::batch_norm_floats(channels); },
           py::arg("channels"), "Return the number of float32 in the argument `memory` of batch_norm_backward.")
      .def("order_samples", &Cuda::order_samples, py::arg("widths"), py::arg("order"), py::arg("counts"),
           py::arg("device_index"), py::arg("stream_ptr"))
      .def("squares", &Cuda::squares, py::arg("x"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("kind"), py::arg("out"), py::arg("device_index"),
           py::arg("stream_ptr"), py::arg("mean") = py::none(), py::arg("rstd") = py::none(), py::arg("inner") = 1)
      .def("dequantize", &Cuda::dequantize, py::arg("packed"), py::arg("ranges"), py::arg("bits"),
           py::arg("order"), py::arg("counts"), py::arg("fp32_min"), py::arg("kind"), py::arg("levels"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("out"), py::arg("device_index"), py::arg("stream_ptr"),
           py::arg("scale") = py::none(), py::arg("shift") = py::none(), py::arg("inner") = 1, py::arg("mask") = py::none())
      .def("grid_fixed", &Cuda::grid_fixed, py::arg("gamma"), py::arg("beta"), py::arg("bits"),
           py::arg("grid"), py::arg("device_index"), py::arg("stream_ptr"))
      .def("encode_fixed", &Cuda::encode_fixed, py::arg("x"), py::arg("y"), py::arg("grid"),
           py::arg("inner"), py::arg("bits"), py::arg("packed"), py::arg("device_index"),
           py::arg("stream_ptr"), py::arg("mean") = py::none(), py::arg("rstd") = py::none(),
           py::arg("inner_of_entries") = 1)
      .def("decode_fixed", &Cuda::decode_fixed, py::arg("packed"), py::arg("grid"), py::arg("inner"),
           py::arg("bits"), py::arg("activated"), py::arg("slope"), py::arg("out"), py::arg("device_index"),
           py::arg("stream_ptr"), py::arg("scale") = py::none(), py::arg("inner_of_entries") = 1)
      .def("mask_fixed", &Cuda::mask_fixed, py::arg("grad"), py::arg("packed"), py::arg("grid"),
           py::arg("inner"), py::arg("bits"), py::arg("slope"), py::arg("out"), py::arg("device_index"),
           py::arg("stream_ptr"));
  module.attr("cuda") = py::cast(Cuda{});
}
#endif

py::dict functions() {
  py::dict result;
  int number = 0;
  for (const fewbit::FunctionInfo& function : fewbit::fused_functions()) {
    result[function.name] = py::make_tuple(number++, function.n_parameters);
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(_kernels, module) {
  module.doc() =
      "Compiled kernels. A buffer is a dense tensor, or (address, number of elements, position of their dtype in DTYPES, index of "
      "their CUDA device or -1), or None; an entry raises ValueError if a buffer is not of the size that it reads or writes.";

  module.def(
      "use_tensors",
      [](const py::dict& dtypes, const py::function& check_dense) {
        tensors = {dtypes.inc_ref().ptr(), check_dense.inc_ref().ptr()};
      },
      py::arg("dtypes"), py::arg("check_dense"),
      "Let entries take tensors. dtypes: {dtype: position in DTYPES}. check_dense(tensor) raises ValueError unless a tensor is "
      "dense.");

  py::class_<OwnedTable>(module, "Table", "A table's constants, checked and copied (fewbit.runtime.format.encoding).")
      .def(py::init(&make_table), py::arg("bits"), py::arg("initial"), py::arg("breaks32"), py::arg("flips32"),
           py::arg("breaks64"), py::arg("flips64"), py::arg("lut32"), py::arg("lut64"),
           py::arg("points") = py::none(), py::arg("origins") = py::none(), py::arg("values") = py::none(),
           py::arg("slopes") = py::none(), py::arg("levels") = py::none(), py::arg("inverse_gaps") = py::none())
      .def_property_readonly("bits", [](const OwnedTable& table) { return table.get().bits; })
      .def_property_readonly("unbiased", [](const OwnedTable& table) { return table.get().unbiased(); });

  py::class_<Cpu>(module, "Cpu", "The kernels of one instruction set, one of cpu_isas().")
      .def(py::init<const std::string&>(), py::arg("isa"))
      .def_property_readonly("isa", &Cpu::isa)
      .def("pack", &Cpu::pack, py::arg("codes"), py::arg("bits"), py::arg("packed"), py::arg("threads"),
           "Pack n uint8 codes to bits * ceil(n / 32) int32 words.")
      .def("unpack", &Cpu::unpack, py::arg("packed"), py::arg("bits"), py::arg("codes"),
           py::arg("threads"),
           "Unpack words to n uint8 codes.")
      .def("encode", &Cpu::encode, py::arg("table"), py::arg("x"), py::arg("packed"), py::arg("seed"),
           py::arg("threads"),
           "Encode x to packed codes.")
      .def("decode_mul", &Cpu::decode_mul, py::arg("table"), py::arg("grad"), py::arg("packed"),
           py::arg("out"), py::arg("threads"),
           "Compute out = level of the code * grad, rounded once. out may be grad. A grad of one element is used "
           "for all.")
      .def("forward", &Cpu::forward, py::arg("function"), py::arg("p0"), py::arg("p1"), py::arg("table"),
           py::arg("x"), py::arg("y"), py::arg("packed"), py::arg("seed"), py::arg("threads"),
           "Compute y = f(x) and the packed codes of x. y may be x.")
      .def("forward_quantized", &Cpu::forward_quantized, py::arg("function"), py::arg("p0"),
           py::arg("p1"), py::arg("table"), py::arg("x"), py::arg("samples"), py::arg("features"),
           py::arg("y"), py::arg("codes"), py::arg("seed"), py::arg("group_size"), py::arg("bits"),
           py::arg("fp32_min"), py::arg("kind"), py::arg("quantizer_seed"), py::arg("levels"), py::arg("packed"), py::arg("ranges"), py::arg("threads"),
           "Run forward, with its codes in `codes`, and quantize on y, in one pass. Return None and do nothing if "
           "threads would have to share groups.")
      .def("quantize", &Cpu::quantize, py::arg("x"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("bits"), py::arg("widths"), py::arg("fp32_min"), py::arg("kind"),
           py::arg("seed"), py::arg("levels"), py::arg("packed"), py::arg("ranges"), py::arg("threads"), py::arg("mean") = py::none(),
           py::arg("rstd") = py::none(), py::arg("inner") = 1,
           "Quantize x to packed codes and ranges, and return its (least, greatest) element. widths: a uint8 for each "
           "sample, or None: bits for all. kind: 0 (uniform), 1 (rotated), 2 (masked), 3 (unbiased) or 4 (masked, unbiased). levels: the codes of "
           "unbiased copies, or None for other kinds. mean, rstd: float32, or None; element e is (x - mean[i]) rstd[i], i = e / inner "
           "% their length.")
      .def("squares", &Cpu::squares, py::arg("x"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("kind"), py::arg("out"), py::arg("threads"), py::arg("mean") = py::none(),
           py::arg("rstd") = py::none(), py::arg("inner") = 1,
           "Compute length * range^2 of each group in float32, or its energy in a rotated copy. mean, rstd as in quantize.")
      .def("dequantize", &Cpu::dequantize, py::arg("packed"), py::arg("ranges"), py::arg("bits"),
           py::arg("widths"), py::arg("fp32_min"), py::arg("kind"), py::arg("levels"), py::arg("samples"), py::arg("features"),
           py::arg("group_size"), py::arg("out"), py::arg("threads"), py::arg("scale") = py::none(), py::arg("shift") = py::none(),
           py::arg("inner") = 1, py::arg("mask") = py::none(),
           "Dequantize packed codes and ranges to values, rounded once. scale, shift: as mean and rstd of quantize; "
           "element e is value scale[i] + shift[i]. mask: None, or a bit for each element, packed, by which its value is "
           "multiplied; not for uniform copies, nor with scale or shift.")
      .def("grid_fixed", &Cpu::grid_fixed, py::arg("gamma"), py::arg("beta"), py::arg("bits"),
           py::arg("grid"), py::arg("threads"),
           "Compute the grid, GRID_ROWS rows of n, of n float32 weights and biases of a norm.")
      .def("encode_fixed", &Cpu::encode_fixed, py::arg("x"), py::arg("y"), py::arg("grid"),
           py::arg("inner"), py::arg("bits"), py::arg("packed"), py::arg("threads"), py::arg("mean") = 
           py::none(), py::arg("rstd") = py::none(), py::arg("inner_of_entries") = 1,
           "Encode x to packed fixed-point codes with the sign of y. grid: GRID_ROWS rows of float32; element e "
           "has column e / inner % columns. mean, rstd: as in quantize.")
      .def("decode_fixed", &Cpu::decode_fixed, py::arg("packed"), py::arg("grid"), py::arg("inner"),
           py::arg("bits"), py::arg("activated"), py::arg("slope"), py::arg("out"), py::arg("threads"),
           py::arg("scale") = py::none(), py::arg("inner_of_entries") = 1,
           "Decode fixed-point codes: to y, times slope unless positive, if activated; else to the normalized "
           "input, times scale[i].")
      .def("mask_fixed", &Cpu::mask_fixed, py::arg("grad"), py::arg("packed"), py::arg("grid"),
           py::arg("inner"), py::arg("bits"), py::arg("slope"), py::arg("out"), py::arg("threads"),
           "Compute out = grad, times slope unless y is positive. out may be grad.");

  module.def("cpu_isas", [] { return py::tuple(py::cast(fewbit::cpu_isas())); },
             "Return the names of the instruction sets that can be used here, best first.");
  module.def("allocate", &allocate, py::arg("variances"), py::arg("elements"), py::arg("budget"), py::arg("least"),
             py::arg("most"), py::arg("bits"),
             "Choose n uint8 bits from n rows of 8 float64 variances and n int64 sizes, such that the sum of elements * "
             "bits stays within the budget.");
  module.def(
      "checksum",
      [](uintptr_t address, int64_t bytes, int threads) {
        check_threads(threads);
        static const fewbit::Kernels& kernels = *fewbit::kernels_of(fewbit::cpu_isas().front());
        return fewbit::checksum(kernels, reinterpret_cast<const void*>(address), bytes, threads);
      },
      py::arg("address"), py::arg("bytes"), py::arg("threads"), "Return a checksum of memory.");
  module.def("packed_words", [](int64_t n, int bits) {
        check_size(n);
        check_bits(bits);
        return fewbit::packed_words(n, bits);
      }, py::arg("n"), py::arg("bits"), "Return the number of int32 words that n elements take.");
  module.def("use_openmp_of", &fewbit::use_openmp_of, py::arg("path"),
             "Use the OpenMP runtime that the loaded library at path uses; return True if there is one.");
  module.attr("DTYPES") = py::tuple(py::cast(std::vector<std::string>(kItemNames, kItemNames + kItems)));
  module.attr("GRID_ROWS") = fewbit::kGridRows;
  module.attr("FUNCTIONS") = functions();
  module.attr("cuda") = py::none();
#ifdef FEWBIT_WITH_CUDA
  bind_cuda(module);
#endif
}
