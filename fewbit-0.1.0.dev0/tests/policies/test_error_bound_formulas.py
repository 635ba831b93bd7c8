"""Error bounds of AC-GC: D is never below the error, close to it if it can be, and equals e2 V2 at dx*."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
import error_bounds as bounds  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fewbit  # noqa: E402
from fewbit import functions  # noqa: E402
from fewbit.errors import InputError  # noqa: E402
from fewbit.policies.error_bound import formulas, tables  # noqa: E402

SIGMAS = 4.5
DRAWS = 128
ROUNDING = 1 + 1e-9  # sums in another order


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def square(x):
    return x.square().sum().item()


def halves(shape, dx2):
    """Return errors of stochastic rounding midway between two levels: +-dx, where its variance is greatest."""
    return math.sqrt(dx2) * (2.0 * torch.randint(0, 2, shape, dtype=torch.float64) - 1.0)


def normal_errors(shape, dx2):
    """Return errors like those of rotated copies."""
    return math.sqrt(dx2) * torch.randn(shape, dtype=torch.float64)


def rounding_errors(x, step):
    """Return errors of stochastic rounding to multiples of step. Their variances are at most step^2 / 4."""
    steps = x / step
    return step * (torch.floor(steps + torch.rand_like(x)) - steps)


def assert_in_expectation(errors, d, least=0.0):
    """Check by a z test that the mean of the squared errors of the draws is between least * d and d."""
    errors = np.asarray(errors)
    assert len(errors) >= 64
    slack = SIGMAS * errors.std(ddof=1) / math.sqrt(len(errors)) + 1e-12 * d
    assert least * d - slack <= errors.mean() <= d + slack
    assert slack < 0.5 * errors.mean()  # or the test says nothing


# --- linear layers and convolutions -----------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A convolution in 0 to 3 dimensions of space; 0: a linear layer of N samples."""

    size: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
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
            how = {"dilation": self.dilation}
        else:
            call, how = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims], {"dilation": self.dilation}
        return call(x, w, stride=self.stride, padding=self.padding, groups=self.groups, **how)

    def x(self):
        return normal(self.samples, self.channels, *self.size)

    def w(self):
        inner, outer = self.channels, self.outputs
        first, second = (inner, outer) if self.transposed else (outer, inner)
        return normal(first, second // self.groups, *self.filter)

    def layer(self):
        y = self(self.x(), self.w())
        steps = self.size if self.transposed else y.shape[2:]
        return formulas.Convolution(
            channels=self.channels,
            elements=self.samples * math.prod(self.size),
            filter=self.filter,
            stride=self.stride,
            dilation=self.dilation[: len(self.filter)],
            groups=self.groups,
            transposed=self.transposed,
            steps=tuple(steps),
        )

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
    "3d": Case((5, 4, 5), (3, 1, 2), (2, 2, 1), dilation=(1, 1, 1), padding=(1, 0, 0)),
    "transposed": Case((5, 4), (3, 3), (2, 2), transposed=True),
    "transposed padded": Case((5, 5), (4, 4), (2, 2), padding=(1, 1), transposed=True),
    "transposed 1x1 stride 2": Case((4, 4), (1, 1), (2, 2), transposed=True),
    "transposed groups": Case((5, 5), (5, 3), (2, 3), groups=2, transposed=True),
    "transposed dilated": Case((5, 5), (3, 3), (2, 2), dilation=(2, 3), transposed=True),
}
CASES = {
    name: replace(
        case,
        dilation=case.dilation[: len(case.filter)] or (1,) * len(case.filter),
        padding=case.padding[: len(case.filter)] or (0,) * len(case.filter),
    )
    for name, case in CASES.items()
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def weight_gradient(case, x, g):
    """Return the gradient of the weight. It is linear in x, so the gradient of an error is the gradient's error."""
    w = case.w().requires_grad_()
    return torch.autograd.grad(case(x, w), w, g)[0]


def input_gradient(case, w, g):
    """Compute the adjoint of `weight_gradient` as a map of x."""
    x = case.x().requires_grad_()
    return torch.autograd.grad(case(x, w), x, g)[0]


def unit(x):
    return x / x.norm()


def worst(case, g, adapt):
    """Return (dx, g): the error of norm 1 with the largest gradient error, by power iteration, also over g if adapt."""
    dx = unit(case.x().abs() if adapt else case.x())
    for _ in range(60):
        dw = unit(weight_gradient(case, dx, g))
        dx = unit(input_gradient(case, dw, g))
        if adapt:
            g = unit(case(dx, dw))
    return dx, g


def ratio(case, dx, g):
    """Return the squared gradient error over D, for the tightest D: by channel and group."""
    layer = case.layer()
    d = formulas.convolution_d(case.by_channel(dx) / layer.elements, layer, case.by_group(g))
    return square(weight_gradient(case, dx, g)) / d


@EVERY_CASE
def test_no_error_of_a_weight_exceeds_the_worst_case(case):
    """Random errors and the worst there is, for a random gradient and for the worst one."""
    g = torch.randn_like(case(case.x(), case.w()))
    for dx in (case.x(), worst(case, g, adapt=False)[0]):
        assert ratio(case, dx, g) <= ROUNDING
        # One number for all elements is enough where it is that of the group that errs most.
        layer = case.layer()
        means = case.by_channel(dx).view(case.groups, -1).mean(1) / layer.elements
        d = formulas.convolution_d(means.max().item(), layer, square(g))
        assert square(weight_gradient(case, dx, g)) <= d * ROUNDING
    assert ratio(case, *worst(case, g.abs(), adapt=True)) <= ROUNDING


# What the worst errors for the worst gradient reach of D; edges of small images keep it from 1.
REACHED = {
    "linear": 1.0,
    "3x3": 0.5,
    "3x3 padded": 0.5,
    "3x3 stride 2": 0.5,
    "1x1 stride 2": 1.0,
    "2x2 stride 3": 1.0,
    "whole image": 1.0,
    "dilation shares the stride's factor": 0.5,
    "depthwise": 0.5,
    "transposed 1x1 stride 2": 1.0,
    "transposed": 0.5,
}


@pytest.mark.parametrize("name", REACHED)
def test_the_worst_case_of_a_weight_is_reached(name):
    case = CASES[name]
    g = torch.randn_like(case(case.x(), case.w())).abs()
    assert ratio(case, *worst(case, g, adapt=True)) >= REACHED[name] * (1 - 1e-6)


@EVERY_CASE
def test_errors_of_a_weight_in_expectation(case):
    """The error is exactly D without padding, for any stride, and below D with padding."""
    layer, dx2 = case.layer(), 0.04
    g = torch.randn_like(case(case.x(), case.w()))
    d = formulas.convolution_d(dx2, layer, case.by_group(g), expectation=True)
    errors = [square(weight_gradient(case, halves(case.x().shape, dx2), g)) for _ in range(DRAWS)]
    # A transposed filter does not meet all outputs as often as `reads` says.
    is_exact = not any(case.padding) and not case.transposed
    assert_in_expectation(errors, d, least=1.0 if is_exact else 0.05 if case.transposed else 0.3)
    scalar = formulas.convolution_d(dx2, layer, square(g), expectation=True)
    assert scalar == pytest.approx(d)


@EVERY_CASE
@pytest.mark.parametrize("expectation", [False, True])
def test_at_the_error_of_a_weight_d_is_what_is_allowed(case, expectation):
    layer, e2, v2 = case.layer(), 0.5, 7.0
    by_group = torch.arange(1.0, case.groups + 1)
    for grad2 in (3.0, by_group):
        dx2 = bounds.convolution_error(layer, grad2, e2, v2, expectation)
        assert formulas.convolution_d(dx2, layer, grad2, expectation) == pytest.approx(e2 * v2)
    assert dx2.shape == (case.channels,)
    if not case.filter:
        sizes = layer.elements, layer.channels
        dx2 = bounds.linear_error(*sizes, 3.0, e2, v2, expectation)
        assert bounds.linear_d(dx2, *sizes, 3.0, expectation) == pytest.approx(e2 * v2)
        assert dx2 == bounds.convolution_error(layer, 3.0, e2, v2, expectation)


def test_shares_of_channels_are_the_best_ones():
    """Every other division of D among channels lowers the sum of log |dx|: step 3 of the derivation."""
    case = CASES["depthwise"]
    layer, grad2 = case.layer(), torch.tensor([0.1, 1.0, 5.0, 40.0])
    best = bounds.convolution_error(layer, grad2, 1.0, 1.0)
    for _ in range(50):
        other = best * torch.rand(4, dtype=torch.float64)
        other *= 1.0 / formulas.convolution_d(other, layer, grad2)
        assert formulas.convolution_d(other, layer, grad2) == pytest.approx(1.0)
        assert other.log().sum() < best.log().sum()


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
    assert found <= formulas.most_reads(taps, stride, dilation, steps)
    assert formulas.most_reads(taps, stride, dilation, steps) <= formulas.most_reads(
        taps, stride, dilation
    )
    if padding == 0 and steps >= taps * dilation:
        assert found == formulas.most_reads(taps, stride, dilation)
    if math.gcd(stride, dilation) == 1:
        assert formulas.most_reads(taps, stride, dilation) == math.ceil(taps / stride)


@pytest.mark.slow
@given(
    filter=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    extra=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    groups=st.sampled_from([1, 2]),
    transposed=st.booleans(),
)
def test_no_convolution_exceeds_its_worst_case(
    filter, stride, dilation, extra, padding, groups, transposed
):
    reach = [d * (f - 1) + 1 for f, d in zip(filter, dilation, strict=True)]
    padding = tuple(min(p, r // 2) for p, r in zip(padding, reach, strict=True))
    size = extra if transposed else tuple(r + e for r, e in zip(reach, extra, strict=True))
    assume(all(s > 0 for s in size))
    if transposed:
        assume(
            all(
                (s - 1) * t - 2 * p + r > 0
                for s, t, p, r in zip(size, stride, padding, reach, strict=True)
            )
        )
    case = Case(size, filter, stride, dilation, padding, groups, transposed, 2, 2, 2)
    g = torch.randn_like(case(case.x(), case.w())).abs()
    dx = unit(case.x().abs())
    for _ in range(6):
        dw = weight_gradient(case, dx, g)
        assume(dw.norm() > 0)  # no tap of a padded filter falls on the image
        assert ratio(case, dx, g) <= ROUNDING
        dx, g = unit(input_gradient(case, unit(dw), g)), unit(case(dx, unit(dw)))


def test_wrong_settings_of_linear_layers_are_refused():
    layer = CASES["groups"].layer()
    with pytest.raises(InputError, match="expected e2 of 0 or more, got -1.0"):
        bounds.linear_error(2, 3, 1.0, -1.0, 1.0)
    with pytest.raises(InputError, match="expected grad2 as one number or a vector"):
        bounds.convolution_error(layer, torch.tensor([1.0, -1.0]), 1.0, 1.0)
    with pytest.raises(InputError, match="expected grad2 of 2 groups, got 3"):
        bounds.convolution_error(layer, torch.ones(3), 1.0, 1.0)
    with pytest.raises(InputError, match="expected channels in 3 equal groups, got 4 channels"):
        replace(layer, groups=3)
    with pytest.raises(InputError, match="expected an integer of 1 or more for stride, got 0"):
        formulas.most_reads(3, 0)
    with pytest.raises(InputError, match="one length"):
        replace(layer, stride=(1,))
    with pytest.raises(InputError, match="expected grad2 of each group"):
        formulas.convolution_d(torch.ones(4), layer, 1.0)


def test_a_gradient_of_zero_allows_any_error():
    assert bounds.linear_error(2, 3, 0.0, 0.5, 0.0) == math.inf
    assert bounds.linear_error(2, 3, 1.0, 0.0, 1.0) == 0.0
    of_groups = bounds.convolution_error(CASES["groups"].layer(), torch.tensor([0.0, 1.0]), 1, 1)
    assert (
        of_groups[:2].tolist() == [math.inf] * 2 and of_groups.isfinite().tolist()[2:] == [True] * 2
    )
    assert bounds.norm_input_error(4, 0.0, 0.0, 0.5, 0.0) == math.inf
    assert bounds.pointwise_error(0.0, 1.0, 0.5, 1.0) == math.inf


@pytest.mark.parametrize("e2, v2, scalar", [(math.inf, 1.0, math.inf), (0.0, math.inf, 0.0)])
def test_gradients_that_overflow_leave_no_nan(e2, v2, scalar):
    """Squared norms of float16 training may be infinite for a step."""
    layer, of_groups = CASES["groups"].layer(), torch.tensor([2.0, math.inf])
    assert bounds.linear_error(2, 3, 1.0, e2, v2) == scalar
    assert bounds.linear_error(2, 3, math.inf, e2, v2) == 0.0
    assert bounds.convolution_error(layer, of_groups, e2, v2).tolist() == [scalar] * 2 + [0.0] * 2
    for expectation in (False, True):
        assert bounds.norm_input_error(4, 1.0, None, e2, v2, expectation) == scalar
        found = bounds.norm_input_error(4, of_groups, None, e2, v2, expectation)
        assert found.tolist() == [scalar, 0.0]


# --- norms ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """A norm of torch, with a weight for each channel of an image or feature of a row.

    Args:
        call: (x, weight) -> result.
        shape: of the input.
        sets: the dimensions that share statistics, once the input is viewed.
        view: the shape of that view; () if it is the input's own.
        is_centered: whether the norm subtracts the mean.
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
        normalized = norm.viewed(self.normalized)
        squares = bounds.norm_squares(normalized, weighted, self.rstd, norm.sets)
        self.scaled2, self.alignment2 = (square.sum().item() for square in squares)

    def gradients(self, first, second=None):
        second = first if second is None else second
        copies = self.normalized + first, self.normalized + second
        return self.norm.gradients(*copies, self.rstd, self.weight, self.g)

    def errors(self, first, second=None):
        """Return the squared errors of the gradients of (input, weight)."""
        pairs = zip(self.gradients(first, second), self.exact, strict=True)
        return [(one - two).square().sum() for one, two in pairs]

    def ds(self, dx2, expectation=False):
        """Return the same errors from the bounds, without and with the alignment."""
        norm = self.norm
        summands = math.prod(norm.shape[i] for i in norm.summed)
        of_weight = bounds.norm_weight_d(dx2, summands, square(self.g), expectation)
        arguments = dx2, norm.viewed(self.x).numel() // self.rstd.numel(), self.scaled2
        loose = bounds.norm_input_d(*arguments, None, expectation)
        tight = bounds.norm_input_d(*arguments, self.alignment2, expectation)
        assert tight <= loose * ROUNDING
        return tight, of_weight


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


def of_mean_square(dx, norm, dx2):
    """Return dx scaled to the mean square dx2 in each set."""
    viewed = norm.viewed(dx)
    scale = (dx2 / viewed.square().mean(norm.sets, keepdim=True)).sqrt()
    return (viewed * scale).view(dx.shape)


@EVERY_NORM
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dx2", [1e-4, 0.04, 4.0])
def test_no_error_of_a_norm_exceeds_the_worst_case(norm, aligned, dx2):
    """Random errors, and errors that climb the squared gradient error, in one copy and in two."""
    problem = Problem(norm, aligned)
    of_input, of_weight = problem.ds(dx2)
    start = problem.normalized if aligned else 0.0
    dx = of_mean_square(start + 0.1 * normal(*norm.shape), norm, dx2)
    reached = 0.0
    for _ in range(60):
        dx.requires_grad_()
        errors = problem.errors(dx)
        reached = max(reached, errors[0].item())
        uphill = torch.autograd.grad(errors[0], dx)[0]
        dx = of_mean_square(uphill + 1e-12 * normal(*norm.shape), norm, dx2)
    assert reached <= of_input * ROUNDING
    # All errors add up in a layer norm's weight where they have the gradient's sign and size.
    scale = (dx2 / problem.g.square().mean(norm.summed, keepdim=True)).sqrt()
    of_weights = problem.errors(problem.g * scale)[1].item()
    assert of_weight * (1 - 1e-9) <= of_weights <= of_weight * ROUNDING
    two = problem.errors(*(of_mean_square(normal(*norm.shape), norm, dx2) for _ in range(2)))
    assert two[0] <= of_input * ROUNDING
    assert reached > (0.98 if aligned else 0.2) * of_input


@EVERY_NORM
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("draw", ["halves", "rounding"])
def test_errors_of_norms_in_expectation(norm, copies, aligned, draw):
    problem, dx2 = Problem(norm, aligned), 0.04

    def drawn():
        x = problem.normalized
        return halves(x.shape, dx2) if draw == "halves" else rounding_errors(x, 2 * math.sqrt(dx2))

    found = [problem.errors(*(drawn() for _ in range(copies))) for _ in range(DRAWS)]
    of_input, of_weight = problem.ds(dx2, expectation=True)
    least = 0.3 if draw == "rounding" else 0.5
    assert_in_expectation([item[0].item() for item in found], of_input, least)
    assert_in_expectation([item[1].item() for item in found], of_weight, least)


@EVERY_NORM
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("draw, least", [(normal_errors, 0.85), (halves, 0.5)])
def test_large_errors_of_norms_in_expectation(norm, copies, draw, least):
    """The bound holds if the part that is quadratic in the errors is all of the error.

    With one copy, normal errors, as of rotated copies, reach the bound.
    """
    problem, dx2 = Problem(norm), 1e6
    found = [
        problem.errors(*(draw(norm.shape, dx2) for _ in range(copies)))[0].item()
        for _ in range(DRAWS)
    ]
    least = least if copies == 1 else 0.5
    assert_in_expectation(found, problem.ds(dx2, expectation=True)[0], least)


@pytest.mark.parametrize("expectation", [False, True])
@pytest.mark.parametrize("allowed", [1e-8, 0.3, 1e4])
def test_at_the_error_of_a_norm_d_is_what_is_allowed(expectation, allowed):
    for scaled2, alignment2 in [
        (2.0, None),
        (2.0, 3.0),
        (torch.tensor([1.0, 8.0]), torch.tensor([0.0, 9.0])),
    ]:
        dx2 = bounds.norm_input_error(50, scaled2, alignment2, 1.0, allowed, expectation)
        d = bounds.norm_input_d(dx2, 50, scaled2, alignment2, expectation)
        assert d == pytest.approx(allowed)
    for grad2 in (2.0, torch.tensor([1.0, 8.0])):
        dx2 = bounds.norm_weight_error(50, grad2, 1.0, allowed, expectation)
        assert bounds.norm_weight_d(dx2, 50, grad2, expectation) == pytest.approx(allowed)


def test_both_gradients_of_a_norm_keep_to_the_smaller_error():
    assert bounds.norm_error(1.0, 2.0) == 1.0
    both = bounds.norm_error(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0]))
    assert both.tolist() == [1.0, 3.0]
    assert bounds.norm_error(torch.tensor([1.0, 5.0]), 2.0).tolist() == [1.0, 2.0]


# --- attention --------------------------------------------------------------------------------------


def attend(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_gradients(inputs, g, mask=None):
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(attend(*inputs, mask), inputs, g)


class Attention:
    """Two samples of two heads with fewer queries than keys, a narrower value, and optionally a mask."""

    def __init__(self, masked=False, scale=1.0):
        shapes = (2, 2, 5, 6), (2, 2, 7, 6), (2, 2, 7, 4)
        self.inputs = [scale * normal(*shape) for shape in shapes]
        self.g = normal(2, 2, 5, 4)
        self.mask = torch.ones(5, 7, dtype=torch.bool).tril(2) if masked else None
        self.exact = attention_gradients(self.inputs, self.g, self.mask)
        self.norms = bounds.attention_norms(*self.inputs, self.g, mask=self.mask)

    def errors(self, dx):
        found = attention_gradients(
            [x + d for x, d in zip(self.inputs, dx, strict=True)], self.g, self.mask
        )
        return [square(a - b) for a, b in zip(found, self.exact, strict=True)]

    def climbed(self, which, dx2, steps=12):
        """Return the largest squared error that a search finds for one gradient, if all elements err by +-dx."""
        dx = [halves(x.shape, dx2) for x in self.inputs]
        most = 0.0
        for _ in range(steps):
            inputs = [(x + d).requires_grad_() for x, d in zip(self.inputs, dx, strict=True)]
            output = attend(*inputs, self.mask)
            found = torch.autograd.grad(output, inputs, self.g, create_graph=True)[which]
            error = (found - self.exact[which]).square().sum()
            most = max(most, error.item())
            uphill = torch.autograd.grad(error, inputs, materialize_grads=True)
            dx = [math.sqrt(dx2) * slope.sign() for slope in uphill]
        return most


ATTENTIONS = {"small": {}, "masked": {"masked": True}, "diffuse": {"scale": 0.3}}
EVERY_ATTENTION = pytest.mark.parametrize("kind", ATTENTIONS.values(), ids=ATTENTIONS)


@EVERY_ATTENTION
@pytest.mark.parametrize("dx2", [1e-6, 0.01, 1.0])
def test_no_error_of_attention_exceeds_the_worst_case(kind, dx2):
    problem = Attention(**kind)
    d = bounds.attention_d(dx2, problem.norms)
    for _ in range(5):
        errors = problem.errors([halves(x.shape, dx2) for x in problem.inputs])
        assert all(error <= most for error, most in zip(errors, d, strict=True))
    reached = [problem.climbed(which, dx2) / most for which, most in enumerate(d)]
    assert max(reached) <= 1.0
    if dx2 == 1e-6:  # loose, and looser with larger errors
        assert min(reached) > (0.05 if kind == ATTENTIONS["diffuse"] else 4e-3)


@EVERY_ATTENTION
@pytest.mark.parametrize("draw", ["halves", "rounding"])
def test_errors_of_attention_in_expectation(kind, draw):
    problem, dx2 = Attention(**kind), 1e-4

    def drawn(x):
        return halves(x.shape, dx2) if draw == "halves" else rounding_errors(x, 2 * math.sqrt(dx2))

    found = [problem.errors([drawn(x) for x in problem.inputs]) for _ in range(DRAWS)]
    d = bounds.attention_d(dx2, problem.norms, expectation=True)
    worst = bounds.attention_d(dx2, problem.norms)
    for errors, mean, most in zip(zip(*found, strict=True), d, worst, strict=True):
        assert_in_expectation(errors, mean, least=1e-3)
        assert mean < most


def test_one_head_is_enough_for_attention():
    q, k, v, g = normal(3, 4), normal(5, 4), normal(5, 2), normal(3, 2)
    norms = bounds.attention_norms(q, k, v, g)
    assert norms.key.shape == (1,) and norms.peak.shape == (1, 3)
    z = g @ v.mT
    torch.testing.assert_close(norms.spread[0], z.amax(1) - z.amin(1))
    with pytest.raises(InputError, match="same heads"):
        bounds.attention_norms(q[None], k, v, g)


def test_rows_that_are_masked_throughout_do_not_count():
    q, k, v, g = normal(3, 4), normal(5, 4), normal(5, 2), normal(3, 2)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    found = bounds.attention_norms(q, k, v, g, mask=mask)
    seen = bounds.attention_norms(q[[0, 2]], k, v, g[[0, 2]])
    torch.testing.assert_close(found.spread, seen.spread[:, [0, 0, 1]] * torch.tensor([1, 0, 1]))
    assert found.peak[0, 1] == 0.0
    assert found.scores_f.item() == pytest.approx(seen.scores_f.item())
    added = torch.zeros(3, 5).masked_fill(~mask, -math.inf)
    assert bounds.attention_norms(q, k, v, g, mask=added).spread.equal(found.spread)


@pytest.mark.parametrize("expectation", [False, True])
@pytest.mark.parametrize("size", range(5))
def test_attention_to_nothing(size, expectation):
    """No gradient errs, or there is none, if heads, queries, keys or features are missing."""
    sizes = [2, 3, 5, 4, 6]
    sizes[size] = 0
    heads, queries, keys, features, value_features = sizes
    q, k = normal(heads, queries, features), normal(heads, keys, features)
    v, g = normal(heads, keys, value_features), normal(heads, queries, value_features)
    exact = attention_gradients((q, k, v), g)
    noisy = attention_gradients((q + 0.1, k - 0.2, v + 0.3), g)
    assert [square(a - b) for a, b in zip(noisy, exact, strict=True)] == [0.0] * 3
    norms = bounds.attention_norms(q, k, v, g)
    assert bounds.attention_d(0.1, norms, expectation) == (0.0, 0.0, 0.0)
    v2 = tuple(map(square, exact))
    assert bounds.attention_error(norms, 0.5, v2, expectation) == math.inf


@pytest.mark.parametrize("expectation", [False, True])
@pytest.mark.parametrize("e2", [1e-6, 0.5, 1e6])
def test_at_the_error_of_attention_a_d_is_what_is_allowed(expectation, e2):
    problem = Attention()
    v2 = tuple(map(square, problem.exact))
    dx2 = bounds.attention_error(problem.norms, e2, v2, expectation)
    shares = [
        d / (e2 * v)
        for d, v in zip(bounds.attention_d(dx2, problem.norms, expectation), v2, strict=True)
    ]
    assert max(shares) == pytest.approx(1.0) and max(shares) <= 1.0
    assert bounds.attention_error(problem.norms, 0.0, v2, expectation) == 0.0
    assert bounds.attention_error(problem.norms, math.inf, v2, expectation) == math.inf


# --- pointwise functions ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", bounds.CURVATURE)
def test_curvatures(name):
    """No divided difference of f' is above the curvature, and one comes close."""
    x = np.linspace(-12, 12, 400_001)
    slopes = np.abs(np.diff(functions.get(name).derivative(x)) / np.diff(x))
    assert 0.99999 < slopes.max() / bounds.CURVATURE[name] < 1 + 1e-8


@pytest.mark.parametrize("name", bounds.CURVATURE)
@pytest.mark.parametrize("dx2", [1e-6, 0.09])
def test_errors_of_a_pointwise_function_that_keeps_its_input(name, dx2):
    f, rng = functions.get(name), np.random.default_rng(0)
    x = rng.normal(size=2000)
    g = rng.normal(size=2000)
    d = bounds.pointwise_d(dx2, bounds.CURVATURE[name], np.square(g).sum())

    def error(dx):
        return np.square(g * (f.derivative(x + dx) - f.derivative(x))).sum()

    candidates = [math.sqrt(dx2) * s for s in (-1.0, -0.5, 0.5, 1.0)]
    every = np.stack([(f.derivative(x + dx) - f.derivative(x)) ** 2 for dx in candidates])
    assert (every.max(0) * g**2).sum() <= d
    errors = [error(math.sqrt(dx2) * rng.choice([-1.0, 1.0], x.size)) for _ in range(64)]
    assert np.mean(errors) <= d
    # All inputs where f' bends most: nearly all of D.
    grid = np.linspace(-3, 3, 6001)
    steepest = grid[np.abs(np.gradient(f.derivative(grid), grid)).argmax()]
    x = np.full(2000, steepest)
    assert error(1e-3) > 0.99 * bounds.pointwise_d(1e-6, bounds.CURVATURE[name], np.square(g).sum())


TABLES = list(itertools.product(["gelu", "silu", "selu", "hardswish"], [1, 2, 3, 4]))


def brute(table, low, high, n=200_001):
    """Return max |q - f'| over a fine mesh that includes both sides of all breaks."""
    x = np.linspace(low, high, n)
    x = np.concatenate([x, table.breaks, np.nextafter(table.breaks, -np.inf)])
    x = x[(x >= low) & (x <= high)]
    return np.abs(functions.get(table.function, table.parameters).derivative(x) - table(x)).max()


@pytest.mark.parametrize(("name", "bits"), TABLES)
@pytest.mark.parametrize(
    "interval", [(-10.0, 10.0), (-1.3, 0.7), (-25.0, 30.0), (1.2, 1.7), (2.2, 2.6)]
)
def test_the_largest_error_of_a_table(name, bits, interval):
    table = fewbit.load_table(name, bits=bits)
    found = tables.largest_table_error(table, *interval)
    expected = brute(table, *interval)
    assert expected - 1e-6 <= found <= expected + 1e-4


def test_the_largest_error_of_a_minimax_table_is_its_error():
    table = fewbit.solve("silu", bits=2, objective="minimax")
    assert tables.largest_table_error(table, *table.domain) == pytest.approx(table.error, abs=1e-6)


def test_the_largest_error_of_exact_and_unbiased_tables():
    assert tables.largest_table_error(fewbit.load_table("relu", bits=1), -5, 5) == 0.0
    table = fewbit.solve("gelu", bits=2, objective="unbiased")
    for low, high in ((-4.0, 4.0), (-1.0, -0.3), (-8.0, -5.0), (0.2, 0.5)):
        x = np.linspace(low, high, 20_001)
        slopes = functions.get("gelu").derivative(x)
        drawn = max(np.abs(table.sample(x, seed) - slopes).max() for seed in range(20))
        found = tables.largest_table_error(table, low, high)
        assert 0.9 * found < drawn <= found + 1e-6


@pytest.mark.parametrize("interval", [(1.0, 1.0), (2.0, 1.0), (-math.inf, 1.0), (0.0, math.nan)])
def test_intervals_that_are_none_are_refused(interval):
    with pytest.raises(InputError, match="expected finite ends low < high"):
        tables.largest_table_error(fewbit.load_table("gelu", bits=2), *interval)


def test_at_the_error_of_a_pointwise_function_d_is_what_is_allowed():
    dx2 = bounds.pointwise_error(0.8, 3.0, 0.5, 2.0)
    assert bounds.pointwise_d(dx2, 0.8, 3.0) == pytest.approx(1.0)
    assert bounds.table_d(tables.allowed_error(3.0, 0.5, 2.0), 3.0) == pytest.approx(1.0)


# --- the paper's table 1 ----------------------------------------------------------------------------


def test_table_1_follows_from_these_bounds():
    """D is the paper's, with its average factor and its bound on gradients; its dx*^2 differ from D(dx*) = e2 V2.

    As printed: half of what D allows for fully connected layers and convolutions, twice for batch norm.
    """
    n, c, height, width, e2, v2, g2 = 4, 6, 7, 5, 0.5, 3.0, 11.0
    papers_linear = e2 * v2 / (2 * n * c * g2)
    assert bounds.linear_error(n, c, g2, e2, v2) == pytest.approx(2 * papers_linear)
    assert bounds.linear_d(0.1, n, c, g2) == pytest.approx(g2 * (0.1 * n * c))

    r, s, t = 6, 4, 2  # where T divides R and S the average is the count
    m = n * height * width
    papers_convolution = e2 * v2 * t**2 / (2 * r * s * m * c * g2)
    layer = formulas.Convolution(c, m, (r, s), (t, t), (1, 1))
    assert bounds.convolution_error(layer, g2, e2, v2) == pytest.approx(2 * papers_convolution)
    assert formulas.convolution_d(0.1, layer, g2) == pytest.approx(r * s / t**2 * g2 * 0.1 * m * c)

    # Batch norm: an error dx of x is one of dx / s in x~. The paper's is what is linear in dx, in expectation, if
    # its g_c^2 bounds both the weight's squared gradient and |g|^2, and M is large.
    m = 10**9
    deviation = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64)
    papers_g2 = torch.tensor([4.0, 0.5, 1.0], dtype=torch.float64)
    dx2 = torch.tensor([1e-9, 2e-9, 3e-9], dtype=torch.float64)
    papers_d = (2 * weight**2 / (m**2 * deviation**4) * papers_g2 * m * dx2).sum().item()
    scaled2 = alignment2 = weight**2 * papers_g2 / deviation**2
    d = bounds.norm_input_d(dx2 / deviation**2, m, scaled2, alignment2, expectation=True)
    assert d == pytest.approx(papers_d, rel=1e-3)
    papers_error = e2 * v2 * m * deviation**4 / (3 * weight**2 * papers_g2)
    tiny = 1e-18  # so that what is quadratic in dx vanishes
    error = bounds.norm_input_error(m, scaled2, alignment2, tiny * e2, v2, expectation=True)
    torch.testing.assert_close(error * deviation**2, tiny * papers_error / 2, rtol=1e-3, atol=0)
