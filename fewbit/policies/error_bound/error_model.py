"""The error model of each kind of layer: the error D of its gradients as a function of the error of its saved tensor.

D is the squared error of a gradient, and dx^2 is the mean squared error of the elements of the saved tensor. `of_layer`
runs in a layer's backward pass, where gradients and the dequantized tensor are available, and computes a few small
numbers on the device. When they have reached the host, `Part.finish` computes D from them by the formulas in
expectation (docs/concepts/theory/ac_gc.md). For gated units, products, softmax and attention there is no formula, or only one
that asks for too many bits. `of_layer` then returns None, and the probe measures the effect of noise instead.

Some formulas have one dx^2 for all elements, but samples have different bits and so different errors. Let g_n be the
gradient of row n (entry n of dimension 0) of the layer's result, and dx_n^2 the present mean squared error of row n of
the saved tensor. The formulas then use weights dx_n^2 / dx^2:

    sum of |g_n|^2 dx_n^2  =  dx^2 sum of |g_n|^2 (dx_n^2 / dx^2)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor

from fewbit.config import UNIFORM
from fewbit.convert.transformers_norms import _TransformersRMSNorm, scale_of
from fewbit.functional.batch_norm import _BatchNormFunction
from fewbit.functional.convolution import _Convolution
from fewbit.functional.layer_norm import _GroupNorm, _LayerNorm, _RMSNorm
from fewbit.functional.linear import _Linear
from fewbit.functional.prelu import _PReLU
from fewbit.policies.error_bound.formulas import Convolution, convolution_d, norm_input_coefficients
from fewbit.runtime.quantizers.copies import Kept
from fewbit.runtime.quantizers.normalized import AffineResultSpec
from fewbit.runtime.quantizers.spec import PermutedSpec, QuantizedTensorSpec


class Cost(NamedTuple):
    """The squared error of a gradient, (first dx + second dx^2)^2, if a saved tensor has the mean squared error dx^2.

    Args:
        first: the coefficient of dx.
        second: the coefficient of dx^2.
        channels: numbers in proportion to the parts of first^2 that come from each channel (dimension 1); None if all
            are equal, or if there are no channels.
    """

    first: float
    second: float = 0.0
    channels: list[float] | None = None


class Part(NamedTuple):
    """The error model of one gradient of a layer: its squared error as a function of the saved tensor's error.

    Args:
        place: the number of an input of the layer's autograd Function. The gradient is that of this input.
        numbers: 1-D float64 tensors, to be copied to the host.
        finish: a function that returns the `Cost`, given the values of `numbers` as lists and the present mean squared
            error of the saved tensor.
        repeats: usually 1. An instance norm repeats its weight for each sample before it calls the Function, and
            `repeats` is the number of copies. The weight's gradient is the sum over the copies.
    """

    place: int
    numbers: tuple[Tensor, ...]
    finish: Callable[[list[list[float]], float], Cost]
    repeats: int = 1

    def of(self, results) -> Tensor:
        """Return the gradient that this part describes, given all gradients that the layer's backward returned."""
        found = results[self.place]
        return found if self.repeats == 1 else found.view(self.repeats, -1).sum(0)


def of_layer(context, grads, results, errors: Tensor) -> list[Part] | None:
    """Return the error models (`Part`) of a layer's gradients, or None if there is no formula for this kind of layer.

    Args:
        context: the autograd context of the layer's Function, which has saved one quantized tensor.
        grads: the gradients of the layer's results.
        results: the gradients that the layer's backward returned for its inputs.
        errors: (rows,) the sum of squared errors in each row (entry of dimension 0, in storage order) of the
            dequantized tensor.
    """
    formula = _FORMULAS.get(context._forward_cls)
    if formula is None or grads[0] is None:
        return None
    kept = Kept(context)
    spec, _ = kept.copy(_QUANTIZED.get(context._forward_cls, "x"))
    if isinstance(spec, PermutedSpec):
        errors = errors.sum()[None]  # dimension 0 in storage is another dimension of the tensor
    return [
        part
        for part in formula(context, kept, grads[0], results, errors)
        if results[part.place] is not None
    ]


