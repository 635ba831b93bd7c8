// Torch's tensors as arguments of the entries of fewbit._kernels, without libtorch.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/buffer.h"

namespace fewbit::bindings {

// Lets entries take tensors and ask torch where to run.
//
// tensor: the class torch.Tensor.
// dtypes: the numbers of torch's dtypes.
// check_dense: raises ValueError unless a tensor is dense.
// threads: returns the number of threads that a CPU kernel may use.
// stream: returns the address of the current stream of a CUDA device, given the device's index.
void use_torch(const pybind11::type& tensor, const pybind11::dict& dtypes, const pybind11::function& check_dense,
               const pybind11::function& threads, const pybind11::function& stream);

// Reads a value of Python (a tensor, a tuple of four numbers, or None) into `buffer`. Returns false if the value is of another
// type. Throws the errors that torch raises.
bool load_buffer(pybind11::handle source, Buffer& buffer);

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
