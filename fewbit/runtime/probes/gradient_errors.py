"""The squared errors D of a layer's gradients, as functions of the error of its saved tensor, for `ErrorBound`.

A layer with a formula for D (docs/concepts/theory/ac_gc.md) has a static method `gradient_errors` in its autograd
Function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from inspect import signature
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

KURTOSIS = 3.0
"""The factor in E dx^4 <= KURTOSIS * (dx^2)^2 (docs/concepts/theory/ac_gc.md, section 1)."""


class Cost(NamedTuple):
    """The squared error of a gradient, (first dx + second dx^2)^2, if a saved tensor has the mean squared error dx^2.

    `channels` are numbers in proportion to the parts of first^2 that come from each channel; None if all are equal.
    """

    first: float
    second: float = 0.0
    channels: list[float] | None = None


class ErrorOfGradient(NamedTuple):
    """The squared error of one gradient of a layer as a function of the saved tensor's error.

    Args:
        place: the number of the input of the layer's autograd Function whose gradient it is.
        numbers: 1-D float64 tensors, to be copied to the host.
        finish: a function of the values of `numbers`, as lists, and the present mean squared error of the saved tensor
            that returns the `Cost`.
        repeats: how often an instance norm repeats its weight before it calls the Function; else 1.
    """

    place: int
    numbers: tuple[Tensor, ...]
    finish: Callable[[list[list[float]], float], Cost]
    repeats: int = 1

    def of(self, results) -> Tensor:
        """Return the gradient that has this error, given all results of the layer's backward."""
        found = results[self.place]
        return found if self.repeats == 1 else found.view(self.repeats, -1).sum(0)


def of_layer(context, kept, grads, results, errors: Tensor) -> list[ErrorOfGradient] | None:
    """Return the errors of a layer's gradients, or None if there is no formula for this kind of layer.

    `context`, `kept`, `grads` and `results` are those of the layer's backward. `errors` is (rows,), the sum of squared
    errors in each entry of dimension 0, in storage order, of the one dequantized tensor.
    """
    layer = context._forward_cls
    if layer.gradient_errors is None or grads[0] is None:
        return None
    spec, _ = kept.copy(layer.observed)
    if getattr(spec, "order", None) is not None:
        errors = errors.sum()[None]  # dimension 0 in storage is another dimension of the tensor
    found = layer.gradient_errors(context, kept, grads[0], results, errors)
    return [error for error in found if results[error.place] is not None]


@lru_cache(maxsize=256)
def labels(function) -> tuple[str, ...]:
    """Return the names of an autograd Function's inputs, as the layers of torch call them."""
    names = list(signature(function.forward).parameters)[1:]
    return tuple(_AS_IN_TORCH.get(name, name) for name in names)


_AS_IN_TORCH = {"x": "input", "x1": "input1", "x2": "input2", "a": "input", "b": "other"}


# -- what several layers share -------------------------------------------------------------------------------


def weight_cost(entries, _) -> Cost:
    """Return the cost of a weight's gradient that is linear in the saved tensor: `entries` has |g|^2 of each channel."""
    (grad2,) = entries
    return Cost(sum(grad2) ** 0.5, channels=grad2 if len(grad2) > 1 else None)


def scales2(kept) -> tuple[Tensor, ...]:
    """Return the squared weights of the norm whose saved tensor a linear layer multiplies, in a tuple; () without such a norm.

    They multiply the errors: (channels,), or (1,) with their mean.
    """
    spec, tensors = kept.copy("x")
    if not hasattr(spec, "normalized") or tensors[-2] is None:
        return ()
    squares = tensors[-2].detach().double().square().flatten()
    return (squares.mean()[None] if spec.channels is None else squares,)


def mean_scale2(found) -> float:
    """Return the mean of `scales2` on the host; 1 without a norm."""
    return sum(found[0]) / len(found[0]) if found else 1.0