@lru_cache(maxsize=256)
def labels(function) -> tuple[str, ...]:
    """Return the names of the inputs of an autograd Function, as the layers of torch call them."""
    names = list(signature(function.forward).parameters)[1:]
    return tuple(_AS_IN_TORCH.get(name, name) for name in names)


_AS_IN_TORCH = {"x": "input", "x1": "input1", "x2": "input2", "a": "input", "b": "other"}


# -- linear layers and convolutions: docs/concepts/theory/ac_gc.md, sections 3 to 5 -----------------------------------


def _linear(context, kept, grad, results, errors):
    features = results[1].shape[-1]
    numbers = _by_rows(grad, errors), *_scales2(*kept.copy("x"))
    return [Part(1, numbers, partial(_linear_cost, features))]


def _linear_cost(features, entries, _):
    (grad2,), *scales2 = entries
    return Cost((grad2 * features * _mean(scales2)) ** 0.5)


def _convolution(context, kept, grad, results, errors):
    weight = kept.tensor("weight")
    stride, _, dilation, transposed, _, groups = context.settings
    samples, channels, *space = context.size
    layer = Convolution(
        channels,
        samples * torch.Size(space).numel(),
        *(tuple(sizes) for sizes in (weight.shape[2:], stride, dilation)),
        groups,
        transposed,
        tuple(space) if transposed else tuple(grad.shape[2:]),
    )
    numbers = _by_rows(grad, errors, groups), *_scales2(*kept.copy("x"))
    return [Part(1, numbers, partial(_convolution_cost, layer))]


