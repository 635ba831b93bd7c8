// Threads: those of torch's own OpenMP runtime if it was found, else threads made here. No library is linked.
#pragma once

#include <string>

namespace fewbit {

// Looks for the OpenMP runtime that the loaded library at `path` uses. Returns true if it was found.
bool use_openmp_of(const std::string& path);

// Runs body(context, index, count) once for each index below count, each in a thread of its own, and waits.
// count is at most `threads`. It is lower inside another parallel region, and 1 after a fork. body must not throw.
void run_parallel(int threads, void (*body)(void* context, int index, int count), void* context);

// Does the same for a callable f(index, count).
template <class F>
void run_parallel(int threads, F& f) {
  run_parallel(
      threads, [](void* context, int index, int count) { (*static_cast<F*>(context))(index, count); }, &f);
}

}  // namespace fewbit
