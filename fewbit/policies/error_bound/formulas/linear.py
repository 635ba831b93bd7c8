"""Error bounds of linear layers and convolutions, plain and transposed: docs/theory/ac_gc.md, sections 3 to 5.

The weight's gradient is linear in the input that is kept, and only the weight's depends on it. All bounds are

    D = weight of an element  *  sum over channels of |g of the channel's group|^2 dx2

Dilation d matters where it shares a factor with the stride T: the input positions that a filter of R taps reads are
then fewer and each is read up to ceil(R gcd(d, T) / T) times, not ceil(R / T).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fewbit.errors import InputError
from fewbit.policies.error_bound.formulas.shares import quotient, square, squares, tolerance, whole


def linear_d(dx2, rows: int, features: int, grad2, expectation: bool = False) -> float:
    """D of a linear layer's weight (section 3). Units: the gradient squared.

    dx2: float, or (features,). rows: all dimensions of the input but the last. grad2: |g|^2, g the gradient of the
    output. Worst-case: rows |g|^2 sum dx2, which needs only the mean of the squared errors of each feature. In
    expectation: |g|^2 sum dx2.
    """
    return convolution_d(dx2, _as_convolution(rows, features), grad2, expectation)


def linear_error(
    rows: int, features: int, grad2, e2: float, v2: float, expectation: bool = False
) -> float:
    """dx2 of all elements of a linear layer's input with which `linear_d` is e2 v2. v2: |grad of the weight|^2."""
    return convolution_error(_as_convolution(rows, features), grad2, e2, v2, expectation)


def _as_convolution(rows: int, features: int) -> Convolution:
    return Convolution(channels=features, elements=rows, filter=(), stride=(), dilation=())


@dataclass(frozen=True)
class Convolution:
    """What the bound of a convolution depends on; dimensions of space are 0 or more (0: a linear layer).

    channels: C, of the input. elements: of the input in a channel, N H W. filter, stride, dilation: integers, one a
    dimension of space. steps: positions of the filter in each dimension, that is the output's sizes (a transposed
    convolution's: the input's); None: not known, which makes bounds of small inputs larger. Raises InputError.
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
        lengths = {len(each) for each in (self.filter, self.stride, self.dilation)}
        lengths |= set() if self.steps is None else {len(self.steps)}
        if len(lengths) > 1:
            raise InputError(
                "expected filter, stride, dilation and steps of one length, got lengths "
                f"{sorted(lengths)}"
            )

    @property
    def reads(self) -> int:
        """How often an element of what the filter moves over meets the filter at most, over all its taps."""
        steps = self.steps or (None,) * len(self.filter)
        each = zip(self.filter, self.stride, self.dilation, steps, strict=True)
        return math.prod(most_reads(*one) for one in each)

    def weight(self, expectation: bool) -> int:
        """What the squared error of a channel's elements is multiplied with in D, besides |g|^2."""
        if not expectation:
            return self.reads * self.elements
        return self.reads if self.transposed else math.prod(self.filter)


def most_reads(taps: int, stride: int, dilation: int = 1, steps: int | None = None) -> int:
    """By how many of its taps a filter meets one position, at most: min(ceil(taps gcd / stride), steps).

    gcd is that of stride and dilation, 1 mostly. steps: how many positions the filter takes. InputError below 1.
    """
    taps, stride, dilation = (
        whole(name, value)
        for name, value in (("filter", taps), ("stride", stride), ("dilation", dilation))
    )
    reads = -(-taps * math.gcd(stride, dilation) // stride)
    return reads if steps is None else min(reads, whole("steps", steps))


def convolution_d(dx2, layer: Convolution, grad2, expectation: bool = False) -> float:
    """D of a convolution's weight (sections 4 and 5), transposed or not. Units: the gradient squared.

    dx2: float, or (C,). grad2: |g|^2, g the gradient of the output, or (groups,) of its groups. Worst-case: of the
    squared errors only the mean in each channel matters (where dx2 and grad2 are floats: in each group).
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
    """dx2 with which `convolution_d` is e2 v2: (C,) if grad2 is (groups,), else one for all elements.

    v2: |grad of the weight|^2. Infinite where grad2 is 0.
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
