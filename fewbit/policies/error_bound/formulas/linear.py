"""Error bounds of linear layers and convolutions, plain and transposed: docs/theory/ac_gc.md, sections 3 to 5.

The weight's gradient is linear in the saved input, and no other gradient depends on it. All bounds are

    D = weight of an element  *  sum over channels of |g of the channel's group|^2 dx2

Dilation d matters if it shares a factor with the stride T. A filter of R taps then reads fewer input positions, and each
of them up to ceil(R gcd(d, T) / T) times, not ceil(R / T).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fewbit.errors import InputError
from fewbit.policies.error_bound.formulas.shares import quotient, square, squares, tolerance, whole


def linear_d(dx2, rows: int, features: int, grad2, expectation: bool = False) -> float:
    """Return D of a linear layer's weight (section 3), in units of the squared gradient.

    It is rows |g|^2 sum dx2 in the worst case, for which the mean squared error of each feature is enough, and
    |g|^2 sum dx2 in expectation.

    Args:
        dx2: squared errors of the elements: a float, or (features,).
        rows: the product of all sizes of the input but the last.
        features: the last size of the input.
        grad2: |g|^2, where g is the gradient of the output.
        expectation: whether the bound is in expectation.
    """
    return convolution_d(dx2, _as_convolution(rows, features), grad2, expectation)


def linear_error(
    rows: int, features: int, grad2, e2: float, v2: float, expectation: bool = False
) -> float:
    """Return dx2 of all elements with which `linear_d` is e2 v2, where v2 is |grad of the weight|^2."""
    return convolution_error(_as_convolution(rows, features), grad2, e2, v2, expectation)


def _as_convolution(rows: int, features: int) -> Convolution:
    return Convolution(channels=features, elements=rows, filter=(), stride=(), dilation=())


@dataclass(frozen=True)
class Convolution:
    """The shape of a convolution. A linear layer is a convolution without dimensions of space.

    Args:
        channels: channels of the input.
        elements: elements of the input in a channel, N H W.
        filter: the filter's size in each dimension of space.
        stride: the stride in each dimension.
        dilation: the dilation in each dimension.
        groups: groups of channels.
        transposed: whether the convolution is transposed.
        steps: positions of the filter in each dimension, which are the output's sizes, or the input's of a transposed
            convolution. None if they are not known, which makes bounds of small inputs larger.

    Raises:
        InputError: sizes are below 1 or contradict each other.
    """

    channels: int
    elements: int
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    steps: tuple[int, ...] | None = None

    def __post_init__(self):
        for name in ("channels", "elements", "groups"):
            whole(name, getattr(self, name))
        if self.channels % self.groups:
            raise InputError(
                f"expected channels in {self.groups} equal groups, got {self.channels} channels"
            )
        lengths = {len(sizes) for sizes in (self.filter, self.stride, self.dilation)}
        lengths |= set() if self.steps is None else {len(self.steps)}
        if len(lengths) > 1:
            raise InputError(
                "expected filter, stride, dilation and steps of one length, got lengths "
                f"{sorted(lengths)}"
            )

    @property
    def reads(self) -> int:
        """The largest number of taps that meet one element of the tensor over which the filter moves."""
        steps = self.steps or (None,) * len(self.filter)
        dimensions = zip(self.filter, self.stride, self.dilation, steps, strict=True)
        return math.prod(most_reads(*sizes) for sizes in dimensions)

    def weight(self, expectation: bool) -> int:
        """Return the factor of the squared error of a channel's elements in D, besides |g|^2."""
        if not expectation:
            return self.reads * self.elements
        return self.reads if self.transposed else math.prod(self.filter)


def most_reads(taps: int, stride: int, dilation: int = 1, steps: int | None = None) -> int:
    """Return the largest number of taps that meet one position: min(ceil(taps gcd(stride, dilation) / stride), steps).

    Args:
        taps: the filter's size.
        stride: the stride.
        dilation: the dilation.
        steps: the number of positions of the filter, or None if it is not known.

    Raises:
        InputError: a number is below 1.
    """
    taps, stride, dilation = (
        whole(name, value)
        for name, value in (("filter", taps), ("stride", stride), ("dilation", dilation))
    )
    reads = -(-taps * math.gcd(stride, dilation) // stride)
    return reads if steps is None else min(reads, whole("steps", steps))


def convolution_d(dx2, layer: Convolution, grad2, expectation: bool = False) -> float:
    """Return D of a convolution's weight (sections 4 and 5), transposed or not, in units of the squared gradient.

    In the worst case the mean squared error of each channel is enough, or of each group if dx2 and grad2 are floats.

    Args:
        dx2: squared errors of the elements: a float, or (channels,).
        layer: the convolution.
        grad2: |g|^2, where g is the gradient of the output: a float, or (groups,).
        expectation: whether the bound is in expectation.
    """
    dx2, grad2 = squares("dx2", dx2), squares("grad2", grad2)
    weight = layer.weight(expectation)
    per_group = layer.channels // layer.groups
    if not isinstance(grad2, Tensor):
        if isinstance(dx2, Tensor) and layer.groups > 1:
            raise InputError(
                "expected grad2 of each group beside dx2 of each channel, got one number"
            )
        total = dx2.sum().item() if isinstance(dx2, Tensor) else dx2 * per_group
        return weight * grad2 * total
    _check_groups(grad2, layer)
    return weight * (grad2.repeat_interleave(per_group) * dx2).sum().item()


def convolution_error(
    layer: Convolution, grad2, e2: float, v2: float, expectation: bool = False
) -> float | Tensor:
    """Return dx2 with which `convolution_d` is e2 v2.

    Args:
        layer: the convolution.
        grad2: |g|^2, where g is the gradient of the output: a float, or (groups,).
        e2: the relative error that is allowed.
        v2: |grad of the weight|^2.
        expectation: whether the bound is in expectation.

    Returns:
        (channels,) if grad2 is (groups,), else a float for all elements; infinite if grad2 is 0.
    """
    allowed, grad2 = tolerance(e2, v2), squares("grad2", grad2)
    weight = layer.weight(expectation)
    per_group = layer.channels // layer.groups
    if not isinstance(grad2, Tensor):
        return quotient(allowed, weight * per_group * square("grad2", grad2))
    _check_groups(grad2, layer)
    return quotient(allowed, layer.channels * weight * grad2).repeat_interleave(per_group)


def _check_groups(grad2: Tensor, layer: Convolution) -> None:
    if len(grad2) != layer.groups:
        raise InputError(f"expected grad2 of {layer.groups} groups, got {len(grad2)}")
