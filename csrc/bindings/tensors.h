// Torch's tensors as arguments of the entries of fewbit._kernels, without libtorch.
#pragma once

#include "bindings/python.h"

namespace fewbit::bindings {

// Lets entries take tensors and ask torch where to run. The references are never released.
//
// tensor: the class torch.Tensor.
// exchange: torch.Tensor.__dlpack_c_exchange_api__, DLPack's functions in C that read tensors and the current stream.
// threads: the address of the function torch_get_num_threads of torch's stable interface in C.
Object use_torch(PyObject* tensor, PyObject* exchange, int64_t threads);

}  // namespace fewbit::bindings
