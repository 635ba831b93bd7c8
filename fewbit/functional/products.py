"""Products of two activations, whose factors are saved quantized: `matmul`, `mul` and gated units.

`matmul` and `mul` have gradients that are exact in expectation, because each gradient is linear in the other factor.

Gated units compute act(gate) * up. The backward pass of SwiGLU and GEGLU computes act and its derivative from the
dequantized gate^, so it is not linear in the copies. The roundings of gate^ and up^ are independent, and each copy is exact
in expectation. With y = act(gate) up and its gradient g, therefore, elementwise,

    grad_up   = g act(gate)         E[grad^] - grad = g act''(gate) Var[gate^] / 2
    grad_gate = g up act'(gate)     E[grad^] - grad = g up act'''(gate) Var[gate^] / 2

up to the first term that does not vanish (the second-order term of a Taylor series, as ActNN, long version, appendix B.2,
has it for norms). Var[x^] is the variance that rounding adds: f (1 - f) step^2 for an element that lies a fraction f of a
step above a level. For normal gate and up (SwiGLU, 256 elements, median of 96 draws of both) the bias is 7, 2 and 0.4 % of
gate's gradient at 2, 3 and 4 bits, and 20, 3.6 and 0.8 % of up's.

ReGLU has no such bias. It saves relu(gate) in place of gate, and relu's derivative beside it, in 1 bit. Both gradients are
linear in the copies, and therefore exact in expectation. From gate^ alone, the derivative of each element within a step of
0 would be a matter of chance. For normal elements that is an error of several percent at 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function

from fewbit.config import GROUP_SIZE
from fewbit.errors import InputError
from fewbit.functional.activations import relu
from fewbit.runtime.interop.autocast import as_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import (
    DEFAULT_BITS,
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.saved.single_backward import once_differentiable

__all__ = ["geglu", "matmul", "mul", "reglu", "swiglu"]


# -- matmul and mul --------------------------------------------------------------------------------


def matmul(
    input: Tensor,
    other: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """Compute torch.matmul and save both factors quantized.

    Both gradients are exact in expectation. A leaf of the graph, such as a parameter, is saved as it is. If only one factor
    needs a gradient, torch's own function runs.

    Args:
        input: two dimensions or more, floating.
        other: two dimensions or more, floating; both broadcast as in torch.
        bits: 1 to 8, of an element of a copy.
        group_size: the number of elements that share a minimum and a range, a multiple of 32.
        quantizer: makes the copies in place of one of `bits` and `group_size`.

    Returns:
        torch's result.

    Raises:
        InputError: for other bits or group sizes.
    """
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not _are_differentiated(input, other) or min(input.dim(), other.dim()) < 2:
        return torch.matmul(input, other)
    return _Matmul.apply(input, other, quantizer)


def mul(
    input: Tensor,
    other: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """Compute torch.mul of floating tensors of any shapes that broadcast; all else is as in `matmul`."""
    quantizer = quantizer or quantizer_of(bits, group_size)
    if not _are_differentiated(input, other):
        return torch.mul(input, other)
    return _Mul.apply(input, other, quantizer)


def _are_differentiated(input, other) -> bool:
    return input.requires_grad and other.requires_grad and is_differentiated(input, other)


class _Product(Function):
    """The base of `_Matmul` and `_Mul`: saves factors, quantized unless they exist anyway."""

    @staticmethod
    def save(ctx, y, a, b, quantizer):
        ctx.inputs = (a.shape, a.dtype), (b.shape, b.dtype)
        factors = [
            copies.unquantized(factor) if factor.is_leaf else quantizer.quantize(factor)
            for factor in (a, b)
        ]
        return copies.save(ctx, y, factors)

    @staticmethod
    def in_shape(ctx, *grads):
        """Return gradients in the factors' own shapes and dtypes."""
        pairs = zip(grads, ctx.inputs, strict=True)
        return *(grad.sum_to_size(size).to(dtype) for grad, (size, dtype) in pairs), None


class _Matmul(_Product):
    @staticmethod
    def forward(ctx, a, b, quantizer):
        with as_torch_casts():
            y = torch.matmul(a, b)
        return _Product.save(ctx, y, a, b, quantizer)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (a, b), _ = copies.load(ctx, grad.dtype)
        return _Product.in_shape(ctx, grad @ b.transpose(-2, -1), a.transpose(-2, -1) @ grad)


