// The Python module fewbit._kernels. It does not use libtorch: the arguments of entries are torch's tensors, of which `Buffer`
// has the facts that kernels need. Every entry checks the sizes of its buffers. There is one exception: if samples have different
// numbers of bits on a CUDA device, the kernel checks the size of the copy.

#include "bindings/module.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/entry.h"
#include "bindings/tensors.h"
#include "common/fixed_point.h"
#include "common/table.h"
#include "cpu/allocation.h"
#include "cpu/parallel.h"

namespace py = pybind11;

namespace fewbit::bindings {

namespace {

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

std::unique_ptr<OwnedTable> make_table(int64_t bits, int64_t initial, const py::object& breaks32, const py::object& flips32,
                                       const py::object& breaks64, const py::object& flips64, const py::object& lut32,
                                       const py::object& lut64, const py::object& points, const py::object& origins,
                                       const py::object& values, const py::object& slopes, const py::object& levels,
                                       const py::object& inverse_gaps) {
  TableArrays arrays;
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

// Chooses the bits of n tensors from their sensitivities and sizes, within a total budget of bits.
void allocate(const Buffer& variances, const Buffer& elements, int64_t budget, int least, int most, const Buffer& bits) {
  const Entry entry("allocate", -1);
  const int64_t n = bits.count;
  check_size(n);
  check_bits(least);
  check_bits(most);
  if (least > most) refuse("least", std::to_string(most) + " or less", std::to_string(least));
  const auto* added = entry.exactly<const double>("variances", variances, kMaxBits * n, static_cast<int>(DType::float64));
  const auto* sizes = entry.exactly<const int64_t>("elements", elements, n, kInt64);
  auto* to = entry.exactly<uint8_t>("bits", bits, n, kUint8);
  py::gil_scoped_release release;
  fewbit::allocate(added, sizes, n, budget, least, most, to);
}

int64_t checked_packed_words(int64_t n, int bits) {
  check_size(n);
  check_bits(bits);
  return packed_words(n, bits);
}

py::dict functions() {
  py::dict result;
  int number = 0;
  for (const FunctionInfo& function : fused_functions()) {
    result[function.name] = py::make_tuple(number++, function.n_parameters);
  }
  return result;
}

void bind_common(py::module_& module) {
  module.def("use_torch", &use_torch, py::arg("tensor"), py::arg("dtypes"), py::arg("check_dense"), py::arg("threads"),
             py::arg("stream"),
             "Let entries take tensors and ask torch where to run. tensor: the class torch.Tensor. dtypes: {dtype: position in "
             "DTYPES}. check_dense(tensor) raises "
             "ValueError unless a tensor is dense. threads() returns the number of threads for the CPU. stream(index of a CUDA "
             "device) returns the address of the current stream.");

  py::class_<OwnedTable>(module, "Table", py::module_local(),
                         "A table's constants, checked and copied (fewbit.runtime.format.encoding).")
      .def(py::init(&make_table), py::arg("bits"), py::arg("initial"), py::arg("breaks32"), py::arg("flips32"),
           py::arg("breaks64"), py::arg("flips64"), py::arg("lut32"), py::arg("lut64"), py::arg("points") = py::none(),
           py::arg("origins") = py::none(), py::arg("values") = py::none(), py::arg("slopes") = py::none(),
           py::arg("levels") = py::none(), py::arg("inverse_gaps") = py::none())
      .def_property_readonly("bits", [](const OwnedTable& table) { return table.get().bits; })
      .def_property_readonly("unbiased", [](const OwnedTable& table) { return table.get().unbiased(); });

  py::class_<CopyShape>(module, "CopyShape", py::module_local(),
                        "The shape of a quantized tensor, as samples and their features, and the settings of its copy. kind: 0 "
                        "(uniform), 1 (rotated) or 2 (masked).")
      .def(py::init(&copy_shape), py::arg("samples"), py::arg("features"), py::arg("group_size"), py::arg("bits"),
           py::arg("kind"))
      .def_property_readonly(
          "words", [](const CopyShape& shape) { return shape.streams().words; }, "The int32 words of the packed codes.")
      .def_property_readonly(
          "rows", [](const CopyShape& shape) { return shape.streams().groups + seed_rows(shape.is_rotated()); },
          "The rows of the ranges.");

  module.def(
      "allocate", &allocate, py::arg("variances"), py::arg("elements"), py::arg("budget"), py::arg("least"), py::arg("most"),
      py::arg("bits"),
      "Choose n uint8 bits from n rows of 8 float64 variances and n int64 sizes, such that the sum of elements * bits stays "
      "within the budget.");
  module.def("packed_words", &checked_packed_words, py::arg("n"), py::arg("bits"),
             "Return the number of int32 words that n elements take.");
  module.def("use_openmp_of", &use_openmp_of, py::arg("path"),
             "Use the OpenMP runtime that the loaded library at path uses; return True if there is one.");
  module.attr("DTYPES") = py::tuple(py::cast(std::vector<std::string>(kItemNames, kItemNames + kItems)));
  module.attr("GRID_ROWS") = kGridRows;
  module.attr("FUNCTIONS") = functions();
}

}  // namespace

}  // namespace fewbit::bindings

PYBIND11_MODULE(_kernels, module) {
  module.doc() =
      "Compiled kernels. A buffer is a dense tensor, or (address, number of elements, position of their dtype in DTYPES, index "
      "of "
      "their CUDA device or -1), or None; an entry raises ValueError if a buffer is not of the size that it reads or writes.";
  fewbit::bindings::bind_common(module);
  fewbit::bindings::bind_cpu(module);
  module.attr("cuda") = py::none();
#ifdef FEWBIT_WITH_CUDA
  fewbit::bindings::bind_cuda(module);
#endif
}