def of_norm(context, kept, grad, errors, weight) -> list[ErrorOfGradient]:
    """Return the errors of a layer, RMS or group norm, whose weight is input number 2 and broadcasts to `grad`."""
    found = [ErrorOfGradient(2, (by_rows(grad, errors),), weight_cost)]
    if context.needs_input_grad[0]:
        x, rstd = kept.values("x"), kept.tensor("rstd").reshape(-1, 1)
        x, g = (each.reshape(len(rstd), -1) for each in (x, product(grad, weight, x)))
        found.append(of_norm_input(x, g, rstd, (1,)))
    return found


def of_norm_input(x, g, rstd, dims, has_channels=False) -> ErrorOfGradient:
    """Return the error of the gradient of a norm's input. A set is the elements that share a mean and a deviation s.

    Args:
        x: the dequantized normalized input x~.
        g: the gradient of the norm's result times the weight.
        rstd: 1 / s of each set.
        dims: the dimensions of x over which a set extends.
        has_channels: whether the sets are channels.
    """
    rstd = rstd.to(x.dtype)
    alignment = (x * g).sum(dims, keepdim=True) * rstd
    # |g|^2 / s^2 and (x~ . g)^2 / s^2 of each set
    numbers = squares(g, dims) * rstd.double().square(), alignment.double().square()
    numbers = tuple(sums.flatten() if has_channels else sums.sum()[None] for sums in numbers)
    return ErrorOfGradient(0, numbers, partial(_input_cost, x.numel() // rstd.numel()))


def _input_cost(size, entries, error2) -> Cost:
    scaled2, restored = entries
    # The errors of the dequantized x~ contribute to its alignment with g, and this contribution is subtracted.
    aligned2 = [max(a - error2 * h, 0.0) for a, h in zip(restored, scaled2, strict=True)]
    first, second = norm_input_coefficients(size, sum(scaled2), sum(aligned2))
    if len(scaled2) == 1:
        return Cost(first, second)
    pairs = zip(scaled2, aligned2, strict=True)
    return Cost(first, second, [norm_input_coefficients(size, *pair)[0] ** 2 for pair in pairs])


def norm_input_coefficients(size: int, scaled2: float, alignment2: float) -> tuple[float, float]:
    """Return (first, second) of the `Cost` of a norm's input gradient (docs/concepts/theory/ac_gc.md, section 6).

    `size` is the number of elements of a set, and `scaled2` and `alignment2` are the sums of |g|^2 / s^2 and (x~ . g)^2
    / s^2 over the sets.
    """
    cross = 2.0 * sqrt(alignment2 * scaled2 / size)
    first = sqrt((scaled2 + alignment2 + cross) / size)
    return first, sqrt(scaled2 * (size - 1 + KURTOSIS)) / size


def product(grad, weight, x) -> Tensor:
    """Return grad * weight in x's dtype."""
    grad = grad.to(x.dtype)
    return grad if weight is None else grad * weight.to(x.dtype)


def by_rows(grad, errors, groups: int = 1) -> Tensor:
    """Return |g|^2 of each group of channels, (groups,) float64, with rows weighted by `row_weights`."""
    rows = len(grad) if grad.dim() > 1 else 1
    if groups == 1 and grad.dim() > 1:  # no reshape: a gradient may be channels last, or expanded
        found = squares(grad, tuple(range(1, grad.dim())))
    else:
        found = squares(grad.reshape(rows, groups, -1), 2)
    return (found.view(rows, groups) * row_weights(errors, rows)).sum(0)


def row_weights(errors, rows: int) -> Tensor:
    """Return weights in proportion to `errors`, (rows, 1) float64, with mean 1; (1, 1) if the lengths differ."""
    if len(errors) != rows:
        return torch.ones_like(errors[:1, None], dtype=torch.float64)
    mean = errors.mean()
    return torch.where(mean > 0, errors / mean, torch.ones_like(errors)).double()[:, None]


def squares(x, dims) -> Tensor:
    """Return the float64 sum of squares over the dimensions `dims`, which keep size 1."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=dtype).double().square()
