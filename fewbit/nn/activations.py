"""Activation modules with torch.nn's signatures plus `bits` and `table`.

Each is a subclass of torch's own module, has no parameters, no buffers and no `state_dict` keys, and is
otherwise what `fewbit.functional` says. In evaluation mode torch's own function runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewbit import functional as F
from fewbit.nn.guarded import Guarded
from fewbit.runtime.activations.tables import check_choice
from fewbit.runtime.interop.module_calls import SESSION
from fewbit.runtime.saved.session import PATH
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
    """What every module here has besides torch's: `bits`, `table`, and both in its repr."""

    bits: int
    table: Table | None

    def _keep(self, bits: int, table: Table | None) -> None:
        check_choice(bits, table)
        self.bits = bits
        self.table = table

    @property
    def _kept_bits(self) -> int | None:
        """None, torch's own function, in evaluation mode: gradients asked for there are to be exact."""
        return self.bits if self.training else None

    def _run(self, function, input, *arguments):
        """function(input, *arguments), with what this module keeps; in a converted model it is known by its path there."""
        settings = {"bits": self._kept_bits, "table": self.table}
        session = None if torch.compiler.is_compiling() else vars(self).get(SESSION)
        if session is None or session.policy is None or not self.training:
            return function(input, *arguments, **settings)
        path = vars(self)[PATH]
        if self.table is None:
            settings["bits"] = session.activation_bits(path, self.bits, input)
        with session.activation(path):
            return function(input, *arguments, **settings)

    def extra_repr(self) -> str:
        ours = f"bits={self.bits}" if self.table is None else f"table={self.table!r}"
        return ", ".join(filter(None, [super().extra_repr(), ours]))


class ReLU(_FewBit, nn.ReLU):
    """torch.nn.ReLU; 1 bit is exact."""

    def __init__(self, inplace: bool = False, *, bits: int = 1, table: Table | None = None):
        super().__init__(inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.relu, input, self.inplace)


class ReLU6(_FewBit, nn.ReLU6):
    """torch.nn.ReLU6; 1 bit is exact."""

    def __init__(self, inplace: bool = False, *, bits: int = 1, table: Table | None = None):
        super().__init__(inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.relu6, input, self.inplace)


class LeakyReLU(_FewBit, nn.LeakyReLU):
    """torch.nn.LeakyReLU; 1 bit is exact."""

    def __init__(
        self,
        negative_slope: float = 0.01,
        inplace: bool = False,
        *,
        bits: int = 1,
        table: Table | None = None,
    ):
        super().__init__(negative_slope, inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.leaky_relu, input, self.negative_slope, self.inplace)


class Threshold(_FewBit, nn.Threshold):
    """torch.nn.Threshold; 1 bit is exact."""

    def __init__(
        self,
        threshold: float,
        value: float,
        inplace: bool = False,
        *,
        bits: int = 1,
        table: Table | None = None,
    ):
        super().__init__(threshold, value, inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.threshold, input, self.threshold, self.value, self.inplace)


class Hardtanh(_FewBit, nn.Hardtanh):
    """torch.nn.Hardtanh; 1 bit is exact."""

    def __init__(
        self,
        min_val: float = -1.0,
        max_val: float = 1.0,
        inplace: bool = False,
        min_value: float | None = None,
        max_value: float | None = None,
        *,
        bits: int = 1,
        table: Table | None = None,
    ):
        super().__init__(min_val, max_val, inplace, min_value, max_value)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.hardtanh, input, self.min_val, self.max_val, self.inplace)


class Hardsigmoid(_FewBit, nn.Hardsigmoid):
    """torch.nn.Hardsigmoid; 1 bit is exact."""

    def __init__(self, inplace: bool = False, *, bits: int = 1, table: Table | None = None):
        super().__init__(inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.hardsigmoid, input, self.inplace)


class Hardshrink(_FewBit, nn.Hardshrink):
    """torch.nn.Hardshrink; 1 bit is exact."""

    def __init__(self, lambd: float = 0.5, *, bits: int = 1, table: Table | None = None):
        super().__init__(lambd)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.hardshrink, input, self.lambd)


class Softshrink(_FewBit, nn.Softshrink):
    """torch.nn.Softshrink; 1 bit is exact."""

    def __init__(self, lambd: float = 0.5, *, bits: int = 1, table: Table | None = None):
        super().__init__(lambd)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.softshrink, input, self.lambd)


