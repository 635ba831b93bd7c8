"""The activation functions that fewbit knows: f and f' in float64, and properties of f'.

The properties are the kinks (points at which f' is not smooth), the slopes (limits of f' at both infinities), whether f' is
even, and the domain on which tables approximate f'.

A derivative is within 1e-14 of the exact one (absolute, for |x| <= 1e3), and within 1e-12 relative in tails that decay to
zero, as long as f' is a normal float64. The formulas avoid cancellation: each tail is computed from a quantity that is
small in that tail. At a kink, `derivative` returns the value of torch's backward.

PReLU and xIELU are left out, because they have learned parameters, and GLU and softmax, because they are not pointwise.
This folder may import the files in the root of the package. It imports torch only if a user's function needs it.
"""

from fewbit.functions.function import Function
from fewbit.functions.registry import aliases, canonical, get, modules, names

__all__ = ["Function", "aliases", "canonical", "get", "modules", "names"]
