"""The error bounds of AC-GC that the error-bound policy evaluates. docs/concepts/theory/ac_gc.md derives them.

AC-GC allows a squared gradient error of at most e2 V2. V2 is the squared norm of the exact gradient, and e2 is a number
that the user chooses. D is an upper bound of the squared gradient error. It depends on the errors of a saved tensor,
whose size is given by a square, dx2:

- worst case (expectation=False): the squared gradient error is at most D if the squared error of each element is at
  most dx2. For linear layers, convolutions and norms it is enough if the mean of the squared errors is at most dx2.
- in expectation (expectation=True): the mean of the squared gradient error is at most D if the elements' errors are
  independent, with mean 0 and variances of at most dx2. If a function needs a further condition, its docstring says so.

In a uniform copy, rounding to b bits in a range r has steps of r / (2^b - 1). With stochastic rounding, variances are at
most step^2 / 4 and errors at most one step. With rounding to nearest, errors are at most step / 2, and their mean is
not 0. In a rotated copy, the errors of a group are a rotation of the errors of its codes, so they look normal. They have
no largest value, and the worst case says nothing about them; the policy uses the bounds in expectation.

Values are floats, or float64 tensors with one value for each channel. A function returns the kind of value that it was
given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.errors import InputError

KURTOSIS = 3.0
"""The factor in E dx^4 <= KURTOSIS * dx2^2, for the error dx of rounding.

It is 3 for the errors of rotated copies, which look normal. Stochastic rounding in uniform copies has 4 / 3 with
dx2 = step^2 / 4. docs/concepts/theory/ac_gc.md derives both in section 1.
"""


# -- linear layers and convolutions: sections 3 to 5 ---------------------------------------------------------
#
# The weight's gradient is linear in the saved input, and no other gradient depends on it. All bounds are
#
#     D = weight of an element  *  sum over channels of |g of the channel's group|^2 dx2
#
# Dilation d matters if it shares a factor with the stride T. A filter of R taps then reads fewer input positions, and
# each of them up to ceil(R gcd(d, T) / T) times, not ceil(R / T).


@dataclass(frozen=True)
class Convolution:
    """The shape of a convolution. A linear layer is a convolution without spatial dimensions.

    Args:
        channels: the number of channels of the input.
        elements: the number of elements of the input in one channel: N H W for images.
        filter: the filter's size in each spatial dimension.
        stride: the stride in each spatial dimension.
        dilation: the dilation in each spatial dimension.
        groups: the number of groups of channels.
        transposed: whether the convolution is transposed.
        steps: the number of positions of the filter in each spatial dimension: the size of the output, or of the input
            if the convolution is transposed. None if not known; bounds for small inputs are then larger than necessary.

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
        """The largest number of filter elements that meet one element of the tensor over which the filter moves."""
        steps = self.steps or (None,) * len(self.filter)
        dimensions = zip(self.filter, self.stride, self.dilation, steps, strict=True)
        return math.prod(most_reads(*sizes) for sizes in dimensions)

    def weight(self, expectation: bool) -> int:
        """Return the factor w in the bound of `convolution_d`.

        The bound is w times the sum of |g|^2 dx2 over the channels of the input. g is the gradient of the output, for
        the group of channels to which the channel belongs.

        Args:
            expectation: whether the bound holds in expectation; otherwise it holds in the worst case.
        """
        if not expectation:
            return self.reads * self.elements
        return self.reads if self.transposed else math.prod(self.filter)


def most_reads(taps: int, stride: int, dilation: int = 1, steps: int | None = None) -> int:
    """Return the largest number of times that a filter reads one element of the input.

    This is min(ceil(taps gcd(stride, dilation) / stride), steps).

    Args:
        taps: the filter's size in one dimension.
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
    """Return a bound of the squared error of a convolution's weight gradient (docs/concepts/theory/ac_gc.md, sections 4 and 5).

    The worst case needs less than the module docstring says: it is enough if dx2 bounds the mean squared error of each
    channel of the input. If dx2 and grad2 are floats, it is enough if dx2 bounds the mean squared error of each group
    of channels.

    Args:
        dx2: the largest squared error of the input's elements: a float, or (channels,).
        layer: the convolution.
        grad2: |g|^2, where g is the gradient of the output: a float, or (groups,).
        expectation: whether the bound holds in expectation; otherwise it holds in the worst case.
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
    check_groups(grad2, layer)
    return weight * (grad2.repeat_interleave(per_group) * dx2).sum().item()


def check_groups(grad2: Tensor, layer: Convolution) -> None:
    """Raise InputError if grad2 does not have one entry for each group of channels."""
    if len(grad2) != layer.groups:
        raise InputError(f"expected grad2 of {layer.groups} groups, got {len(grad2)}")


