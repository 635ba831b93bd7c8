// The Python module fewbit._kernels. It does not use libtorch: the arguments of entries are torch's tensors, of which `Buffer`
// has the facts that kernels need. Every entry checks the sizes of its buffers. There is one exception: if samples have different
// numbers of bits on a CUDA device, the kernel checks the size of the copy.

#include "bindings/module.h"

#include <memory>
#include <string>
#include <vector>

#include "bindings/entry.h"
#include "bindings/tensors.h"
#include "bindings/torch_shim.h"
#include "common/fixed_point.h"
#include "common/table.h"
#include "cpu/allocation.h"
#include "cpu/parallel.h"

namespace fewbit::bindings {

namespace {

struct Format {
  std::string letter;  // as in Python's module struct
  std::string dtype;
};
const Format kFloat32 = {"f", "float32"}, kFloat64 = {"d", "float64"}, kBytes = {"B", "uint8"};

// Returns the numbers of a 1-D array; none for None.
template <class T>
std::vector<T> vector_of(const char* name, PyObject* object, const Format& format) {
  if (object == Py_None) return {};
  const auto refuse_array = [&](const std::string& got) { refuse(name, "a 1-D " + format.dtype + " array", got); };
  if (!PyObject_CheckBuffer(object)) refuse_array(type_name(object));
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_RECORDS_RO)) throw PythonError();
  const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> held(&view, PyBuffer_Release);
  if (view.ndim != 1 || view.format != format.letter) {
    std::string dtype = std::string("of format ") + view.format;
    for (const Format& known : {kFloat32, kFloat64, kBytes}) {
      if (known.letter == view.format) dtype = known.dtype;
    }
    refuse_array(std::to_string(view.ndim) + "-D " + dtype);
  }
  std::vector<T> values(static_cast<size_t>(view.shape[0]));
  if (PyBuffer_ToContiguous(values.data(), &view, view.len, 'C')) throw PythonError();
  return values;
}

Object make_table(int64_t bits, int64_t initial, PyObject* breaks32, PyObject* flips32, PyObject* breaks64, PyObject* flips64,
                  PyObject* lut32, PyObject* lut64, PyObject* points, PyObject* origins, PyObject* values, PyObject* slopes,
                  PyObject* levels, PyObject* inverse_gaps) {
  TableArrays arrays;
  arrays.breaks32 = vector_of<float>("breaks32", breaks32, kFloat32);
  arrays.flips32 = vector_of<uint8_t>("flips32", flips32, kBytes);
  arrays.breaks64 = vector_of<double>("breaks64", breaks64, kFloat64);
  arrays.flips64 = vector_of<uint8_t>("flips64", flips64, kBytes);
  arrays.lut32 = vector_of<float>("lut32", lut32, kFloat32);
  arrays.lut64 = vector_of<double>("lut64", lut64, kFloat64);
  arrays.points = vector_of<float>("points", points, kFloat32);
  arrays.origins = vector_of<float>("origins", origins, kFloat32);
  arrays.values = vector_of<float>("values", values, kFloat32);
  arrays.slopes = vector_of<float>("slopes", slopes, kFloat32);
  arrays.levels = vector_of<float>("levels", levels, kFloat32);
  arrays.inverse_gaps = vector_of<float>("inverse_gaps", inverse_gaps, kFloat32);
  return made(std::make_unique<OwnedTable>(bits, initial, std::move(arrays)));
}

Object make_shape(int64_t samples, int64_t features, int group_size, int bits, int kind) {
  return made(std::make_unique<CopyShape>(copy_shape(samples, features, group_size, bits, kind)));
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
  fewbit::allocate(added, sizes, n, budget, least, most, to);
}

int64_t checked_packed_words(int64_t n, int bits) {
  check_size(n);
  check_bits(bits);
  return packed_words(n, bits);
}

Object functions() {
  Object names(PyDict_New());
  int number = 0;
  for (const FunctionInfo& function : fused_functions()) {
    const Object value = to_python(std::pair(number++, function.n_parameters));
    if (PyDict_SetItemString(names.get(), function.name, value.get())) throw PythonError();
  }
  return names;
}

void bind_common(PyObject* module) {
  static PyMethodDef no_methods[] = {{}};
  static PyGetSetDef none_of_table[] = {{}};
  make_class<OwnedTable>("fewbit._kernels.Table", "A table's constants, checked and copied.", no_methods, none_of_table);
  static PyGetSetDef of_shape[] = {property<&CopyShape::words>("words", "The int32 words of the packed codes."),
                                   property<&CopyShape::rows>("rows", "The rows of the ranges."),
                                   {}};
  make_class<CopyShape>("fewbit._kernels.CopyShape", "The shape of a quantized tensor and the settings of its copy.", no_methods,
                        of_shape);
  static PyMethodDef entries[] = {
      method<&use_torch>("use_torch(tensor, exchange, threads)",
                         "Let entries take tensors and ask torch where to run. tensor: the class torch.Tensor. exchange: "
                         "torch.Tensor.__dlpack_c_exchange_api__. threads: the address of torch_get_num_threads in torch's "
                         "libraries."),
      method<&make_table>("Table(bits, initial, breaks32, flips32, breaks64, flips64, lut32, lut64, points=None, origins=None, "
                          "values=None, slopes=None, levels=None, inverse_gaps=None)",
                          "Return a table's constants, checked and copied (fewbit.runtime.format.encoding)."),
      method<&make_shape>("CopyShape(samples, features, group_size, bits, kind)",
                          "Return the shape of a quantized tensor, as samples and their features, and the settings of its copy. "
                          "kind: 0 (uniform), 1 (rotated) or 2 (masked)."),
      method<&allocate>("allocate(variances, elements, budget, least, most, bits)",
                        "Choose n uint8 bits from n rows of 8 float64 variances and n int64 sizes, such that the sum of "
                        "elements * bits stays within the budget."),
      method<&checked_packed_words>("packed_words(n, bits)", "Return the number of int32 words that n elements take."),
      method<&load_shim>("load_shim(path)",
                         "Look for torch's C interface in the loaded library at path and in those that it depends on; return True "
                         "if it is there."),
      method<&set_failure>("set_failure(is_refused, text)",
                           "Keep the error of an op's implementation in Python for the C++ code that has called it. is_refused: "
                           "True for a ValueError."),
      method<&use_openmp_of>("use_openmp_of(path)",
                             "Use the OpenMP runtime that the loaded library at path uses; return True if there is one."),
      {}};
  add_functions(module, entries);
  add(module, "DTYPES", to_python(std::vector<std::string>(kItemNames, kItemNames + kItems)));
  add(module, "GRID_ROWS", to_python(kGridRows));
  add(module, "FUNCTIONS", functions());
}

}  // namespace

}  // namespace fewbit::bindings

PyMODINIT_FUNC PyInit__kernels() {
  using namespace fewbit::bindings;
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT,
      "fewbit._kernels",
      "Compiled kernels. A buffer is a dense tensor, or (address, number of elements, position of their dtype in DTYPES, index "
      "of their CUDA device or -1), or None; an entry raises ValueError if a buffer is not of the size that it reads or writes.",
      -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return returned([] {
    Object module(PyModule_Create(&definition));
    bind_common(module.get());
    bind_cpu(module.get());
    add(module.get(), "cuda", none());
#ifdef FEWBIT_WITH_CUDA
    bind_cuda(module.get());
#endif
    return module;
  });
}
