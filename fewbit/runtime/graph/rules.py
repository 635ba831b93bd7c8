"""The rules by which saved tensors of torch's autograd nodes are compressed, one for each argument of a kind of node.

If a rule `is_exact`, the gradient is the same to the bit, else it is exact in expectation, as long as the node's other
arguments are exact or rounded independently. Arguments without a rule stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from fewbit.config import ROTATED, UNIFORM
from fewbit.runtime.format.tensor_checks import FLOATING
from fewbit.runtime.interop import clamp
from fewbit.runtime.quantizers import integers
from fewbit.runtime.quantizers.spec import SavedTensors, computed_from


class Rule:
    """The compression of one saved argument of an autograd node.

    Attributes:
        is_exact: whether the compression loses nothing.
        takes_constants: whether tensors that need no gradient are compressed as well.
    """

    is_exact = False
    takes_constants = False

    def bits(self, settings) -> int:
        """Return the bits per element of the copy, without the numbers of groups; `settings` are `GraphSettings`."""
        raise NotImplementedError

    def compress(
        self,
        x: torch.Tensor,
        settings,
        quantize: Callable[[torch.Tensor, int, str], SavedTensors],
    ) -> SavedTensors | None:
        """Return the copy of x, or None if this rule does not apply to x. `quantize(tensor, bits, kind)` returns a copy."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearRule(Rule):
    """The gradient is linear in the argument, whose copy has the kind `usual` unless the user chooses one."""

    usual: str = ROTATED
    takes_constants: bool = False

    def bits(self, settings):
        return settings.bits

    def compress(self, x, settings, quantize):
        if x.dtype not in FLOATING:
            return None
        return quantize(x, settings.bits, settings.kind or self.usual)


@dataclass(frozen=True)
class ExponentialRule(LinearRule):
    """The argument is a result of exp, in which the gradient is linear. It is quantized if no element is above 1 or NaN.

    See `operations.elementwise.exp`. On a GPU it stays as it is, because the host would have to wait.
    """

    usual: str = UNIFORM

    def compress(self, x, settings, quantize):
        is_small = not x.is_cuda and x.dtype in FLOATING and bool((x <= 1).all())
        return super().compress(x, settings, quantize) if is_small else None


@dataclass(frozen=True)
class DerivativeRule(Rule):
    """The gradient is linear in a derivative, a function of the argument. The derivative is saved in a uniform copy.

    The backward pass gets an argument whose derivative, computed by `derivative`, is the quantized one (`inverse`).
    """

    derivative: Callable
    inverse: Callable

    def bits(self, settings):
        return settings.derivative_bits

    def compress(self, x, settings, quantize):
        if x.dtype not in FLOATING:
            return None
        derivative = self.derivative(x.to(torch.promote_types(x.dtype, torch.float32)))
        copy = quantize(derivative, settings.derivative_bits, UNIFORM)
        return computed_from(self.inverse, (copy,), x.dtype)


@dataclass(frozen=True)
class ExactRule(Rule):
    """The gradient is the same to the bit with the copy that `copy` makes of the argument; None if it makes none."""

    copy: Callable[[torch.Tensor], SavedTensors | None]
    exact_bits: int = 1
    is_exact = True

    def bits(self, settings):
        return self.exact_bits

    def compress(self, x, settings, quantize):
        return self.copy(x)


def _flags(x, dtype=torch.bool) -> SavedTensors:
    """Return a copy of bools, which are restored in `dtype`."""
    tensors, spec, *_ = integers.pack(x, 2)
    return SavedTensors(tensors, integers.CastSpec(spec, dtype))


def _choice(x, one: float, zero: float, dtype) -> SavedTensors:
    """Return a copy of bools, which are restored as one of two numbers."""
    return computed_from(partial(_chosen, one, zero, dtype), (_flags(x),), dtype)


def _chosen(one, zero, dtype, flags) -> torch.Tensor:
    return torch.full_like(flags, zero, dtype=dtype).masked_fill_(flags, one)


def _two_valued(x) -> SavedTensors | None:
    """Copy 0 and a positive number, as the factor of dropout. On a GPU it stays as it is."""
    if x.is_cuda or x.dtype not in FLOATING:
        return None
    value = x.amax()
    if not ((x == 0) | (x == value)).all():
        return None
    return _choice(x != 0, value.item(), 0.0, x.dtype)


@lru_cache(maxsize=256)
def inside_rule(least: float | None, greatest: float | None) -> ExactRule:
    """Return the rule for torch.clamp, whose gradient depends only on which elements are in an interval."""
    return ExactRule(partial(_inside, least, greatest))


def _inside(least, greatest, x) -> SavedTensors:
    if least is None or greatest is None:
        point = math.inf if greatest is None else -math.inf
    else:
        most = torch.finfo(x.dtype).max
        point = (max(least, -most) + min(greatest, most)) / 2
    # NaN is in no interval.
    return _choice(clamp.is_inside(x, least, greatest), point, math.nan, x.dtype)