# -- batch, layer, group and RMS norms: section 6 -------------------------------------------------------------
#
# A norm saves its normalized input x~ with errors (docs/decisions/0007). It works on sets of M elements that share a
# mean and a deviation s: a batch norm's channels, a layer or RMS norm's rows, a group norm's groups of a sample. With
# the gradient g of the output and g' = g times the weight,
#
#     grad weight = sum g x~        grad x = (g' - mean(g') - x~ mean(x~ g')) / s
#
# The input's gradient is quadratic in x~, and its error reaches all layers below. The error depends on two sums over
# the sets: scaled2 is the sum of |g'|^2 / s^2, and alignment2 is the sum of (x~ . g')^2 / s^2, which is between 0 and
# M scaled2. In a batch norm x~ . g' is the weight times the weight's gradient.


def norm_input_coefficients(size: int, scaled2, alignment2=None, expectation: bool = False):
    """Return (first, second) of (first dx + second dx2)^2, a bound of the squared error of a norm's input gradient.

    dx2 = dx^2 is the mean squared error of the norm's saved tensor (docs/concepts/theory/ac_gc.md, section 6). A set is the
    elements that share a mean and a deviation s: a channel of a batch norm, a row of a layer norm, and so on. g' is the
    gradient of the output times the weight, and x~ is the normalized input, which the norm saves.

    Args:
        size: the number of elements of a set.
        scaled2: the sum of |g'|^2 / s^2 over the sets: a float, or one sum for each channel. `first` and `second` have
            the same shape as `scaled2`.
        alignment2: the sum of (x~ . g')^2 / s^2 over the sets, where x~ . g' is an inner product. The shape is that of
            `scaled2`. None: the largest sum that is possible.
        expectation: whether the bound holds in expectation; otherwise it holds in the worst case.
    """
    whole("size", size)
    scaled2 = squares("scaled2", scaled2)
    alignment2 = size * scaled2 if alignment2 is None else squares("alignment2", alignment2)
    if not expectation:
        return root(alignment2 / size) + root(scaled2), root(scaled2)
    cross = 2.0 * root(alignment2 * scaled2 / size)
    first = root((scaled2 + alignment2 + cross) / size)
    return first, root(scaled2 * (size - 1 + KURTOSIS)) / size


# -- arithmetic that all bounds share ------------------------------------------------------------------------


def tolerance(e2: float, v2: float) -> float:
    """Return e2 V2, the squared gradient error that AC-GC allows in its formula (6).

    Args:
        e2: the squared error that is allowed, relative to V2.
        v2: the squared norm of the exact gradient.

    Returns:
        The product; 0 if either factor is 0, even if the other is infinite.

    Raises:
        InputError: a factor is negative.
    """
    e2, v2 = square("e2", e2), square("v2", v2)
    return e2 * v2 if e2 and v2 else 0.0


def square(name: str, value: float) -> float:
    """Return the value as a float. Raise InputError, which calls the value `name`, if it is negative or NaN."""
    value = float(value)
    if not value >= 0:
        raise InputError(f"expected {name} of 0 or more, got {value}")
    return value


def squares(name: str, value) -> float | Tensor:
    """Return a number as a float, or a vector as a float64 tensor.

    Raises:
        InputError: the value is negative or NaN, or a tensor with 2 or more dimensions. The message calls it `name`.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return square(name, value)
    value = value.detach().double()
    if value.dim() != 1 or not (value >= 0).all():
        raise InputError(f"expected {name} as one number or a vector, of 0 or more, got {value}")
    return value


def whole(name: str, value: int, least: int = 1) -> int:
    """Return the value unchanged.

    Raises:
        InputError: the value is not an integer of at least `least`. The message calls it `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"expected an integer of {least} or more for {name}, got {value!r}")
    return value


def quotient(allowed: float, cost) -> float | Tensor:
    """Return allowed / cost, the largest error for which error * cost is at most `allowed`.

    If `cost` is 0, the result is infinite, because errors then do not matter. If `cost` is infinite, the result is 0.
    """
    if isinstance(cost, Tensor):
        infinite = torch.full_like(cost, math.inf)
        return torch.where(cost > 0, allowed / cost, infinite).masked_fill(cost == math.inf, 0.0)
    if cost == math.inf:
        return 0.0
    return allowed / cost if cost > 0 else math.inf


def root(value) -> float | Tensor:
    """Return the square root of a float, or of each element of a tensor."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def polynomial_error(allowed: float, first, second) -> float | Tensor:
    """Solve (first dx + second dx^2)^2 = allowed for dx, and return dx2 = dx^2.

    The result is accurate also if `second` is small.

    Args:
        allowed: the squared gradient error that is allowed.
        first: the coefficient of dx, 0 or more; a float, or a tensor with one value for each channel.
        second: the coefficient of dx^2, 0 or more, in the same form.

    Returns:
        dx2; infinite if both coefficients are 0.
    """
    target = math.sqrt(allowed)
    if target in (0.0, math.inf):
        return quotient(target, first + second)
    denominator = first + root(first * first + 4.0 * target * second)
    dx = quotient(2.0 * target, denominator)
    return dx * dx
