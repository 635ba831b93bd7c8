// Macros with which the host compiler, several times, and nvcc compile the same inline function.
#pragma once

#ifndef FEWBIT_HD
#ifdef __CUDACC__
#define FEWBIT_HD __host__ __device__
#else
#define FEWBIT_HD
#endif
#endif

// Inline functions live in a namespace of their own per instruction set: the linker merges equal names,
// and a copy compiled for AVX-512 must never serve an older processor.
#ifndef FEWBIT_NAMESPACE
#define FEWBIT_NAMESPACE portable
#endif
