// Macros with which nvcc and the host compiler, once for each instruction set, compile the same inline function.
#pragma once

#ifndef FEWBIT_HD
#ifdef __CUDACC__
#define FEWBIT_HD __host__ __device__
#else
#define FEWBIT_HD
#endif
#endif

// For functions of the host whose arrays have to stay in registers, which needs the loops around them.
#define FEWBIT_INLINE inline __attribute__((always_inline))

// Each instruction set has its own namespace of inline functions, because the linker merges equal names, and a copy that
// is compiled for AVX-512 must never run on an older processor.
#ifndef FEWBIT_NAMESPACE
#define FEWBIT_NAMESPACE portable
#endif
