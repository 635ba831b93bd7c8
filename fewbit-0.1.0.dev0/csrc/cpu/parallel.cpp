#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace fewbit {
namespace {

// The functions that GCC calls for `#pragma omp parallel`. LLVM's and Intel's runtimes have them too.
struct OpenMP {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  int (*thread_num)();
  int (*num_threads)();
};

OpenMP found;
std::atomic<const OpenMP*> openmp{nullptr};
// The threads of a runtime do not survive a fork, and waiting for them would never end.
std::atomic<bool> forked{false};

template <class F>
bool look_up(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

struct Region {
  void (*body)(void*, int, int);
  void* context;
};

void run_openmp(void* data) {
  const Region& region = *static_cast<const Region*>(data);
  region.body(region.context, found.thread_num(), found.num_threads());
}

void run_threads(int count, void (*body)(void*, int, int), void* context) {
  std::vector<std::thread> threads;
  int index = 1;
  try {
    threads.reserve(count - 1);
    for (; index < count; ++index) threads.emplace_back(body, context, index, count);
  } catch (const std::system_error&) {
    // The system gives no more threads, so this thread does the remaining shares.
  }
  body(context, 0, count);
  for (; index < count; ++index) body(context, index, count);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

bool use_openmp_of(const std::string& path) {
  static const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)watched;
  if (openmp.load()) return true;
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return false;
  OpenMP runtime;
  // dlsym searches the library and its dependencies.
  const bool complete = look_up(library, "GOMP_parallel", runtime.parallel) &&
                        look_up(library, "omp_get_thread_num", runtime.thread_num) &&
                        look_up(library, "omp_get_num_threads", runtime.num_threads);
  dlclose(library);
  if (!complete) return false;
  found = runtime;
  openmp = &found;
  return true;
}

void run_parallel(int threads, void (*body)(void*, int, int), void* context) {
  if (threads <= 1 || forked) return body(context, 0, 1);
  if (const OpenMP* runtime = openmp.load()) {
    Region region{body, context};
    return runtime->parallel(run_openmp, &region, static_cast<unsigned>(threads), 0);
  }
  run_threads(threads, body, context);
}

}  // namespace fewbit
