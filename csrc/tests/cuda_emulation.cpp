// This file joins csrc/bindings and the kernels of csrc/cuda in the extension module of tests/helpers/cuda_emulation.py. It
// contains the settings of the emulated device, and nothing in place of the kernels for the CPU.

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "bindings/dlpack.h"
#include "bindings/module.h"
#include "common/functions.h"
#include "cpu/kernels.h"

using fewbit::bindings::dlpack::Exchange;
using fewbit::bindings::dlpack::TensorView;

namespace {

const Exchange* torch_exchange;
int device_of_tensors;

int view_on_device(void* tensor, TensorView* view) {
  const int failed = torch_exchange->view(tensor, view);
  view->device_type = fewbit::bindings::dlpack::kCuda;
  view->device = device_of_tensors;
  return failed;
}

int default_stream(int32_t, int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Returns DLPack's functions by which tensors of the CPU are on a device.
const Exchange* emulated_exchange(const Exchange* of_torch, int device) {
  static Exchange changed;
  torch_exchange = of_torch;
  device_of_tensors = device;
  changed = *of_torch;
  changed.view = view_on_device;
  changed.stream = default_stream;
  return &changed;
}

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
void bind_cpu(PyObject*) {}
}  // namespace bindings

}  // namespace fewbit
