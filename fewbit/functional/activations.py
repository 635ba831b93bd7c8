"""Activations with torch.nn.functional's signatures plus `bits` and `table`.

In the backward pass a step function q replaces the derivative: the gradient is `q(input) * grad` (Few-bit Backward, Novikov et al., ICML
2023; docs/concepts/solver.md). docs/reference/api/functional.md describes the arguments, sizes and errors that all functions share. If a
second derivative is requested, the backward pass raises a GradientError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fewbit.config import ACTIVATION_BITS
from fewbit.errors import FunctionError
from fewbit.functional.prelu import RandomSlopes
from fewbit.runtime.activations.apply import (
    apply,
    apply_callable,
    needs_grad,
    refuse_dtype,
)
from fewbit.runtime.activations.callable_tables import callable_encoding_text, name_of
from fewbit.runtime.activations.tables import check_choice
from fewbit.runtime.format.tensor_checks import FLOATING
from fewbit.runtime.interop import VERSION
from fewbit.runtime.interop.random_replay import can_replay
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.saved.saving_function import may_overwrite
from fewbit.table import Table

__all__ = [
    "celu",
    "elu",
    "gelu",
    "gelu_10",
    "gelu_fast",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "identity",
    "laplace",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "pointwise",
    "quick_gelu",
    "relu",
    "relu6",
    "relu_squared",
    "rrelu",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "sqrtsoftplus",
    "tanh",
    "tanhshrink",
    "threshold",
]


# -- derivatives with two values: 1 bit represents them exactly, so no more is saved --------------------------


def relu(
    input: Tensor, inplace: bool = False, *, bits: int | None = 1, table: Table | None = None
) -> Tensor:
    """Compute torch.nn.functional.relu and save 1 bit per element."""
    return apply(input, "relu", (), bits, table, inplace)


def relu6(
    input: Tensor, inplace: bool = False, *, bits: int | None = 1, table: Table | None = None
) -> Tensor:
    """Compute torch.nn.functional.relu6 and save 1 bit per element."""
    return apply(input, "relu6", (), bits, table, inplace)


def leaky_relu(
    input: Tensor,
    negative_slope: float = 0.01,
    inplace: bool = False,
    *,
    bits: int | None = 1,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.leaky_relu and save 1 bit per element."""
    return apply(input, "leaky_relu", (negative_slope,), bits, table, inplace)