def _convolution_cost(layer, entries, _):
    grad2, *scales2 = entries
    scales = scales2[0] if scales2 and len(scales2[0]) == layer.channels else [_mean(scales2)]
    per_channel = torch.tensor(scales, dtype=torch.float64, device="cpu").expand(layer.channels)
    per_group = torch.tensor(grad2, dtype=torch.float64, device="cpu")
    d = convolution_d(per_channel, layer, per_group, expectation=True)
    channels = per_channel * per_group.repeat_interleave(layer.channels // layer.groups)
    return Cost(d**0.5, channels=channels.tolist())


def _scales2(spec, copy) -> tuple[Tensor, ...]:
    """Return the squared weights of the norm whose saved tensor the layer uses; () if there is no such norm.

    The layer computes its input from the saved tensor by multiplication with the norm's weights, so errors are
    multiplied too. The result contains one tensor: (channels,), or (1,) with the mean of the squared weights.
    """
    weight = copy[-2] if isinstance(spec, AffineResultSpec) else None
    if weight is None:
        return ()
    squares = weight.detach().double().square().flatten()
    return (squares.mean()[None] if spec.channels is None else squares,)


def _mean(scales2) -> float:
    return sum(scales2[0]) / len(scales2[0]) if scales2 else 1.0


def _prelu(context, kept, grad, results, errors):
    """Return the error model of PReLU.

    The weight's gradient is the sum of g min(x, 0), which is linear in the saved min(x, 0). In a rotated copy, all
    elements have errors of the same variance, but if the signs of x are saved too, the errors of the other elements do
    not count. So D = |g|^2 dx^2, with g at the negative elements if signs are saved. In a uniform copy, elements of 0
    have no errors, because 0 is the largest value and so an end of the range. Only the negative elements have errors,
    so D = (number of elements) / (number of negative elements) * |g at negative elements|^2 dx^2. A slot codec may leave
    zeros without errors too, so its copies count as uniform.
    """
    has_signs = context.needs_input_grad[0]
    spec, _ = kept.copy("negative")
    is_rotated = _is_rotated(spec)
    if is_rotated and not has_signs:
        return [Part(1, (_squares(grad, tuple(range(grad.dim()))).flatten(),), _weight_cost)]
    if has_signs:
        is_negative = ~kept.values("sign").view(torch.bool)
    else:
        is_negative = kept.values("negative") < 0
    grad2 = _squares(grad * is_negative, tuple(range(grad.dim()))).sum()
    if not is_rotated:
        grad2 = grad2 / is_negative.sum().clamp(min=1) * grad.numel()
    return [Part(1, (grad2[None],), _weight_cost)]


def _is_rotated(spec) -> bool:
    """Return whether the group quantizer has made a rotated copy."""
    if isinstance(spec, PermutedSpec):
        return _is_rotated(spec.inner)
    return isinstance(spec, QuantizedTensorSpec) and spec.kind != UNIFORM


# -- norms: section 6 ----------------------------------------------------------------------------------------


def _layer_norm(context, kept, grad, results, errors):
    return _of_rows(context, kept, grad, errors, kept.tensor("weight"), len(context.shape), 2)


def _transformers_rms_norm(context, kept, grad, results, errors):
    weight = scale_of(kept.tensor("weight"), context.offset)
    return _of_rows(context, kept, grad, errors, weight, 1, 1)


def _of_rows(context, kept, grad, errors, weight, dims, place):
    """Return the error models of a norm over the last `dims` dimensions, whose weight is input number `place`."""
    parts = [Part(place, (_by_rows(grad, errors),), _weight_cost)]
    if context.needs_input_grad[0]:
        x, rstd = kept.values("x"), kept.tensor("rstd")
        parts.append(_of_input(x, _product(grad, weight, x), rstd, tuple(range(-dims, 0))))
    return parts


def _group_norm(context, kept, grad, results, errors):
    rstd, weight = kept.tensor("rstd"), kept.tensor("weight")
    samples, _, _, groups = context.sizes
    parts = [Part(2, (_by_rows(grad, errors),), _weight_cost)]
    if context.needs_input_grad[0]:
        x = kept.values("x")
        g = _product(grad, _of_channels(weight, grad), x)
        x, g = (tensor.reshape(samples, groups, -1) for tensor in (x, g))
        parts.append(_of_input(x, g, rstd.view(samples, groups, 1), (2,)))
    return parts


def _batch_norm(context, kept, grad, results, errors):
    rstd, weight, (spec, _) = kept.tensor("rstd"), kept.tensor("weight"), kept.copy("x")
    dims = [dim for dim in range(grad.dim()) if dim != 1]
    is_whole = context.view == spec.size  # False for an instance norm
    samples = spec.size[0]
    of_rows = _squares(grad, dims[1:]) if grad.dim() > 2 else grad.double().square()
    weighted = (of_rows.reshape(samples, -1) * _row_weights(errors, samples)).sum(0)
    grad2 = of_rows.reshape(grad.shape[:2]).sum(0)
    if is_whole:
        parts = [Part(4, (weighted,), _weight_cost)]
    else:
        parts = [Part(4, (weighted.sum()[None],), _weight_cost, samples)]
    if context.needs_input_grad[0] and weight is not None and results[4] is not None:
        scale2 = (weight * rstd).double().square()
        sums = grad2 * scale2, results[4].double().square() * scale2
        parts.append(_of_sums(*sums, grad.numel() // len(rstd), is_whole))
    elif context.needs_input_grad[0]:
        x = kept.values("x").reshape(context.view)
        g = _product(grad, _of_channels(weight, grad), x)
        parts.append(_of_input(x, g, _of_channels(rstd, grad), dims, is_whole))
    return parts


def _weight_cost(entries, _):
    (grad2,) = entries
    return Cost(sum(grad2) ** 0.5, channels=grad2 if len(grad2) > 1 else None)


def _of_input(x, g, rstd, dims, has_channels=False):
    """Return the error model of a norm's input gradient. A set is the elements that share a mean and a deviation s.

    Args:
        x: the dequantized normalized input x~.
        g: the gradient of the norm's result times the weight, in the shape of x.
        rstd: 1 / s of each set.
        dims: the dimensions of x over which a set extends.
        has_channels: whether the sets are channels.
    """
    rstd = rstd.to(x.dtype)
    alignment = (x * g).sum(dims, keepdim=True) * rstd
    sums = _squares(g, dims) * rstd.double().square(), alignment.double().square()
    return _of_sums(*sums, x.numel() // rstd.numel(), has_channels)


def _of_sums(scaled2, alignment2, size, has_channels):
    """Return the error model of a norm's input gradient from sums over sets of elements that share a deviation s.

    Args:
        scaled2: |g|^2 / s^2 of each set, where g is the gradient of the norm's result times the weight.
        alignment2: (x~ . g)^2 / s^2 of each set, where x~ is the dequantized normalized input.
        size: the number of elements of a set.
        has_channels: whether the sets are channels.
    """
    numbers = scaled2.flatten(), alignment2.flatten()
    if not has_channels:
        numbers = tuple(sums.sum()[None] for sums in numbers)
    return Part(0, numbers, partial(_input_cost, size))


def _input_cost(size, entries, error2):
    scaled2, restored = entries
    # The errors of the dequantized x~ contribute to its alignment with g, and this contribution is subtracted.
    aligned2 = [max(a - error2 * h, 0.0) for a, h in zip(restored, scaled2, strict=True)]
    first, second = norm_input_coefficients(size, sum(scaled2), sum(aligned2), True)
    if len(scaled2) == 1:
        return Cost(first, second)
    pairs = zip(scaled2, aligned2, strict=True)
    channels = [norm_input_coefficients(size, *pair, True)[0] ** 2 for pair in pairs]
    return Cost(first, second, channels)


def _product(grad, weight, x):
    """Return grad * weight in x's dtype."""
    grad = grad.to(x.dtype)
    return grad if weight is None else grad * weight.to(x.dtype)


def _of_channels(vector, grad):
    """Return a vector, (channels,), in a shape that broadcasts to grad."""
    return None if vector is None else vector.view(1, -1, *[1] * (grad.dim() - 2))


# -- numbers -------------------------------------------------------------------------------------------------


def _by_rows(grad, errors, groups: int = 1) -> Tensor:
    """Return |g|^2 of each group of channels, (groups,) float64, with rows weighted in proportion to their errors."""
    rows = len(grad) if grad.dim() > 1 else 1
    if groups == 1 and grad.dim() > 1:  # no reshape: a gradient may be channels last, or expanded
        squares = _squares(grad, tuple(range(1, grad.dim())))
    else:
        squares = _squares(grad.reshape(rows, groups, -1), 2)
    return (squares.view(rows, groups) * _row_weights(errors, rows)).sum(0)


def _row_weights(errors, rows: int) -> Tensor:
    """Return float64 weights in proportion to `errors`, (rows, 1), with mean 1; (1, 1) if the lengths differ."""
    if len(errors) != rows:
        return torch.ones_like(errors[:1, None], dtype=torch.float64)
    mean = errors.mean()
    return torch.where(mean > 0, errors / mean, torch.ones_like(errors)).double()[:, None]


def _squares(x, dims) -> Tensor:
    """Return the float64 sum of squares over the dimensions `dims`, which keep size 1."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=dtype).double().square()


_FORMULAS = {
    _Linear: _linear,
    _Convolution: _convolution,
    _LayerNorm: _layer_norm,
    _RMSNorm: _layer_norm,
    _TransformersRMSNorm: _transformers_rms_norm,
    _GroupNorm: _group_norm,
    _BatchNormFunction: _batch_norm,
    _PReLU: _prelu,
}
_QUANTIZED = {_PReLU: "negative"}
"""{autograd Function: the name of its quantized tensor}, where it is not "x"."""
