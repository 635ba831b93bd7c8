#include "bindings/tensors.h"

#include <stdexcept>
#include <string>

#include "bindings/dlpack.h"
#include "bindings/entry.h"

namespace fewbit::bindings {

namespace {

struct Torch {
  PyTypeObject* tensor = nullptr;
  const dlpack::Exchange* exchange = nullptr;
  int32_t (*threads)(uint32_t* number) = nullptr;
} torch;

// Returns the number of the dtype in kItemNames, or -1.
int item_of(const dlpack::TensorView& view) {
  constexpr int kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4;
  if (view.lanes != 1) return -1;
  switch (view.kind << 8 | view.bits) {
    case kFloat << 8 | 32: return static_cast<int>(DType::float32);
    case kFloat << 8 | 64: return static_cast<int>(DType::float64);
    case kFloat << 8 | 16: return static_cast<int>(DType::float16);
    case kBfloat << 8 | 16: return static_cast<int>(DType::bfloat16);
    case kInt << 8 | 32: return kInt32;
    case kUnsigned << 8 | 8: return kUint8;
    case kInt << 8 | 64: return kInt64;
    default: return -1;
  }
}

std::string listed(const int64_t* numbers, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return "(" + text + (count == 1 ? ",)" : ")");
}

// Returns the number of elements. Throws std::invalid_argument unless they fill their memory without overlap or gap.
int64_t dense_count(const dlpack::TensorView& view) {
  int64_t count = 1, step = 1;
  bool is_contiguous = true;
  for (int i = view.dims - 1; i >= 0; --i) {
    is_contiguous &= view.shape[i] == 1 || view.strides[i] == count;
    count *= view.shape[i];
  }
  if (is_contiguous || count == 0) return count;
  // Each turn finds the dimension whose neighbors are `step` elements apart.
  for (int found = 0; step < count; step *= view.shape[found]) {
    for (found = 0; found < view.dims && (view.shape[found] == 1 || view.strides[found] != step);) ++found;
    if (found == view.dims) {
      throw std::invalid_argument("expected a dense tensor, got strides " + listed(view.strides, view.dims) + " for shape " +
                                  listed(view.shape, view.dims));
    }
  }
  return count;
}

// Throws the first line of the error that torch has set. The other lines are addresses in torch's libraries.
[[noreturn]] void refuse_view() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const std::string text = read_text({"tensor", "error"}, Object(PyObject_Str(value)).get());
  for (PyObject* object : {type, value, trace}) Py_XDECREF(object);
  throw std::runtime_error("expected a tensor with memory on the CPU or on a CUDA device: " + text.substr(0, text.find('\n')));
}

Buffer buffer_of(PyObject* tensor) {
  dlpack::TensorView view;
  if (torch.exchange->view(tensor, &view)) refuse_view();
  if (view.device_type != dlpack::kCpu && view.device_type != dlpack::kCuda) refuse("device", "the CPU or a CUDA device", "another");
  const auto address = reinterpret_cast<uintptr_t>(view.data) + view.offset;
  return {true, address, dense_count(view), item_of(view), view.device_type == dlpack::kCpu ? -1 : view.device};
}

void check_is_set() {
  if (!torch.exchange) throw std::runtime_error("expected a call of use_torch before that of a kernel, got none");
}

}  // namespace

Object use_torch(PyObject* tensor, PyObject* exchange, int64_t threads) {
  const auto* found = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
  if (!found) throw PythonError();
  while (found && found->version != 1) found = found->older;
  if (!found || !found->view) throw std::runtime_error("expected a torch that exports tensors by DLPack 1, got another version");
  torch = {reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor)), found,
           reinterpret_cast<int32_t (*)(uint32_t*)>(static_cast<uintptr_t>(threads))};
  Py_INCREF(exchange);
  return none();
}

Buffer read_buffer(const Place& place, PyObject* object) {
  if (object == Py_None) return {};
  if (torch.tensor && PyObject_TypeCheck(object, torch.tensor)) return buffer_of(object);
  if (!PyTuple_Check(object) || PyTuple_Size(object) != 4) {
    refuse_type(place, "torch.Tensor, a tuple of four integers or None", object);
  }
  const auto item = [&](int i) { return read_integer(place, PyTuple_GetItem(object, i)); };
  PyObject* const address = PyTuple_GetItem(object, 0);
  const auto at = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(address));
  if (PyErr_Occurred()) throw PythonError();
  return {true, at, item(1), read_int(place, PyTuple_GetItem(object, 2)), read_int(place, PyTuple_GetItem(object, 3))};
}

int torch_threads() {
  check_is_set();
  uint32_t threads = 0;
  if (torch.threads(&threads) || threads < 1) refuse("threads", "1 or more", std::to_string(threads));
  return static_cast<int>(threads);
}

void* torch_stream(int device) {
  check_is_set();
  void* stream = nullptr;
  if (torch.exchange->stream(dlpack::kCuda, device, &stream)) throw std::runtime_error("expected a current stream of torch, got none");
  return stream;
}

}  // namespace fewbit::bindings
