"""The activation functions f that fewbit knows, with their derivatives f' in float64 and properties of f'.

The properties are the kinks (points at which f' jumps or is not smooth), the slopes (limits of f' at both infinities), whether f'
is even, and the domain on which tables approximate f'. The formulas of f' have an absolute error of at most 1e-14 for |x| <= 1e3,
and a relative error of at most 1e-12 where f' tends to zero at an infinity. At a kink, `derivative` returns the value of torch's
backward pass.

PReLU, xIELU (learned parameters), GLU and softmax (not pointwise) are left out. The functions of `solver_names` are no activations:
their tables quantize numbers. This folder imports only files in the root of the package, and torch only for a user's function.
"""

from fewbit.functions.function import Function
from fewbit.functions.registry import aliases, canonical, get, modules, names, solver_names

__all__ = ["Function", "aliases", "canonical", "get", "modules", "names", "solver_names"]