class RReLU(_FewBit, nn.RReLU):
    """torch.nn.RReLU; 1 bit is exact, in training too, where its random slopes are drawn again."""

    def __init__(
        self,
        lower: float = 1.0 / 8.0,
        upper: float = 1.0 / 3.0,
        inplace: bool = False,
        *,
        bits: int = 1,
        table: Table | None = None,
    ):
        super().__init__(lower, upper, inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.rrelu, input, self.lower, self.upper, self.training, self.inplace)


class GELU(_FewBit, nn.GELU):
    """torch.nn.GELU; approximate: "none" or "tanh"."""

    def __init__(self, approximate: str = "none", *, bits: int = 3, table: Table | None = None):
        super().__init__(approximate)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.gelu, input, self.approximate)


class ELU(_FewBit, nn.ELU):
    """torch.nn.ELU."""

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int = 3,
        table: Table | None = None,
    ):
        super().__init__(alpha, inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.elu, input, self.alpha, self.inplace)


class CELU(_FewBit, nn.CELU):
    """torch.nn.CELU."""

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int = 3,
        table: Table | None = None,
    ):
        super().__init__(alpha, inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.celu, input, self.alpha, self.inplace)


class SELU(_FewBit, nn.SELU):
    """torch.nn.SELU."""

    def __init__(self, inplace: bool = False, *, bits: int = 3, table: Table | None = None):
        super().__init__(inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.selu, input, self.inplace)


class SiLU(_FewBit, nn.SiLU):
    """torch.nn.SiLU."""

    def __init__(self, inplace: bool = False, *, bits: int = 3, table: Table | None = None):
        super().__init__(inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.silu, input, self.inplace)


class Mish(_FewBit, nn.Mish):
    """torch.nn.Mish."""

    def __init__(self, inplace: bool = False, *, bits: int = 3, table: Table | None = None):
        super().__init__(inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.mish, input, self.inplace)


class Hardswish(_FewBit, nn.Hardswish):
    """torch.nn.Hardswish."""

    def __init__(self, inplace: bool = False, *, bits: int = 3, table: Table | None = None):
        super().__init__(inplace)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.hardswish, input, self.inplace)


class Sigmoid(_FewBit, nn.Sigmoid):
    """torch.nn.Sigmoid."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.sigmoid, input)


class LogSigmoid(_FewBit, nn.LogSigmoid):
    """torch.nn.LogSigmoid."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.logsigmoid, input)


class Tanh(_FewBit, nn.Tanh):
    """torch.nn.Tanh."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.tanh, input)


class Tanhshrink(_FewBit, nn.Tanhshrink):
    """torch.nn.Tanhshrink."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.tanhshrink, input)


class Softsign(_FewBit, nn.Softsign):
    """torch.nn.Softsign."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.softsign, input)


class Softplus(_FewBit, nn.Softplus):
    """torch.nn.Softplus."""

    def __init__(
        self,
        beta: float = 1.0,
        threshold: float = 20.0,
        *,
        bits: int = 3,
        table: Table | None = None,
    ):
        super().__init__(beta, threshold)
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.softplus, input, self.beta, self.threshold)


class QuickGELU(_FewBit, nn.Module):
    """transformers' QuickGELUActivation."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.quick_gelu, input)


class FastGELU(_FewBit, nn.Module):
    """transformers' FastGELUActivation."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.gelu_fast, input)


class ClippedGELU(_FewBit, nn.Module):
    """transformers' gelu_10: GELU clipped to [-10, 10]."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.gelu_10, input)


class ReLUSquared(_FewBit, nn.Module):
    """transformers' ReLUSquaredActivation; see `fewbit.functional.relu_squared`."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.relu_squared, input)


class SqrtSoftplus(_FewBit, nn.Module):
    """transformers' sqrtsoftplus."""

    def __init__(self, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.sqrtsoftplus, input)


class Laplace(_FewBit, nn.Module):
    """transformers' LaplaceActivation."""

    def __init__(
        self,
        mu: float = 0.707107,
        sigma: float = 0.282095,
        *,
        bits: int = 3,
        table: Table | None = None,
    ):
        super().__init__()
        self.mu = mu
        self.sigma = sigma
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.laplace, input, self.mu, self.sigma)


class Pointwise(_FewBit, nn.Module):
    """The layer of a pointwise callable that has no parameters that need a gradient; see `fewbit.functional.pointwise`.

    Compiled code keeps the table that it was compiled with, also if the callable changes later.
    """

    def __init__(self, function, *, bits: int = 3, table: Table | None = None):
        super().__init__()
        self.function = function
        self._keep(bits, table)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(F.pointwise, input, self.function)
