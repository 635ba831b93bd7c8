// The devices on which the kernels can run: versions and architectures.

#include <string>

#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace fewbit::cuda {
namespace {

// nvcc's list of the architectures of this build: 10 times the compute capability, ascending.
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

std::string version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

std::string capability(int number) { return std::to_string(number / 10) + "." + std::to_string(number % 10); }

// Returns CUDA's text, and drops the runtime's copy of the error.
std::string text(cudaError_t error) {
  cudaGetLastError();
  return cudaGetErrorString(error);
}

// Machine code runs on its own major version from its minor version up. PTX runs on all newer devices.
bool runs_on(int device_capability) {
  int newest = 0;
  for (const int listed : kArchitectures) {
    const int built = listed / 10;
    if (built / 10 == device_capability / 10 && built <= device_capability) return true;
    newest = built > newest ? built : newest;
  }
  return newest <= device_capability;
}

// Returns why the kernels cannot run on the device; empty if they can. Attributes need no context, so no memory of the device
// is used.
std::string obstacle(int device) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) return "device " + std::to_string(device) + ": " + text(error);
  const int found = 10 * major + minor;
  if (runs_on(found)) return "";
  std::string built;
  for (const int listed : kArchitectures) built += (built.empty() ? "" : ", ") + capability(listed / 10);
  return "device " + std::to_string(device) + " has compute capability " + capability(found) +
         ", these kernels were built for " + built;
}

std::string obstacle_anywhere(int device) {
  int driver = 0, runtime = 0, devices = 0;
  cudaError_t error = cudaDriverGetVersion(&driver);
  if (error == cudaSuccess) error = cudaRuntimeGetVersion(&runtime);
  if (error != cudaSuccess) return text(error);
  if (driver == 0) return "no CUDA driver was found";
  // Within a major version an older driver runs what a newer toolkit compiled.
  if (driver / 1000 < runtime / 1000) {
    return "the driver supports CUDA " + version(driver) + ", these kernels need " +
           version(runtime / 1000 * 1000);
  }
  error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return text(error);
  if (devices == 0) return "no CUDA device was found";
  if (device >= 0) return obstacle(device);
  std::string first;
  for (int number = 0; number < devices; ++number) {
    const std::string reason = obstacle(number);
    if (reason.empty()) return "";
    if (first.empty()) first = reason;
  }
  return first;
}

}  // namespace

int device_count() noexcept {
  static const int count = [] {
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
  }();
  return count;
}

int runtime_version() { return CUDART_VERSION; }

std::vector<int> architectures() {
  std::vector<int> result;
  for (const int listed : kArchitectures) result.push_back(listed / 10);
  return result;
}

std::pair<bool, std::string> available(int device) noexcept {
  try {
    std::string reason = obstacle_anywhere(device);
    return {reason.empty(), std::move(reason)};
  } catch (...) {
    return {false, ""};
  }
}

}  // namespace fewbit::cuda
