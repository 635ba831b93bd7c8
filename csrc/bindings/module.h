// The parts of the Python module fewbit._kernels.
#pragma once

#include "bindings/python.h"

namespace fewbit::bindings {

// Defines `Cpu` and `cpu_isas`.
void bind_cpu(PyObject* module);

#ifdef FEWBIT_WITH_CUDA
// Defines `cuda`, the object with the kernels for CUDA devices.
void bind_cuda(PyObject* module);
#endif

}  // namespace fewbit::bindings