def threshold(
    input: Tensor,
    threshold: float,
    value: float,
    inplace: bool = False,
    *,
    bits: int | None = 1,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.threshold and save 1 bit per element."""
    return apply(input, "threshold", (threshold, value), bits, table, inplace)


def hardtanh(
    input: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = 1,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.hardtanh and save 1 bit per element."""
    return apply(input, "hardtanh", (min_val, max_val), bits, table, inplace)


def hardsigmoid(
    input: Tensor, inplace: bool = False, *, bits: int | None = 1, table: Table | None = None
) -> Tensor:
    """Compute torch.nn.functional.hardsigmoid and save 1 bit per element."""
    return apply(input, "hardsigmoid", (), bits, table, inplace)


def hardshrink(
    input: Tensor, lambd: float = 0.5, *, bits: int | None = 1, table: Table | None = None
) -> Tensor:
    """Compute torch.nn.functional.hardshrink and save 1 bit per element."""
    return apply(input, "hardshrink", (lambd,), bits, table)


def softshrink(
    input: Tensor, lambd: float = 0.5, *, bits: int | None = 1, table: Table | None = None
) -> Tensor:
    """Compute torch.nn.functional.softshrink and save 1 bit per element."""
    return apply(input, "softshrink", (lambd,), bits, table)


def rrelu(
    input: Tensor,
    lower: float = 1.0 / 8.0,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    inplace: bool = False,
    *,
    bits: int | None = 1,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.rrelu and save 1 bit per element.

    If `training` is set, the state of torch's random generator is saved too (5056 bytes on the CPU, 16 on CUDA), from
    which the backward pass draws the same slopes: the gradient equals torch's. If the state cannot be read (under
    torch.compile, during the capture of a CUDA graph, on other devices), torch's own function runs.
    """
    if training:
        if (
            bits is None
            or not needs_grad(input)
            or not can_replay(input)
            or (inplace and not may_overwrite(input))
        ):
            return torch.nn.functional.rrelu(input, lower, upper, training=True, inplace=inplace)
        return RandomSlopes.apply(input, lower, upper, inplace)
    return apply(input, "rrelu", (lower, upper), bits, table, inplace)


# -- smooth derivatives ---------------------------------------------------------------------------------------


def gelu(
    input: Tensor,
    approximate: str = "none",
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.gelu, with `approximate` "none" or "tanh", and save `bits` bits per element."""
    if approximate not in ("none", "tanh"):
        hint = "; bits are given by name, as gelu(x, bits=3)" * isinstance(approximate, int)
        raise FunctionError(f"approximate: expected 'none' or 'tanh', got {approximate!r}{hint}")
    function = "gelu" if approximate == "none" else "gelu_tanh"
    return apply(input, function, (), bits, table)


def elu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.elu and save `bits` bits per element."""
    return apply(input, "elu", (alpha,), bits, table, inplace)


def celu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.celu and save `bits` bits per element."""
    return apply(input, "celu", (alpha,), bits, table, inplace)


def selu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.selu and save `bits` bits per element."""
    return apply(input, "selu", (), bits, table, inplace)


def silu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.silu and save `bits` bits per element."""
    return apply(input, "silu", (), bits, table, inplace)


def mish(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.mish and save `bits` bits per element."""
    return apply(input, "mish", (), bits, table, inplace)


def hardswish(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.hardswish and save `bits` bits per element."""
    return apply(input, "hardswish", (), bits, table, inplace)


def sigmoid(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute torch.sigmoid and save `bits` bits per element."""
    return apply(input, "sigmoid", (), bits, table)


def logsigmoid(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute torch.nn.functional.logsigmoid and save `bits` bits per element."""
    return apply(input, "logsigmoid", (), bits, table)


def tanh(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute torch.tanh and save `bits` bits per element."""
    return apply(input, "tanh", (), bits, table)


def tanhshrink(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute torch.nn.functional.tanhshrink and save a rotated copy of the input with `bits` bits per element.

    No few levels represent the derivative, about input**2 near 0, at all scales. Codes are saved if `table` is given.
    """
    return apply(input, "tanhshrink", (), bits, table)


def softsign(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute torch.nn.functional.softsign and save `bits` bits per element."""
    return apply(input, "softsign", (), bits, table)


def softplus(
    input: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute torch.nn.functional.softplus and save `bits` bits per element."""
    return apply(input, "softplus", (beta, threshold), bits, table)


def quick_gelu(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute transformers' quick_gelu, x sigmoid(1.702 x)."""
    return apply(input, "quick_gelu", (), bits, table)


def relu_squared(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute transformers' relu2, relu(x)**2, and save a rotated copy of the input, or codes, as `tanhshrink`."""
    return apply(input, "relu_squared", (), bits, table)


def gelu_fast(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute transformers' gelu_fast, an approximation of gelu by tanh."""
    return apply(input, "gelu_fast", (), bits, table)


def gelu_10(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute transformers' gelu_10, which is gelu clipped to [-10, 10]."""
    return apply(input, "gelu_10", (), bits, table)


def sqrtsoftplus(
    input: Tensor, *, bits: int | None = ACTIVATION_BITS, table: Table | None = None
) -> Tensor:
    """Compute transformers' sqrtsoftplus, sqrt(softplus(x))."""
    return apply(input, "sqrtsoftplus", (), bits, table)


def laplace(
    input: Tensor,
    mu: float = 0.707107,
    sigma: float = 0.282095,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Compute transformers' laplace, (1 + erf((x - mu) / (sigma sqrt(2)))) / 2."""
    return apply(input, "laplace", (mu, sigma), bits, table)


def identity(input: Tensor) -> Tensor:
    """Return the input itself. The derivative is 1, so nothing is saved."""
    return input


_IDS_ARE_GUARDED = VERSION >= (2, 13)
"""True if torch.compile compiles code anew for another id of a callable in it. torch 2.11 does not."""


# -- callables -------------------------------------------------------------------------------------------------


def pointwise(
    input: Tensor,
    function: Callable,
    *,
    bits: int | None = ACTIVATION_BITS,
    table: Table | None = None,
) -> Tensor:
    """Apply a user's pointwise function to a tensor, and save few-bit codes for the derivative.

    Only the input gets a gradient. The table is made when the callable is first used. If numbers that the callable uses
    change later, pass another object, such as `functools.partial(function)`.

    Args:
        input: a floating tensor of any shape and strides.
        function: a callable, or module, that takes a tensor and returns a tensor (see `fewbit.solve`).
        bits: bits per code, 1 to 8, or None to run the callable with torch's own derivative.
        table: the table to use. By default each process makes its own.

    Raises:
        FunctionError: A parameter of the callable needs a gradient, the callable returns different results for the same
            input, or the solver cannot make a table for it.
        InputError: The input is complex and needs a gradient.
    """
    if bits is None:
        return function(input)
    check_choice(bits, table)
    if not needs_grad(input):
        return function(input)
    if input.dtype not in FLOATING:
        refuse_dtype(input, name_of(function))
    if torch.compiler.is_compiling():
        # torch.compile would use one compiled graph for all functions with the same code, even if they enclose
        # different values. The call of id() makes it compile each function on its own, with this function's table.
        if not _IDS_ARE_GUARDED:
            raise FunctionError(
                "expected torch 2.13 or newer to compile a callable, got an older one"
            )
        id(function)
    encoding = callable_encoding_text(
        function, bits, table, input.device, input.dtype, is_plain(input)
    )
    return apply_callable(input, function, encoding)