class _Mul(_Product):
    @staticmethod
    def forward(ctx, a, b, quantizer):
        return _Product.save(ctx, a * b, a, b, quantizer)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (a, b), _ = copies.load(ctx, grad.dtype)
        return _Product.in_shape(ctx, grad * b, grad * a)


# -- gated units -----------------------------------------------------------------------------------


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """Compute silu(gate) * up (Shazeer, "GLU variants improve Transformer", section 2), and save both factors quantized.

    Everything else is computed again from the two copies. The module's docstring has the gradients' bias.

    Args:
        gate: floating.
        up: floating, of a shape that broadcasts with gate's. It is saved if gate needs a gradient.
        bits: 1 to 8, of an element of a copy.
        group_size: the number of elements that share a minimum and a range, a multiple of 32.
        quantizer: makes the copies in place of one of `bits` and `group_size`.

    Returns:
        The product, which equals torch's to the bit.

    Raises:
        InputError: for other bits or group sizes.
    """
    return gated(gate, up, "silu", quantizer=quantizer or quantizer_of(bits, group_size))


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: str = "none",
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """Compute gelu(gate, approximate) * up; all else is as in `swiglu`.

    Raises:
        InputError: `approximate` is neither "none" nor "tanh", or as `swiglu`.
    """
    if approximate not in ("none", "tanh"):
        raise InputError(f"expected none or tanh for approximate, got {approximate!r}")
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return gated(gate, up, name, quantizer=quantizer or quantizer_of(bits, group_size))


def reglu(
    gate: Tensor,
    up: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """Compute relu(gate) * up; arguments are as in `swiglu`, but the gradients are exact in expectation.

    The sign of gate is saved in 1 bit, relu(gate) for up's gradient, and up for gate's.
    """
    return gated(gate, up, "relu", quantizer=quantizer or quantizer_of(bits, group_size))


_FORWARD = {
    "silu": torch_functional.silu,
    "gelu": torch_functional.gelu,
    "gelu_tanh": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "relu": torch_functional.relu,
    "identity": lambda x: x,
}
_BACKWARD = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
}


def gated(
    gate: Tensor,
    up: Tensor,
    activation: str,
    function: Callable[[Tensor], Tensor] | None = None,
    *,
    quantizer: Quantizer,
) -> Tensor:
    """Compute act(gate) * up as `swiglu` does.

    Args:
        gate: as in `swiglu`.
        up: as in `swiglu`.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        function: computes the activation in the forward pass in place of torch's function.
        quantizer: makes the copies.

    Returns:
        The product.
    """
    if not is_differentiated(gate, up):
        return (function or _FORWARD[activation])(gate) * up
    if activation == "relu":
        gate, activation, function = relu(gate), "identity", None
    return _Gated.apply(gate, up, activation, function or _FORWARD[activation], quantizer)


class _Gated(Function):
    @staticmethod
    def forward(ctx, gate, up, activation, function, quantizer):
        y = function(gate) * up
        ctx.activation = activation
        ctx.inputs = (gate.shape, gate.dtype), (up.shape, up.dtype)
        needs_gate, needs_up, *_ = ctx.needs_input_grad
        needs_copy = needs_up or activation != "identity"
        gate_copy = quantizer.quantize(gate) if needs_copy else None
        up_copy = quantizer.quantize_independent(up, gate) if needs_gate else None
        return copies.save(ctx, y, (gate_copy, up_copy))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (gate, up), _ = copies.load(ctx)
        (gate_shape, gate_dtype), (up_shape, up_dtype) = ctx.inputs
        grad_gate = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_gate = (grad * up).sum_to_size(gate_shape).to(gate_dtype)
            if ctx.activation != "identity":
                grad_gate = _BACKWARD[ctx.activation](grad_gate, gate)
        if ctx.needs_input_grad[1]:
            activated = _FORWARD[ctx.activation](gate)
            grad_up = (grad * activated).sum_to_size(up_shape).to(up_dtype)
        return grad_gate, grad_up, None, None, None
