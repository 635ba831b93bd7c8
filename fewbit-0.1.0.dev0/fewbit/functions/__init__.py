"""The activation functions f that fewbit knows, with their derivatives f' in float64 and properties of f'.

The properties are the kinks (points at which f' jumps or is not smooth), the slopes (limits of f' at both infinities),
whether f' is even, and the domain on which tables approximate f' by default.

The derivatives are computed by formulas, with an absolute error of at most 1e-14 for |x| <= 1e3. If f' tends to zero at
an infinity, its relative error there is at most 1e-12, as long as f' is not subnormal in float64. The formulas avoid
cancellation: the part of f or f' near each infinity is computed from a quantity that is small there. At a kink,
`derivative` returns the value of torch's backward pass.

PReLU and xIELU are left out, because they have learned parameters. GLU and softmax are left out, because they are not
pointwise. This folder may import files in the root of the package, but no other folder. It imports torch only if a
user's function needs torch.

The functions of `solver_names` are no activations: no layer has them, and tables are designed for them only to quantize
numbers.
"""

from fewbit.functions.function import Function
from fewbit.functions.registry import aliases, canonical, get, modules, names, solver_names

__all__ = ["Function", "aliases", "canonical", "get", "modules", "names", "solver_names"]
