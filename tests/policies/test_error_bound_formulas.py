"""Error bounds of AC-GC: D is never below the error, and close to it if it can be."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

import fewbit
from fewbit import functions
from fewbit.errors import InputError
from fewbit.functional.convolution import most_reads, weight_cost
from fewbit.policies.error_bound import largest_errors, table_errors
from fewbit.runtime.probes.gradient_errors import norm_input_coefficients

SIGMAS = 4.5
DRAWS = 128
ROUNDING = 1 + 1e-9  # sums in another order


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def square(x):
    return x.square().sum().item()


def halves(x, dx2):
    """Return errors of stochastic rounding midway between two levels: +-dx, where its variance is greatest."""
    return math.sqrt(dx2) * (2.0 * torch.randint(0, 2, x.shape, dtype=torch.float64) - 1.0)


def normal_errors(x, dx2):
    """Return errors like those of rotated copies."""
    return math.sqrt(dx2) * torch.randn(x.shape, dtype=torch.float64)


def rounding(x, dx2):
    """Return errors of stochastic rounding to multiples of a step. Their variances are at most step^2 / 4 = dx2."""
    step = 2 * math.sqrt(dx2)
    return step * (torch.floor(x / step + torch.rand_like(x)) - x / step)


def assert_in_expectation(errors, d, least=0.0):
    """Check by a z test that the mean of the squared errors of the draws is between least * d and d."""
    errors = np.asarray(errors)
    assert len(errors) >= 64
    slack = SIGMAS * errors.std(ddof=1) / math.sqrt(len(errors)) + 1e-12 * d
    assert least * d - slack <= errors.mean() <= d + slack
    assert slack < 0.5 * errors.mean()  # or the test says nothing


@dataclass(frozen=True)
class Case:
    """A convolution in 0 to 3 dimensions of space; 0: a linear layer of N samples."""

    size: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    samples: int = 3
    channels: int = 4
    outputs: int = 6

    def __call__(self, x, w):
        if not self.filter:
            return F.linear(x, w)
        dims = len(self.filter)
        if self.transposed:
            call = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]
        else:
            call = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
        return call(
            x,
            w,
            stride=self.stride,
            padding=self.padding or 0,
            groups=self.groups,
            dilation=self.dilation or 1,
        )

    def x(self):
        return normal(self.samples, self.channels, *self.size)

    def w(self):
        inner, outer = self.channels, self.outputs
        first, second = (inner, outer) if self.transposed else (outer, inner)
        return normal(first, second // self.groups, *self.filter)

    def d(self, g, dx2):
        """Return the bound in expectation of the squared error of the weight's gradient."""
        reads, channels = math.prod(self.filter), self.channels
        if self.transposed:
            dilation = self.dilation or (1,) * len(self.filter)
            of_dims = zip(self.filter, self.stride, dilation, self.size, strict=True)
            reads = math.prod(most_reads(*of_dim) for of_dim in of_dims)
        return dx2 * weight_cost(reads, channels, [self.by_group(g).tolist()], 0.0).first ** 2

    def by_channel(self, x):
        return x.square().transpose(0, 1).flatten(1).sum(1)

    def by_group(self, g):
        return self.by_channel(g).view(self.groups, -1).sum(1)


