"""Activation modules with torch.nn's signatures plus `bits` and `table`, without parameters, buffers or `state_dict` keys.

An InputError says that `bits`, `inplace` or `approximate` is invalid, and a TableError that `table` is for another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fewbit import functional as F
from fewbit.config import ACTIVATION_BITS
from fewbit.errors import InputError
from fewbit.nn.base import Guarded
from fewbit.printable import shorten
from fewbit.runtime.activations.callable_tables import check_table
from fewbit.runtime.activations.tables import check_choice
from fewbit.runtime.interop.module_calls import GUARD, PATH
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.table import Table

__all__ = [
    "CELU",
    "ClippedGELU",
    "ELU",
    "FastGELU",
    "GELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "Laplace",
    "LeakyReLU",
    "LogSigmoid",
    "Mish",
    "Pointwise",
    "QuickGELU",
    "RReLU",
    "ReLU",
    "ReLU6",
    "ReLUSquared",
    "SELU",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Softshrink",
    "Softsign",
    "SqrtSoftplus",
    "Tanh",
    "Tanhshrink",
    "Threshold",
]


class _FewBit(Guarded):
    bits: int
    table: Table | None
    quantizer: Quantizer | None = None
    """In a converted model, the quantizer of the copy from which the result is computed again."""

    def __init__(self, *args, bits: int = ACTIVATION_BITS, table: Table | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        check_choice(bits, table)
        self._check_own()
        self.bits = bits
        self.table = table
        if table is not None:
            self._check_table()

    def _check_table(self) -> None:
        if not torch.compiler.is_compiling():
            self.forward(torch.empty(0))

    def _check_own(self) -> None:
        """Raise InputError if an argument of torch's class got a number of bits, as in GELU(3)."""
        for name, allowed in (("inplace", (False, True)), ("approximate", ("none", "tanh"))):
            value = getattr(self, name, allowed[0])
            if type(value) is not type(allowed[0]) or value not in allowed:
                expected = " or ".join(map(repr, allowed))
                is_number = isinstance(value, int | float)
                hint = f"; bits are given by name, as {type(self).__name__}(bits=3)" * is_number
                raise InputError(f"{name}: expected {expected}, got {shorten(value)}{hint}")

    def _run(self, function, input, *arguments):
        # Gradients in evaluation mode are exact: None stands for torch's own function.
        bits = self.bits if self.training else None
        if bits is None or torch.compiler.is_compiling():
            return function(input, *arguments, bits=bits, table=self.table)
        table, attributes = self.quantizer if self.table is None else self.table, self.__dict__
        guard = attributes[GUARD] if GUARD in attributes else None
        if guard is None or guard.context.policy is None:
            return function(input, *arguments, bits=bits, table=table)
        context, path = guard.context, attributes[PATH]
        if self.table is None:
            bits = context.activation_bits(path, bits, input)
        return context.run_activation(path, function, input, *arguments, bits=bits, table=table)

    def extra_repr(self) -> str:
        has_copy = self.quantizer is not None and not isinstance(self, TwoValued)
        saved = repr(self.quantizer) if has_copy else f"bits={self.bits}"
        ours = saved if self.table is None else f"table={self.table!r}"
        return ", ".join(filter(None, [super().extra_repr(), ours]))


class TwoValued(_FewBit):
    """The base class of activations whose derivative has two values: codes of 1 bit are exact."""

    def __init__(self, *args, bits: int = 1, table: Table | None = None, **kwargs):
        super().__init__(*args, bits=bits, table=table, **kwargs)


class ReLU(TwoValued, nn.ReLU):
    """A torch.nn.ReLU that computes `fewbit.functional.relu`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.relu, input, self.inplace)


class ReLU6(TwoValued, nn.ReLU6):
    """A torch.nn.ReLU6 that computes `fewbit.functional.relu6`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.relu6, input, self.inplace)


class LeakyReLU(TwoValued, nn.LeakyReLU):
    """A torch.nn.LeakyReLU that computes `fewbit.functional.leaky_relu`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.leaky_relu, input, self.negative_slope, self.inplace)


class Threshold(TwoValued, nn.Threshold):
    """A torch.nn.Threshold that computes `fewbit.functional.threshold`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.threshold, input, self.threshold, self.value, self.inplace)


class Hardtanh(TwoValued, nn.Hardtanh):
    """A torch.nn.Hardtanh that computes `fewbit.functional.hardtanh`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.hardtanh, input, self.min_val, self.max_val, self.inplace)


class Hardsigmoid(TwoValued, nn.Hardsigmoid):
    """A torch.nn.Hardsigmoid that computes `fewbit.functional.hardsigmoid`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.hardsigmoid, input, self.inplace)


class Hardshrink(TwoValued, nn.Hardshrink):
    """A torch.nn.Hardshrink that computes `fewbit.functional.hardshrink`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.hardshrink, input, self.lambd)


class Softshrink(TwoValued, nn.Softshrink):
    """A torch.nn.Softshrink that computes `fewbit.functional.softshrink`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.softshrink, input, self.lambd)


