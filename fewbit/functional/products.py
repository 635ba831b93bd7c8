"""Products of two tensors, whose factors are saved quantized: `matmul`, `mul` and gated units.

The gradients of `matmul`, `mul` and ReGLU are exact in expectation, because each is linear in the dequantized factors.
Those of the other gated units are biased, because the backward pass computes the activation and its derivative from the
dequantized gate (docs/concepts/layers.md#bias).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from fewbit.config import DEFAULT_BITS, GROUP_SIZE
from fewbit.errors import InputError
from fewbit.functional.activations import relu
from fewbit.runtime.activations.recomputed import DERIVATIVES
from fewbit.runtime.format.groups import LEAST_ELEMENTS
from fewbit.runtime.interop.autocast import with_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.tensor_kinds import check_tensors
from fewbit.runtime.ops.torch_functions import FORWARD
from fewbit.runtime.parallel import shards
from fewbit.runtime.quantizers import computed, copies
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.quantizers.softmax_copies import quantize_factor
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

__all__ = ["geglu", "glu", "matmul", "mul", "reglu", "swiglu"]


# -- matmul and mul --------------------------------------------------------------------------------


def matmul(
    input: Tensor,
    other: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.matmul and save both factors quantized.

    Both gradients are exact in expectation. A leaf of the autograd graph, such as a parameter, and a view of a leaf are
    saved unquantized. If only one factor needs a gradient, torch's own function runs, which saves the other factor
    unquantized. Other arguments and errors are those of `linear`.

    Args:
        input: a floating tensor of two dimensions or more.
        other: a floating tensor of two dimensions or more, whose leading dimensions broadcast as in torch.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    if not _are_differentiated(input, other) or min(input.dim(), other.dim()) < 2:
        return torch.matmul(input, other)
    return _Matmul.apply(input, other, quantizer)


def mul(
    input: Tensor,
    other: Tensor | float,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.mul of floating tensors of any shapes that broadcast, and save both factors quantized.

    Other arguments and the exactness of gradients are as in `matmul`. A factor of less than 1,024 elements that is
    repeated along the other, such as a temperature, is saved unquantized.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    if isinstance(other, int | float):
        check_tensors(input)
        return torch.mul(input, other)
    if shards.runs_on_shards(input):
        y = shards.elementwise(partial(mul, quantizer=quantizer), input, other)
        return torch.mul(input, other) if y is None else y
    if not _are_differentiated(input, other):
        return torch.mul(input, other)
    return _Mul.apply(input, other, quantizer)


def _are_differentiated(input, other) -> bool:
    check_tensors(input, other)
    return input.requires_grad and other.requires_grad and is_differentiated(input, other)


def is_in_memory(x: Tensor) -> bool:
    """Return whether x is a leaf of the autograd graph, such as a parameter, or a view of a parameter."""
    if x.is_leaf or torch.compiler.is_compiling():  # a compiler cannot trace what follows
        return x.is_leaf
    # Results that were computed without gradients may be views of leaves as well.
    return x._is_view() and x._base is not None and x._base.is_leaf and x._base.requires_grad


def is_quantized_product(a: Tensor, b: Tensor) -> bool:
    """Return whether both factors need a gradient, and one of them is no parameter but a result."""
    if shards.is_distributed(a) and torch.is_grad_enabled():
        return a.requires_grad and b.requires_grad
    return _are_differentiated(a, b) and not (is_in_memory(a) and is_in_memory(b))


def in_shapes(grads: Iterable[Tensor], inputs) -> list[Tensor]:
    """Return the gradients of inputs that were broadcast, in the (shape, dtype) of each input."""
    pairs = zip(grads, inputs, strict=True)
    return [grad.sum_to_size(size).to(dtype) for grad, (size, dtype) in pairs]


class _Product(SavingFunction):
    """The base of `_Matmul` and `_Mul`, which saves leaves of the graph unchanged."""

    @staticmethod
    def save(ctx, y, a, b, quantize):
        ctx.inputs = (a.shape, a.dtype), (b.shape, b.dtype)
        first, second = (
            copies.unquantized(factor) if is_in_memory(factor) else quantize(factor)
            for factor in (a, b)
        )
        return copies.keep(ctx, y, a=first, b=second)


class _Matmul(_Product):
    @staticmethod
    def forward(ctx, a, b, quantizer):
        y = with_torch_casts(torch.matmul, a, b)
        return _Product.save(ctx, y, a, b, partial(quantize_factor, quantizer))

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        a, b = kept.values("a", grad.dtype), kept.values("b", grad.dtype)
        grads = grad @ b.transpose(-2, -1), a.transpose(-2, -1) @ grad
        return *in_shapes(grads, ctx.inputs), None


class _Mul(_Product):
    @staticmethod
    def forward(ctx, a, b, quantizer):
        def quantize(factor):
            is_repeated = factor.numel() < min(LEAST_ELEMENTS, max(a.numel(), b.numel()))
            return copies.unquantized(factor) if is_repeated else quantizer.quantize(factor)

        return _Product.save(ctx, a * b, a, b, quantize)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        a, b = kept.values("a", grad.dtype), kept.values("b", grad.dtype)
        return *in_shapes((grad * b, grad * a), ctx.inputs), None


# -- gated units -----------------------------------------------------------------------------------


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute silu(gate) * up and save gate and up quantized (Shazeer, "GLU variants improve Transformer", section 2).

    The gradients are biased (docs/concepts/layers.md#bias). Other arguments and errors are those of `linear`.

    Args:
        gate: a floating tensor of any shape.
        up: a floating tensor of a shape that broadcasts with gate's. It is saved only if gate needs a gradient.

    Returns:
        The product, which equals torch's to the bit.
    """
    return gated(gate, up, "silu", quantizer=quantizer_of(bits, group_size, quantizer))


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: str = "none",
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute gelu(gate, approximate) * up, and save gate and up quantized, as `swiglu`.

    Raises:
        InputError: `approximate` is neither "none" nor "tanh", or `bits` or `group_size` is invalid.
    """
    if approximate not in ("none", "tanh"):
        raise InputError(f"approximate: expected none or tanh, got {approximate!r}")
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return gated(gate, up, name, quantizer=quantizer_of(bits, group_size, quantizer))


def reglu(
    gate: Tensor,
    up: Tensor,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute relu(gate) * up, and save relu(gate) and up quantized and the sign of gate in 1 bit per element.

    Arguments are as in `swiglu`. The gradients are exact in expectation.
    """
    return gated(gate, up, "relu", quantizer=quantizer_of(bits, group_size, quantizer))