CASES = {
    "linear": Case((), (), (), samples=20),
    "3x3": Case((8, 7), (3, 3), (1, 1)),
    "3x3 padded": Case((6, 6), (3, 3), (1, 1), padding=(1, 1)),
    "3x3 stride 2": Case((9, 8), (3, 3), (2, 2), padding=(1, 1)),
    "1x1 stride 2": Case((7, 7), (1, 1), (2, 2)),
    "3x2 stride 2x3": Case((9, 10), (3, 2), (2, 3)),
    "2x2 stride 3": Case((8, 8), (2, 2), (3, 3)),
    "7x5 stride 3x2": Case((12, 9), (7, 5), (3, 2), padding=(3, 1)),
    "whole image": Case((5, 5), (5, 5), (1, 1)),
    "dilated": Case((9, 9), (3, 3), (2, 1), dilation=(3, 2)),
    "dilation shares the stride's factor": Case((13, 9), (3, 2), (2, 2), dilation=(2, 2)),
    "groups": Case((7, 7), (3, 3), (2, 2), groups=2, padding=(1, 1)),
    "depthwise": Case((7, 7), (3, 3), (1, 1), groups=4, outputs=4),
    "1d": Case((17,), (5,), (3,), padding=(2,)),
    "3d": Case((5, 4, 5), (3, 1, 2), (2, 2, 1), padding=(1, 0, 0)),
    "transposed": Case((5, 4), (3, 3), (2, 2), transposed=True),
    "transposed padded": Case((5, 5), (4, 4), (2, 2), padding=(1, 1), transposed=True),
    "transposed 1x1 stride 2": Case((4, 4), (1, 1), (2, 2), transposed=True),
    "transposed groups": Case((5, 5), (5, 3), (2, 3), groups=2, transposed=True),
    "transposed dilated": Case((5, 5), (3, 3), (2, 2), dilation=(2, 3), transposed=True),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def weight_gradient(case, x, g):
    """Return the gradient of the weight. It is linear in x, so the gradient of an error is the gradient's error."""
    w = case.w().requires_grad_()
    return torch.autograd.grad(case(x, w), w, g)[0]


@EVERY_CASE
def test_errors_of_a_weight_in_expectation(case):
    """The error is exactly D without padding, for any stride, and below D with padding."""
    dx2, g = 0.04, torch.randn_like(case(case.x(), case.w()))
    errors = [square(weight_gradient(case, halves(case.x(), dx2), g)) for _ in range(DRAWS)]
    # A transposed filter does not meet all outputs as often as `most_reads` says.
    is_exact = not any(case.padding) and not case.transposed
    least = 1.0 if is_exact else 0.05 if case.transposed else 0.3
    assert_in_expectation(errors, case.d(g, dx2), least)


sizes = st.integers(1, 6)


@given(sizes, sizes, sizes, st.integers(1, 30), st.integers(0, 5))
def test_most_reads_counts_what_a_filter_meets(taps, stride, dilation, size, padding):
    """Folding counts the taps that fall on each position; without padding, and with enough steps, both agree."""
    window = dilation * (taps - 1) + 1
    assume(size + 2 * padding >= window)
    how = {"dilation": (dilation, 1), "padding": (padding, 0), "stride": (stride, 1)}
    ones = torch.ones(1, 1, size, 1)
    read = F.fold(F.unfold(ones, (taps, 1), **how), (size, 1), (taps, 1), **how)
    steps = (size + 2 * padding - window) // stride + 1
    found = round(read.max().item())
    most = most_reads(taps, stride, dilation, steps)
    assert found <= most
    if padding == 0 and steps >= taps * dilation:
        assert found == most
    if math.gcd(stride, dilation) == 1:
        assert most == min(math.ceil(taps / stride), steps)


def test_negative_bounds_are_refused():
    with pytest.raises(InputError, match="expected e2 of 0 or more, got -1.0"):
        largest_errors.tolerance(-1.0, 1.0)


@pytest.mark.parametrize("first, second", [(2.0, 0.0), (0.0, 3.0), (2.0, 3.0), (2.0, 1e-12)])
@pytest.mark.parametrize("allowed", [1e-8, 0.3, 1e4])
def test_at_the_error_d_is_what_is_allowed(allowed, first, second):
    def d_at_the_error(first, second):
        dx2 = largest_errors.polynomial_error(allowed, first, second)
        return (first * dx2**0.5 + second * dx2) ** 2

    assert d_at_the_error(first, second) == pytest.approx(allowed)


INF = math.inf


@pytest.mark.parametrize(
    ("e2", "v2", "first", "expected"),
    [
        (0.5, 0.0, 0.0, INF),  # a gradient of zero allows any error
        (0.0, 1.0, 2.0, 0.0),
        (INF, 1.0, 2.0, INF),  # squared norms of float16 training may be infinite for a step
        (0.0, INF, 2.0, 0.0),
        (0.5, 1.0, INF, 0.0),
    ],
)
def test_gradients_of_zero_and_gradients_that_overflow_leave_no_nan(e2, v2, first, expected):
    allowed = largest_errors.tolerance(e2, v2)
    assert largest_errors.polynomial_error(allowed, first, 0.0) == expected
    assert largest_errors.polynomial_error(allowed, 0.0, 0.0) == INF


@dataclass(frozen=True)
class Norm:
    """A norm of torch, with a weight for each channel of an image or feature of a row.

    The dimensions `sets` share statistics, once the input is viewed as `view`, if that is given.
    """

    call: Callable
    shape: tuple[int, ...]
    sets: tuple[int, ...] = (-1,)
    view: tuple[int, ...] = ()
    is_centered: bool = True

    def viewed(self, x):
        return x.view(self.view or self.shape)

    @property
    def channel(self):
        return 1 if len(self.shape) == 4 else len(self.shape) - 1

    @property
    def summed(self):
        """Return the dimensions over which the weight's gradient is summed."""
        return tuple(i for i in range(len(self.shape)) if i != self.channel)

    def scaled(self, x, weight):
        return (x.movedim(self.channel, -1) * weight).movedim(-1, self.channel)

    def statistics(self, x):
        """Return (x~, 1 / s), x~ in x's shape."""
        viewed = self.viewed(x)
        center = viewed.mean(self.sets, keepdim=True) if self.is_centered else 0.0
        rstd = ((viewed - center).square().mean(self.sets, keepdim=True) + 1e-5).rsqrt()
        return ((viewed - center) * rstd).view(self.shape), rstd

    def gradients(self, first, second, rstd, weight, g):
        """Return the input's and the weight's gradient from two copies of x~; written out, apart from the package."""
        weighted = self.viewed(self.scaled(g, weight).contiguous())
        one, two = self.viewed(first), self.viewed(second)
        inner = weighted - one * (two * weighted).mean(self.sets, keepdim=True)
        if self.is_centered:
            inner = inner - weighted.mean(self.sets, keepdim=True)
        return (inner * rstd).view(self.shape), (g * first).sum(self.summed)


def layer_norm(x, weight):
    return F.layer_norm(x, weight.shape, weight)


NORMS = {
    "batch": Norm(
        lambda x, w: F.batch_norm(x, None, None, w, training=True), (4, 3, 5, 5), (0, 2, 3)
    ),
    "layer": Norm(layer_norm, (3, 6, 40)),
    "narrow": Norm(layer_norm, (8, 3)),
    "rms": Norm(lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), (7, 32), is_centered=False),
    "group": Norm(
        lambda x, w: F.group_norm(x, 2, w), (2, 4, 3, 4), (2, 3, 4), view=(2, 2, 2, 3, 4)
    ),
}
EVERY_NORM = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