class RReLU(TwoValued, nn.RReLU):
    """A torch.nn.RReLU that computes `fewbit.functional.rrelu`. Gradients are exact."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.rrelu, input, self.lower, self.upper, self.training, self.inplace)


class GELU(_FewBit, nn.GELU):
    """A torch.nn.GELU that computes `fewbit.functional.gelu`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.gelu, input, self.approximate)


class ELU(_FewBit, nn.ELU):
    """A torch.nn.ELU that computes `fewbit.functional.elu`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.elu, input, self.alpha, self.inplace)


class CELU(_FewBit, nn.CELU):
    """A torch.nn.CELU that computes `fewbit.functional.celu`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.celu, input, self.alpha, self.inplace)


class SELU(_FewBit, nn.SELU):
    """A torch.nn.SELU that computes `fewbit.functional.selu`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.selu, input, self.inplace)


class SiLU(_FewBit, nn.SiLU):
    """A torch.nn.SiLU that computes `fewbit.functional.silu`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.silu, input, self.inplace)


class Mish(_FewBit, nn.Mish):
    """A torch.nn.Mish that computes `fewbit.functional.mish`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.mish, input, self.inplace)


class Hardswish(_FewBit, nn.Hardswish):
    """A torch.nn.Hardswish that computes `fewbit.functional.hardswish`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.hardswish, input, self.inplace)


class Sigmoid(_FewBit, nn.Sigmoid):
    """A torch.nn.Sigmoid that computes `fewbit.functional.sigmoid`.

    A loss that divides by probabilities, such as BCELoss, multiplies its error. `compress_` avoids that.
    """

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.sigmoid, input)


class LogSigmoid(_FewBit, nn.LogSigmoid):
    """A torch.nn.LogSigmoid that computes `fewbit.functional.logsigmoid`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.logsigmoid, input)


class Tanh(_FewBit, nn.Tanh):
    """A torch.nn.Tanh that computes `fewbit.functional.tanh`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.tanh, input)


class Tanhshrink(_FewBit, nn.Tanhshrink):
    """A torch.nn.Tanhshrink that computes `fewbit.functional.tanhshrink`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.tanhshrink, input)


class Softsign(_FewBit, nn.Softsign):
    """A torch.nn.Softsign that computes `fewbit.functional.softsign`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.softsign, input)


class Softplus(_FewBit, nn.Softplus):
    """A torch.nn.Softplus that computes `fewbit.functional.softplus`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.softplus, input, self.beta, self.threshold)


class QuickGELU(_FewBit, nn.Module):
    """The QuickGELUActivation of transformers, computed by `fewbit.functional.quick_gelu`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.quick_gelu, input)


class FastGELU(_FewBit, nn.Module):
    """The FastGELUActivation of transformers, computed by `fewbit.functional.gelu_fast`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.gelu_fast, input)


class ClippedGELU(_FewBit, nn.Module):
    """The gelu_10 of transformers, computed by `fewbit.functional.gelu_10`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.gelu_10, input)


class ReLUSquared(_FewBit, nn.Module):
    """The ReLUSquaredActivation of transformers, computed by `fewbit.functional.relu_squared`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.relu_squared, input)


class SqrtSoftplus(_FewBit, nn.Module):
    """The sqrtsoftplus of transformers, computed by `fewbit.functional.sqrtsoftplus`."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.sqrtsoftplus, input)


class Laplace(_FewBit, nn.Module):
    """The LaplaceActivation of transformers, computed by `fewbit.functional.laplace`."""

    def __init__(self, mu: float = 0.707107, sigma: float = 0.282095, **kwargs):
        self.mu, self.sigma = (
            mu,
            sigma,
        )  # first, because the base class checks the table of these parameters
        super().__init__(**kwargs)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.laplace, input, self.mu, self.sigma)


class Pointwise(_FewBit, nn.Module):
    """A module that applies a user's pointwise callable with `fewbit.functional.pointwise`.

    The callable must have no parameters that need a gradient. Compiled code keeps the table with which it was compiled.

    Args:
        function: the callable, which takes a tensor and returns a tensor.
        bits: bits of the code that is saved for each element, 1 to 8.
        table: a `fewbit.Table` for the callable; by default the solver makes one. The table of another function is refused, if
            the table's function is known: here if the callable can be called now, else in the first call.

    Raises:
        InputError: `function` cannot be called, or is a class.
    """

    calls_others = True

    def __init__(self, function: Callable, **kwargs: Any):
        super().__init__(**kwargs)
        if not callable(function) or isinstance(function, type):
            raise InputError(
                f"function: expected a callable that takes a tensor, such as a function or a module, got {shorten(function)}"
            )
        self.function = function
        if self.table is not None:
            check_table(function, self.table)

    def _check_table(self) -> None:
        """Leave the check to the constructor, which has the callable later."""

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.pointwise, input, self.function)
