// The parts of the Python module fewbit._kernels.
#pragma once

#include <pybind11/pybind11.h>

namespace fewbit::bindings {

// Defines `Cpu` and `cpu_isas`.
void bind_cpu(pybind11::module_& module);

#ifdef FEWBIT_WITH_CUDA
// Defines `Cuda`, and `cuda`, an object of this class.
void bind_cuda(pybind11::module_& module);
#endif

}  // namespace fewbit::bindings
