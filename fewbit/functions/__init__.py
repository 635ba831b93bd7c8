"""The activation functions f that fewbit knows, with their derivatives f' in float64 and properties of f'.

Formulas of f' have an absolute error of at most 1e-14 for |x| <= 1e3, and a relative error of at most 1e-12 where f' tends to zero. At a
kink, a point where f' jumps or is not smooth, they have the value of torch's backward pass.
"""

from fewbit.functions.function import Function
from fewbit.functions.registry import aliases, canonical, get, modules, names, solver_names

__all__ = ["Function", "aliases", "canonical", "get", "modules", "names", "solver_names"]
