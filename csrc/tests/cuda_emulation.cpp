// This file joins csrc/bindings and the kernels of csrc/cuda in the extension module of tests/helpers/cuda_emulation.py. It
// contains the settings of the emulated device, and nothing in place of the kernels for the CPU.

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "bindings/module.h"
#include "common/functions.h"
#include "cpu/kernels.h"

#pragma GCC visibility push(default)
extern "C" {

// Sets the number of multiprocessors of the device, the first block of every grid that runs, and one of two orders in which
// lanes run and copies happen.
void emulated_device(int multiprocessors, unsigned first_block, int is_reversed) {
  cuda_emulation::multiprocessors = multiprocessors;
  cuda_emulation::first_block = first_block;
  cuda_emulation::is_reversed = is_reversed != 0;
}

// Sets the version of the driver, and the compute capability of the device.
void emulated_driver(int driver, int capability) {
  cuda_emulation::driver = driver;
  cuda_emulation::capability = capability;
}

int emulated_current_device() { return cuda_emulation::device; }

}  // extern "C"
#pragma GCC visibility pop

namespace fewbit {

std::vector<std::string> cpu_isas() { return {}; }
const Kernels* kernels_of(const std::string&) { return nullptr; }

const std::vector<FunctionInfo>& fused_functions() {
#define FEWBIT_INFO(Function) {Function::name, Function::n_parameters},
  static const std::vector<FunctionInfo> functions = {FEWBIT_FUNCTIONS(FEWBIT_INFO)};
#undef FEWBIT_INFO
  return functions;
}

namespace bindings {
void bind_cpu(pybind11::module_&) {}
}  // namespace bindings

}  // namespace fewbit
