// Torch's tensors as arguments of the entries of fewbit._kernels, without libtorch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace fewbit::bindings {

// A buffer, which in Python is a tensor, the tuple (address, number of elements, number of their dtype, device), or None. The
// device is the index of a CUDA device, or -1 for the CPU.
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

// Lets entries take tensors and ask torch where to run.
//
// dtypes: the numbers of torch's dtypes.
// check_dense: raises ValueError unless a tensor is dense.
// threads: returns the number of threads that a CPU kernel may use.
// stream: returns the address of the current stream of a CUDA device, given the device's index.
void use_torch(const pybind11::dict& dtypes, const pybind11::function& check_dense, const pybind11::function& threads,
               const pybind11::function& stream);

// Returns what a value of Python stands for; nothing if it stands for no buffer. Throws the errors that torch raises.
bool load_buffer(pybind11::handle source, Buffer& buffer);

// Returns the number of threads that torch uses on the CPU.
int torch_threads();

// Returns torch's current stream of a CUDA device.
void* torch_stream(int device);

}  // namespace fewbit::bindings

namespace pybind11::detail {

template <>
struct type_caster<fewbit::bindings::Buffer> {
  PYBIND11_TYPE_CASTER(fewbit::bindings::Buffer, const_name("torch.Tensor | tuple[int, int, int, int] | None"));

  bool load(handle source, bool) { return fewbit::bindings::load_buffer(source, value); }
};

template <>
struct type_caster<fewbit::bindings::SeedArgument> {
  PYBIND11_TYPE_CASTER(fewbit::bindings::SeedArgument, const_name("int | torch.Tensor | tuple[int, int, int, int] | None"));

  bool load(handle source, bool) {
    if (!PyLong_Check(source.ptr())) return fewbit::bindings::load_buffer(source, value.buffer);
    value.value = PyLong_AsLongLong(source.ptr());
    value.is_value = true;
    if (PyErr_Occurred()) throw error_already_set();
    return true;
  }
};

}  // namespace pybind11::detail