class Problem:
    """A norm with its input, its gradient and the numbers that the bounds need."""

    def __init__(self, norm, aligned=False):
        self.norm = norm
        self.x = 3.0 * normal(*norm.shape) + 1.0
        self.weight = 1.0 + 0.3 * normal(norm.shape[norm.channel])
        self.normalized, self.rstd = norm.statistics(self.x)
        self.g = normal(*norm.shape)
        if aligned:  # of the weighted gradient with x~, the worst there is
            self.weight = torch.ones_like(self.weight)
            self.g = self.normalized.clone()
        self.exact = self.gradients(0.0)
        weighted = norm.viewed(norm.scaled(self.g, self.weight).contiguous())
        along = (norm.viewed(self.normalized) * weighted).sum(norm.sets, keepdim=True)
        self.scaled2 = square(weighted * self.rstd)
        self.alignment2 = square(along * self.rstd)

    def gradients(self, first, second=None):
        second = first if second is None else second
        copies = self.normalized + first, self.normalized + second
        return self.norm.gradients(*copies, self.rstd, self.weight, self.g)

    def error(self, first, second=None):
        """Return the squared error of the input's gradient."""
        return (self.gradients(first, second)[0] - self.exact[0]).square().sum()

    def d(self, dx2):
        """Return the bound in expectation of the same error."""
        size = self.x.numel() // self.rstd.numel()
        first, second = norm_input_coefficients(size, self.scaled2, self.alignment2)
        return (first * math.sqrt(dx2) + second * dx2) ** 2


