// Threads: torch's own OpenMP runtime if it was found, else threads made here. No library is linked.
#pragma once

#include <string>

namespace fewbit {

// Finds the OpenMP runtime that the library at `path` uses, if that is loaded; true if there is one to use.
bool use_openmp_of(const std::string& path);

// Runs body(context, index, count) once for each index below count, each in a thread of its own, and waits.
// count is at most `threads`: fewer inside another parallel region, one after a fork. body must not throw.
void run_parallel(int threads, void (*body)(void* context, int index, int count), void* context);

// The same for a callable f(index, count).
template <class F>
void run_parallel(int threads, F& f) {
  run_parallel(
      threads, [](void* context, int index, int count) { (*static_cast<F*>(context))(index, count); }, &f);
}

}  // namespace fewbit