def _indices(x) -> SavedTensors | None:
    """Copy indices, int64, in the narrowest dtype that holds them. On a GPU the host would have to wait."""
    if x.dtype is not torch.int64 or x.is_cuda:
        return None
    least, greatest = x.aminmax()
    if least < 0 or integers.dtype_of(int(greatest) + 1) is x.dtype:
        return None
    return integers.narrow(x, int(greatest) + 1)


class _SizeSpec(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def dequantize(self, tensors) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.size)


def _size(x) -> SavedTensors:
    return SavedTensors((), _SizeSpec(tuple(x.shape), x.dtype, x.device))


def _sigmoid_of_derivative(derivative):
    """Return the s <= 1/2 with the given derivative s (1 - s) of a sigmoid."""
    return 2 * derivative / (1 + (1 - 4 * derivative).clamp(min=0).sqrt())


def _tanh_of_derivative(derivative):
    return (1 - derivative).clamp(min=0).sqrt()


LINEAR = LinearRule()
NAMED = LinearRule(takes_constants=True)
"""The rule for tensors of autograd Functions that the user names, whose own results need no gradients."""
EXPONENTIAL = ExponentialRule()
SIGMOID = DerivativeRule(lambda s: s * (1 - s), _sigmoid_of_derivative)
TANH = DerivativeRule(lambda t: 1 - t * t, _tanh_of_derivative)
MASK = ExactRule(lambda x: _flags(x, x.dtype) if x.dtype is torch.bool else None)
POSITIVE = ExactRule(lambda x: _flags(x > 0, x.dtype))
"""The rule for an argument on whose signs alone the gradient depends, as that of ReLU."""
INDEX = ExactRule(_indices, 16)
SIZE = ExactRule(_size, 0)
"""The rule for an argument on whose size alone the gradient depends, so that no tensor is saved."""
TWO_VALUED = ExactRule(_two_valued)
"""The rule for a factor of a product that needs no gradient."""

_ARGUMENTS = {
    LINEAR: (
        "Mul: self other, Mm: self mat2, Bmm: self mat2, Addmm: mat1 mat2, Baddbmm: batch1 batch2, Addbmm: batch1 batch2, "
        "Mv: self vec, Dot: self tensor, Addmv: mat vec, Addr: vec1 vec2, Linear: input weight, Trilinear: i1 i2 i3, "
        "Convolution: input, GroupedMm: self mat2, Addcmul: tensor1 tensor2, Addcdiv: tensor1, Div: self, Var: self, "
        "VarMean: self, Std: self"
    ),
    EXPONENTIAL: "Exp: result",
    SIGMOID: "Sigmoid: result",
    TANH: "Tanh: result",
    MASK: (
        "Where: condition, MaskedFill: mask, MaskedScatter: mask, MaskedSelect: mask, NativeDropout: result1, "
        "FakeQuantizePerTensorAffineCachemask: mask, FakeQuantizePerTensorAffineCachemaskTensorQparams: mask, "
        "FakeQuantizePerChannelAffineCachemask: mask, FusedMovingAvgObsFqHelper: mask"
    ),
    POSITIVE: "Relu: result",
    INDEX: (
        "Gather: index, Index: indices, IndexSelect: index, IndexAdd: index, IndexPut: indices, Scatter: index, "
        "ScatterAdd: index, Embedding: indices, Sort: indices, Topk: indices"
    ),
    SIZE: "Gather: self, MaskedSelect: self, IndexAdd: source",
}
"""{rule: the arguments that it holds for, as "node: arguments"}. A node stands for all overloads: "Mul" for MulBackward0."""


def _by_argument() -> dict[tuple[str, str], Rule]:
    found = {}
    for rule, text in _ARGUMENTS.items():
        for entry in text.split(", "):
            node, _, names = entry.partition(": ")
            found |= dict.fromkeys(((node, name) for name in names.split()), rule)
    return found


RULES = _by_argument()
"""{(node without "Backward<number>", argument): rule}."""


_POINTWISE = "MulBackward", "DivBackward", "AddcmulBackward", "AddcdivBackward"


def is_broadcast(node, x: torch.Tensor) -> bool:
    """Return whether x is a factor that is repeated along the result, so that each element changes many of the gradient."""
    return node.name().startswith(_POINTWISE) and [*x.shape] != [*node._input_metadata[0].shape]


def rule_of(node, argument: str) -> Rule | None:
    """Return the rule for an argument that an autograd node has saved, or None."""
    name, _, number = node.name().partition("Backward")
    if not number.isdigit():
        return None
    if (name, argument) == ("Pow", "self"):
        # The derivative of x^2 is linear in x; that of other powers is not.
        exponent = getattr(node, "_saved_exponent", None)
        return LINEAR if isinstance(exponent, int | float) and exponent == 2 else None
    if (name, argument) in (("Clamp", "self"), ("ClampMin", "self"), ("ClampMax", "self")):
        ends = getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)
        # Ends may be tensors too.
        are_numbers = all(end is None or isinstance(end, int | float) for end in ends)
        if not are_numbers or ends == (None, None):
            return None
        return inside_rule(*ends)
    return RULES.get((name, argument))