@EVERY_NORM
def test_gradients_of_norms_are_torchs(norm):
    """The reference of the tests of norms is right, and a batch norm's alignment is its weight's gradient."""
    problem = Problem(norm)
    x, weight = problem.x.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    found = torch.autograd.grad(norm.call(x, weight), (x, weight), problem.g)
    for one, two in zip(found, problem.exact, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    if norm is NORMS["batch"]:
        of_weight = (problem.weight * problem.exact[1] * problem.rstd.flatten()).square().sum()
        assert problem.alignment2 == pytest.approx(of_weight.item())


@EVERY_NORM
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    "draw, dx2, least",
    [(halves, 0.04, 0.5), (rounding, 0.04, 0.3), (halves, 1e6, 0.5), (normal_errors, 1e6, 0.5)],
)
def test_errors_of_norms_in_expectation(norm, copies, aligned, draw, dx2, least):
    """With errors of 1e6, all of the error is quadratic. Normal errors, as of rotated copies, then reach the bound."""
    problem = Problem(norm, aligned)
    found = [
        problem.error(*(draw(problem.normalized, dx2) for _ in range(copies))).item()
        for _ in range(DRAWS)
    ]
    is_reached = copies == 1 and draw is normal_errors
    least = 0.85 if is_reached else least
    assert_in_expectation(found, problem.d(dx2), least)


def brute(table, low, high, n=200_001):
    """Return max |q - f'| over a fine mesh that includes both sides of all breaks."""
    x = np.linspace(low, high, n)
    x = np.concatenate([x, table.breaks, np.nextafter(table.breaks, -np.inf)])
    x = x[(x >= low) & (x <= high)]
    return np.abs(functions.get(table.function, table.parameters).derivative(x) - table(x)).max()


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("name", ["gelu", "silu", "selu", "hardswish"])
@pytest.mark.parametrize(
    "interval", [(-10.0, 10.0), (-1.3, 0.7), (-25.0, 30.0), (1.2, 1.7), (2.2, 2.6)]
)
def test_the_largest_error_of_a_table(name, bits, interval):
    table = fewbit.load_table(name, bits=bits)
    found = table_errors.largest_table_error(table, *interval)
    expected = brute(table, *interval)
    assert expected - 1e-6 <= found <= expected + 1e-4


def test_the_largest_error_of_exact_and_unbiased_tables():
    assert table_errors.largest_table_error(fewbit.load_table("relu", bits=1), -5, 5) == 0.0
    table = fewbit.solve("gelu", bits=2, objective="unbiased")
    for low, high in ((-4.0, 4.0), (-1.0, -0.3), (-8.0, -5.0), (0.2, 0.5)):
        x = np.linspace(low, high, 4_001)
        slopes = functions.get("gelu").derivative(x)
        drawn = max(np.abs(table.sample(x, seed) - slopes).max() for seed in range(8))
        found = table_errors.largest_table_error(table, low, high)
        assert 0.9 * found < drawn <= found + 1e-6


def test_the_error_that_is_allowed_of_a_table():
    assert table_errors.allowed_error(3.0, 0.5, 2.0) ** 2 * 3.0 == pytest.approx(0.5 * 2.0)


def test_the_papers_table_1():
    """For a batch norm, D is the paper's: an error dx of x is one of dx / s in x~.

    The paper's D is what is linear in dx, if its g_c^2 bounds both the weight's squared gradient and |g|^2, and M is large.
    """
    m = 10**9
    for deviation, weight, papers_g2, dx2 in (
        (0.5, 1.0, 4.0, 1e-9),
        (2.0, 0.3, 0.5, 2e-9),
        (3.0, 2.0, 1.0, 3e-9),
    ):
        papers_d = 2 * weight**2 / (m**2 * deviation**4) * papers_g2 * m * dx2
        scaled2 = weight**2 * papers_g2 / deviation**2
        first, second = norm_input_coefficients(m, scaled2, scaled2)
        found = (first * dx2**0.5 / deviation + second * dx2 / deviation**2) ** 2
        assert found == pytest.approx(papers_d, rel=1e-3)
