"""Activations whose results later layers of a converted model compute again instead of saving them (docs/decisions/0021).

The layer after the activation f computes f(x^) from a copy of x. tanh and sigmoid save a copy of the result. An f of
two slopes saves 1 bit for each element, with which f of a norm's copy is exact in the mean.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fewbit.runtime.format import layout
from fewbit.runtime.format.channels import usual_features
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.format.groups import LEAST_FEATURES
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.ops import activation_ops
from fewbit.runtime.ops.torch_functions import FORWARD, IN_PLACE
from fewbit.runtime.quantizers import computed, copies
from fewbit.runtime.saved.saving_function import SavingFunction

TWO_VALUED = frozenset(
    "relu relu6 leaky_relu threshold hardtanh hardsigmoid hardshrink softshrink rrelu identity".split()
)
"""The functions whose derivative has at most two values, which 1 bit represents exactly."""
ANY_SCALE = frozenset({"relu_squared", "tanhshrink"})
"""The functions whose derivative is 0 at 0 and grows with |x|, so that no table represents them at all scales."""
_aten = torch.ops.aten
DERIVATIVES = {
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": partial(_aten.gelu_backward, approximate="tanh"),
    "mish": _aten.mish_backward,
    "hardswish": _aten.hardswish_backward,
}
"""{function: torch's function of (gradient, x) that returns the gradient times f'(x)}; autograd computes the others."""
FROM_RESULT = {"tanh": _aten.tanh_backward, "sigmoid": _aten.sigmoid_backward}
"""{function: the same of (gradient, f(x))}."""

OF_HEADS = frozenset({*FROM_RESULT, "softplus"})
"""The functions that often compute a network's few results, by which losses may divide."""


def keeps_copy(x: Tensor, function: str) -> bool:
    """Return whether an activation saves a copy of its input x in place of codes.

    Codes take fewer bytes for parameters, such as a temperature, and for a few elements.
    """
    if function in TWO_VALUED or (type(x) is not Tensor and isinstance(x, torch.nn.Parameter)):
        return False
    return x.numel() >= LEAST_FEATURES


class CopiedActivation(SavingFunction):
    """Computes f(x) and saves a quantized copy of x, from which later layers compute f(x) again, or a copy of f(x)."""

    @staticmethod
    def forward(ctx, x, function, parameters, inplace, quantizer):
        features = usual_features(x.dim())
        ctx.activation = function, parameters
        if function in FROM_RESULT:
            y = FORWARD[function](x)
            copy = quantizer.quantize(y, features=features)
            if copy.trace_anchor is None:
                copies.want_result(ctx, quantizer.context, y)
            return copies.keep(ctx, y, copy=copy)
        copy = quantizer.quantize(x, features=features)
        if inplace:
            y = IN_PLACE[function](x, *parameters)
            ctx.mark_dirty(x)
        else:
            y = FORWARD[function](x, *parameters)
        computed.share_result(
            quantizer, y, partial(_result, function, parameters), (copy,), changes=inplace
        )
        return copies.keep(ctx, y, copy=copy)

    @staticmethod
    def backward(ctx, grad):
        function, parameters = ctx.activation
        if function in FROM_RESULT:
            grad = FROM_RESULT[function](grad, copies.result_or_copy(ctx, "copy"))
        else:
            grad = times_derivative(grad, copies.Kept(ctx).values("copy"), function, parameters)
        return grad, None, None, None, None


def times_derivative(grad: Tensor, x: Tensor, function: str, parameters: tuple) -> Tensor:
    """Return grad * f'(x)."""
    if function in DERIVATIVES:
        return DERIVATIVES[function](grad, x)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        # Given the gradient of a tensor, `torch.autograd.grad` would import sympy, which takes long.
        product = (FORWARD[function](x, *parameters) * grad).sum()
    return torch.autograd.grad(product, x)[0]


def _result(function, parameters, x):
    return FORWARD[function](x, *parameters)


def is_recomputed(function: str, encoding: Encoding, dtype: torch.dtype) -> bool:
    """Return whether an activation's result can be computed from a copy and the codes of its input."""
    fits = function in _SIDES and encoding.bits == 1 and not encoding.unbiased
    return fits and dtype != torch.float64


def from_codes(x: Tensor, function: str, parameters: tuple, encoding: Encoding):
    """Return a function of (x, packed codes of x) that computes an activation's result.

    x is the activation's input, or its result if that has overwritten the input.
    """
    stride = None if x.is_contiguous() else layout.dense_stride(x)
    return partial(_from_side, function, parameters, encoding, stride)


_SIDES = {  # {function: its values where the derivative is 0, from its parameters}
    "relu": lambda: None,
    "leaky_relu": lambda slope: None,
    "relu6": lambda: (0.0, 6.0),
    "hardtanh": lambda low, high: (low, high),
}


def _from_side(function, parameters, encoding, stride, x, codes):
    ends = _SIDES[function](*parameters)
    if ends is None:
        return _times_slope(x, codes, encoding, stride)
    slope = _times_slope(x.new_ones(()).expand(x.shape), codes, encoding, stride)
    # On a CPU, `torch.where` takes several times as long.
    end = (x - sum(ends) / 2).sign_().mul_(max(map(abs, ends))).clamp_(*ends)
    return end.lerp_(x, slope)


def _times_slope(x, codes, encoding, stride):
    if is_plain(x):
        return activation_ops.decode_mul(x, codes, encoding, stride)
    stride = stride or layout.contiguous_stride(x.shape)
    return activation_ops.decode_mul_op(x, codes, encoding.text, stride)
