#include <initializer_list>

#include "../common/functions.h"
#include "../common/planes.h"
#include "kernels.h"

namespace fewbit {

// The kernels that kernels.cpp defines for each instruction set of the build.
#ifdef FEWBIT_HAVE_X86
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace baseline {
extern const Kernels kernels;
}

namespace {

#ifdef FEWBIT_HAVE_X86
// The flags that setup.py compiles each build with. The test of the processor includes the system's support.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> all;
#ifdef FEWBIT_HAVE_X86
  if (has_avx512()) all.push_back(&avx512::kernels);
  if (has_avx2()) all.push_back(&avx2::kernels);
#endif
  all.push_back(&baseline::kernels);
  return all;
}

constexpr int64_t kGrain = 32768;  // the number of elements from which another thread is worth using; torch's number

}  // namespace

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable()) names.push_back(kernels->isa);
  return names;
}

const Kernels* kernels_of(const std::string& isa) {
  for (const Kernels* kernels : usable()) {
    if (isa == kernels->isa) return kernels;
  }
  return nullptr;
}

const std::vector<FunctionInfo>& fused_functions() {
#define FEWBIT_INFO(Function) {Function::name, Function::n_parameters},
  static const std::vector<FunctionInfo> functions = {FEWBIT_FUNCTIONS(FEWBIT_INFO)};
#undef FEWBIT_INFO
  return functions;
}

int threads_for(int64_t n, int threads) {
  const int64_t useful = n / kGrain + (n % kGrain != 0);
  return static_cast<int>(useful < 1 ? 1 : useful < threads ? useful : threads);
}

Range share_of(int64_t n, int index, int count) {
  const int64_t chunks = n / kChunk + (n % kChunk != 0);
  const int64_t least = chunks / count, more = chunks % count;
  const int64_t first = index * least + (index < more ? index : more);
  const int64_t last = first + least + (index < more ? 1 : 0);
  const int64_t begin = first * kChunk, end = last == chunks ? n : last * kChunk;
  return {begin < n ? begin : n, end};
}

}  // namespace fewbit