def glu(
    input: Tensor,
    dim: int = -1,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.glu and save the input quantized.

    The gradients are biased, as those of `swiglu`. Other arguments and errors are those of `linear`.

    Args:
        input: a floating tensor, whose size along `dim` is even.
        dim: the dimension along which the input is halved.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    if not is_differentiated(input):
        return torch_functional.glu(input, dim)
    return _GLU.apply(input, dim, quantizer)


# The identity of FORWARD copies its input, which is not needed here.
_FORWARD = {**FORWARD, "identity": lambda x: x}


def gated(
    gate: Tensor,
    up: Tensor,
    activation: str,
    function: Callable[[Tensor], Tensor] | None = None,
    *,
    quantizer: Quantizer,
) -> Tensor:
    """Compute activation(gate) * up, and save the same tensors as `swiglu`, or as `reglu` for "relu".

    `activation` is "silu", "gelu", "gelu_tanh" or "relu". `function`, if given, computes it in the forward pass.
    """
    if shards.runs_on_shards(gate):
        local = partial(gated, activation=activation, function=function, quantizer=quantizer)
        y = shards.elementwise(local, gate, up)
        if y is not None:
            return y
    if not is_differentiated(gate, up):
        return (function or _FORWARD[activation])(gate) * up
    if activation == "relu":
        gate, activation, function = relu(gate), "identity", None
    return _Gated.apply(gate, up, activation, function or _FORWARD[activation], quantizer)


def _product(activation, gate, up):
    return _FORWARD[activation](gate) * up


class _Gated(SavingFunction):
    @staticmethod
    def forward(ctx, gate, up, activation, function, quantizer):
        y = function(gate) * up
        ctx.activation = activation
        ctx.inputs = (gate.shape, gate.dtype), (up.shape, up.dtype)
        needs_gate, needs_up, *_ = ctx.needs_input_grad
        needs_copy = needs_up or activation != "identity"
        gate_copy = quantizer.quantize(gate, features=(-1,)) if needs_copy else None
        up_copy = quantizer.quantize_independent(up, gate, features=(-1,)) if needs_gate else None
        if needs_gate and needs_copy:
            compute = partial(_product, activation)
            computed.share_result(quantizer, y, compute, (gate_copy, up_copy))
        return copies.keep(ctx, y, gate=gate_copy, up=up_copy)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        gate, up = kept.values("gate"), kept.values("up")
        (gate_shape, gate_dtype), (up_shape, up_dtype) = ctx.inputs
        grad_gate = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_gate = (grad * up).sum_to_size(gate_shape).to(gate_dtype)
            if ctx.activation != "identity":
                grad_gate = DERIVATIVES[ctx.activation](grad_gate, gate)
        if ctx.needs_input_grad[1]:
            activated = _FORWARD[ctx.activation](gate)
            grad_up = (grad * activated).sum_to_size(up_shape).to(up_dtype)
        return grad_gate, grad_up, None, None, None


class _GLU(SavingFunction):
    @staticmethod
    def forward(ctx, x, dim, quantizer):
        y = torch_functional.glu(x, dim)
        ctx.dim = dim
        return copies.keep(ctx, y, x=quantizer.quantize(x, features=(-1,)))

    @staticmethod
    def backward(ctx, grad):
        x = copies.Kept(ctx).values("x")
        return torch.ops.aten.glu_backward(grad, x, ctx.dim), None, None
