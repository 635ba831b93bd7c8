#include "bindings/tensors.h"

#include <climits>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace fewbit::bindings {

namespace {

// The arguments of `use_torch`. The references are never released.
struct Torch {
  PyObject* tensor = nullptr;
  PyObject* dtypes = nullptr;
  PyObject* check_dense = nullptr;
  PyObject* threads = nullptr;
  PyObject* stream = nullptr;
} torch;

// Owns the result of a call of Python; throws the error that the call raised.
py::object owned(PyObject* result) {
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

uint64_t number_of(const py::object& value) {
  const uint64_t number = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  return number;
}

py::object call(PyObject* object, PyObject* method) { return owned(PyObject_CallMethodNoArgs(object, method)); }

// Reads the facts of a dense tensor. Python code would take twice as long, which counts for small tensors.
Buffer buffer_of(PyObject* tensor) {
  static PyObject* const is_contiguous = PyUnicode_InternFromString("is_contiguous");
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  static PyObject* const numel = PyUnicode_InternFromString("numel");
  static PyObject* const get_device = PyUnicode_InternFromString("get_device");
  static PyObject* const dtype = PyUnicode_InternFromString("dtype");
  if (call(tensor, is_contiguous).ptr() != Py_True) owned(PyObject_CallOneArg(torch.check_dense, tensor));
  Buffer buffer;
  buffer.exists = true;
  buffer.address = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(call(tensor, data_ptr).ptr()));
  buffer.count = PyLong_AsLongLong(call(tensor, numel).ptr());
  buffer.device = static_cast<int>(PyLong_AsLong(call(tensor, get_device).ptr()));
  const py::object type = owned(PyObject_GetAttr(tensor, dtype));
  PyObject* number = PyDict_GetItem(torch.dtypes, type.ptr());  // borrowed
  buffer.item = number ? static_cast<int>(PyLong_AsLong(number)) : -1;
  if (PyErr_Occurred()) throw py::error_already_set();
  return buffer;
}

void check_is_set(PyObject* function) {
  if (!function) throw std::runtime_error("expected a call of use_torch before that of a kernel, got none");
}

}  // namespace

void use_torch(const py::type& tensor, const py::dict& dtypes, const py::function& check_dense, const py::function& threads,
               const py::function& stream) {
  torch = {tensor.inc_ref().ptr(), dtypes.inc_ref().ptr(), check_dense.inc_ref().ptr(), threads.inc_ref().ptr(),
           stream.inc_ref().ptr()};
}

bool load_buffer(py::handle source, Buffer& buffer) {
  if (source.is_none()) return true;
  if (torch.tensor && PyObject_TypeCheck(source.ptr(), reinterpret_cast<PyTypeObject*>(torch.tensor))) {
    buffer = buffer_of(source.ptr());
    return true;
  }
  if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 4) return false;
  PyObject* const* items = &PyTuple_GET_ITEM(source.ptr(), 0);
  buffer.exists = true;
  buffer.address = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(items[0]));
  buffer.count = PyLong_AsLongLong(items[1]);
  buffer.item = static_cast<int>(PyLong_AsLong(items[2]));
  buffer.device = static_cast<int>(PyLong_AsLong(items[3]));
  if (PyErr_Occurred()) throw py::error_already_set();
  return true;
}

int torch_threads() {
  check_is_set(torch.threads);
  const uint64_t threads = number_of(owned(PyObject_CallNoArgs(torch.threads)));
  if (threads < 1 || threads > INT_MAX)
    throw std::invalid_argument("threads: expected 1 or more, got " + std::to_string(threads));
  return static_cast<int>(threads);
}

void* torch_stream(int device) {
  check_is_set(torch.stream);
  const py::object index = py::int_(device);
  return reinterpret_cast<void*>(static_cast<uintptr_t>(number_of(owned(PyObject_CallOneArg(torch.stream, index.ptr())))));
}

}  // namespace fewbit::bindings
