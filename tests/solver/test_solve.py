"""solve: the paper's figures, exact tables, tails, callables, and refusals."""

import importlib
import math
import warnings

import numpy as np
import pytest
from problems import solved
from scipy.special import erf

from fewbit import functions
from fewbit.catalog import paper
from fewbit.catalog.verification import recompute_error
from fewbit.errors import FewbitError, FunctionError, SolveError, WeightError
from fewbit.solver.partition import partition
from fewbit.solver.relaxation import _fewer_atoms
from fewbit.solver.solve import solve

FORMS = ["levels", "intervals"]
PRINTED = [(name, bits, error) for name, row in paper.TABLE_3.items() for bits, error in row.items()]  # fmt: skip


@pytest.mark.fast(8)
@pytest.mark.parametrize(("name", "bits", "printed"), PRINTED)
def test_intervals_have_the_printed_errors_and_shared_levels_no_larger_ones(name, bits, printed):
    """The paper's optimum is that of a grid, hence up to 2e-5 of it higher than the continuous one."""
    is_half = name in paper.PARITY  # the paper's tables for these are of |x|
    domain = (0.0, 10.0) if is_half else None
    intervals = solved(name, bits, form="intervals", domain=domain).error * (1 + is_half)
    shared = solved(name, bits).error
    assert printed - 0.5e-4 <= intervals * (1 + 2e-5) and intervals <= printed + 0.5e-4
    assert shared <= printed + 0.5e-4
    if is_half:
        assert shared == pytest.approx(intervals, rel=1e-9)


@pytest.mark.fast(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gelu", "selu", "softsign"])
def test_the_error_falls_with_every_level(name, form):
    tables = [solved(name, levels=count, form=form) for count in range(2, 11)]
    assert [len(table.levels) for table in tables] == list(range(2, 11))
    assert [table.bits for table in tables] == [1, 2, 2, 3, 3, 3, 3, 4, 4]
    errors = np.array([table.error for table in tables])
    assert (np.diff(errors) < 0).all()
    # With bits and levels, bits is room for the levels.
    table = solved(name, 4, levels=5, form=form)
    assert (table.bits, len(table.levels), table.error) == (4, 5, errors[3])


EXACT = [
    "relu", "relu6", "leaky_relu", "threshold", "hardtanh", "hardshrink", "softshrink", "hardsigmoid", "rrelu", "identity",
]  # fmt: skip
PARAMETERS = {"threshold": (("threshold", 0.3), ("value", -2.0))}


def torch_gradient(name, parameters, x):
    torch = pytest.importorskip("torch")
    call = {"identity": lambda x: x * 1.0}.get(name) or getattr(torch.nn.functional, name)
    given = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    call(given, **dict(parameters)).sum().backward()
    return given.grad.numpy()


@pytest.mark.parametrize(
    "options",
    [{}, {"weight": "normal", "bits": 1}, {"form": "intervals"}, {"objective": "minimax"}],
    ids=str,
)
@pytest.mark.parametrize("name", EXACT)
def test_exact_tables_equal_torch_at_and_around_the_kinks(name, options):
    parameters = PARAMETERS.get(name, ())
    table = solved(name, **({"bits": 2, "parameters": parameters} | options))
    assert (table.error, table.lower_bound, table.gap) == (0.0, 0.0, 0.0)
    assert table.exact and table.solver["status"] == "exact"
    f = functions.get(name, dict(parameters))
    if "form" not in options:
        values = f.derivative(np.linspace(*f.domain, 997))
        assert table.levels.tolist() == sorted(set(values.tolist()))
    kinks = np.array(f.kinks)
    assert np.array_equal(table.breaks, kinks)
    around = [np.nextafter(kinks, -np.inf), kinks, np.nextafter(kinks, np.inf)]
    x = np.concatenate([*around, np.linspace(-10, 10, 401), [-1e30, 1e30]])
    expected = torch_gradient(name, parameters, x)
    if name == "hardsigmoid":  # torch's constant is 1/6 in float32 even for float64 inputs
        assert set(expected) == {0.0, float(np.float32(1 / 6))}
        expected = np.where(expected > 0, 1 / 6, 0.0)
    assert (table(x) == expected).all()


def test_hardswish_bends_where_torch_bends():
    table = solved("hardswish", 3)
    assert {-3.0, 3.0} <= set(table.breaks)
    before, at, after = (table(np.array(3.0) + step) for step in (-1e-9, 0.0, 1e-9))
    assert at == after != before  # torch's gradient is 1 at 3


@pytest.mark.parametrize("objective", ["mse", "minimax"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "domain"), [("relu", (0, 5)), ("relu", (-5, 0)), ("relu6", (0, 6))]
)
def test_a_jump_at_the_end_of_the_domain_is_not_in_it(name, domain, form, objective):
    """The jump does not change the error, and q at the end has torch's value, since inputs saturate there."""
    table = solve(name, 2, domain=domain, form=form, objective=objective)
    assert (table.error, table.lower_bound) == (0.0, 0.0)
    slope = functions.get(name).derivative
    inside = np.linspace(*domain, 101)[1:-1]
    assert np.unique(table(inside)) == np.unique(slope(inside))
    ends = np.array(domain, dtype=float)
    assert np.array_equal(table(ends), slope(ends))


@pytest.mark.parametrize("form", FORMS)
def test_hardswish_between_its_jumps(form):
    # f' is a straight line from -1/2 to 3/2 there: K levels leave 6 (2 / K)**2 / 12.
    table = solve("hardswish", 2, domain=(-3, 3), form=form)
    assert table.error == pytest.approx(0.125, rel=1e-9)
    assert table.breaks == pytest.approx([-1.5, 0.0, 1.5], abs=1e-7)
    assert table.levels == pytest.approx([-0.25, 0.25, 0.75, 1.25], abs=1e-7)


DOMAINS = [(-0.5, 0.5), (0.5, 3.0), (-1e3, 1e3), (-1e-3, 2e-3), (-40.0, -5.0)]


@pytest.mark.fast(12)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tails", ["free", "pinned"])
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", ["gelu", "selu", "hardswish"])
def test_the_error_on_any_domain_by_adaptive_quadrature(name, domain, tails, form):
    table = solved(name, levels=5, form=form, domain=domain, tails=tails)
    assert table.domain == domain
    assert table.error == pytest.approx(recompute_error(table), rel=1e-6, abs=1e-15)
    assert table.gap < 1e-2 or table.error < 1e-14


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("relu_squared", {}, "finite asymptotic slopes"),
        ("leaky_relu", {"objective": "unbiased", "form": "intervals"}, "form levels"),
        (np.sin, {}, "tails pinned: expected finite asymptotic slopes, got none and none for"),
        (lambda x: np.sin(x * x) / 20, {}, "finite asymptotic slopes, got none and none for"),
    ],
)
def test_tails_that_cannot_be_pinned(function, options, message):
    with pytest.raises(SolveError, match=message):
        solve(function, 3, tails="pinned", **options)


def numpy_gelu(x):
    return 0.5 * x * (1.0 + erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize("form", FORMS)
def test_a_numpy_function_gets_the_table_of_the_named_one(form):
    table, named = solve(numpy_gelu, 3, form=form), solved("gelu", 3, form=form)
    # The numerical derivative's accuracy is part of the error that is claimed.
    assert named.error <= table.error <= named.error * (1 + 1e-7)
    assert table.lower_bound <= named.error
    assert table.gap < 1e-2 and table.function.endswith("numpy_gelu")
    check_same(table, named)


def check_same(table, named):
    assert table.error == pytest.approx(named.error, rel=1e-7)
    assert table.levels == pytest.approx(named.levels, abs=1e-8)
    assert table.breaks == pytest.approx(named.breaks, abs=1e-6)
    assert (table.codes == named.codes).all()


@pytest.mark.parametrize("name", ["gelu", "silu", "elu"])
def test_a_torch_function_gets_the_table_of_the_named_one(name):
    torch = pytest.importorskip("torch")
    check_same(solve(getattr(torch.nn.functional, name), 3), solved(name, 3))


def test_an_unbounded_derivative_warns():
    with pytest.warns(UserWarning, match="unbounded"):
        table = solve("relu_squared", 3)
    assert table(np.array(1e6)) == table(np.array(10.0)) == table.levels.max()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve("value", 2, grid=256)


REFUSED = [
    ({}, r"bits: expected 1 to 8 \(or levels from 2 to 256\), got neither"),
    ({"bits": 9}, "bits: expected an integer from 1 to 8, got 9"),
    ({"levels": 1}, "levels: expected an integer from 2 to 256, got 1"),
    ({"levels": 257}, "levels: expected an integer from 2 to 256, got 257"),
    ({"bits": 2, "levels": 5}, "levels: expected at most 4 with 2 bits, got 5"),
    ({"bits": 2, "form": "interval"}, "form"),
    ({"bits": 2, "objective": "l1"}, "objective"),
    ({"bits": 2, "tails": "loose"}, "tails"),
    ({"bits": 2, "objective": "unbiased", "form": "intervals"}, "objective unbiased: expected form levels"),
    ({"bits": 2, "progress": 3}, "progress: expected a callable, got 3"),
    ({"bits": 2, "grid": 15}, "grid: expected an integer from 16 to 4194304, got 15"),
    ({"bits": 2, "grid": 2**23}, "grid: expected an integer from 16 to 4194304"),
    ({"bits": 2, "grid": 1e3}, "grid: expected an integer from 16"),
    ({"bits": 2, "threads": 0}, "threads: expected an integer of at least 1, got 0"),
    ({"bits": 2, "parameters": 3}, "parameters: expected a mapping"),
    ({"bits": 2, "domain": (-1e308, 1e308)}, r"domain: expected numbers within 1e\+30"),
    ({"bits": 2, "domain": (1, 1)}, "domain: expected two finite numbers A < B, got 1 1"),
    ({"bits": 2, "domain": (0, math.nan)}, "domain"),
    ({"bits": 2, "weight": "gaussian"}, "weight"),
    ({"bits": 2, "parameters": {"alpha": 1.0}}, "alpha"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), REFUSED)
def test_refusals_are_one_line_that_names_the_argument(options, expected):
    with pytest.raises(FewbitError, match=expected) as refusal:
        solve("gelu", **options)
    assert isinstance(refusal.value, SolveError | WeightError | FunctionError)
    assert "\n" not in str(refusal.value)
    with pytest.raises(FewbitError):  # before anything is computed
        solve(lambda x: pytest.fail("f is called"), **options)


@pytest.mark.parametrize("weight", ["normal:20,1", np.linspace(12.0, 18.0, 4001)])
def test_a_callable_is_searched_where_it_is_used(weight):
    table = solve(lambda x: np.where(x > 15.3, 3 * (x - 15.3), 0.0), 1, weight=weight)
    assert (table.error, table.lower_bound) == (0.0, 0.0)
    assert table.breaks == pytest.approx([15.3], abs=1e-9)
    assert table.levels == pytest.approx([0.0, 3.0], abs=1e-11)


@pytest.mark.parametrize("name", ["relu", "relu6"])
def test_samples_behind_a_relu(name):
    """Half of the samples are 0, which is the left end of the density, and torch's gradient is 0 there."""
    f = functions.get(name)
    samples = f.value(4 * np.random.default_rng(0).standard_normal(20_000))
    table = solve(name, 1, weight=samples)
    assert np.array_equal(table(samples), f.derivative(samples))


def test_a_derivative_that_turns_too_often_is_refused():
    def f(x):
        return np.sin(3000 * x) / 3000

    with pytest.raises(FunctionError, match="turns more than|varies too fast"):
        solve(f, 2, derivative=lambda x: np.cos(3000 * x), kinks=[])


@pytest.mark.parametrize("objective", ["mse", "unbiased", "minimax"])
def test_too_many_pieces_are_refused_before_the_search(objective):
    expected = (
        r"expected at most 16384 pieces, got about 2\d{4}: the derivative turns 96 times on the domain \[-10, 10\]; "
        r"choose fewer than 256 levels \(--bits, --levels\) or a smaller domain \(--domain\)$"
    )
    options = {"objective": objective, "progress": lambda *_: pytest.fail("the search has begun")}
    with pytest.raises(SolveError, match=expected):
        solve(lambda x: -np.cos(15 * x) / 15, 8, derivative=lambda x: np.sin(15 * x), **options)


@pytest.mark.parametrize(
    ("slope", "options", "expected"),
    [
        (1e50, {}, "expected a derivative that is finite in float32, got 1e\\+51"),
        (1e-100, {"objective": "unbiased"}, "gaps between 4 levels that float32 can divide by"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*the derivative is unbounded")
def test_derivatives_that_float32_cannot_hold_are_refused(slope, options, expected):
    f = functions.get("value")
    with pytest.raises(FewbitError, match=expected):
        solve(lambda x: slope * f.value(x), 2, derivative=lambda x: slope * x, **options)


def oscillating(x):
    return x + np.sin(5 * x) ** 2 / 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (1, {}),
        (4, {"objective": "unbiased"}),
        (4, {"form": "intervals"}),
        (3, {"weight": "normal"}),
    ],
)
def test_a_derivative_with_64_turns_has_a_close_certificate(bits, options):
    """All pieces share the levels, but every piece needs its own cells."""
    table = solve(oscillating, bits, **options)
    assert table.solver["status"] == "stationary" and table.gap < 5e-3
    exact = solve(oscillating, bits, derivative=lambda x: 1 + np.sin(10 * x), **options)
    assert table.error == pytest.approx(exact.error, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"form": "intervals"}, {"objective": "unbiased"}])
def test_eight_bits_of_a_derivative_with_64_turns(options):
    table = solve(oscillating, 8, **options)
    assert table.gap < 0.02 and table.solver["seconds"] < 300


def test_a_large_gap_is_said(monkeypatch):
    monkeypatch.setattr(importlib.import_module("fewbit.solver.solve"), "_LARGE_GAP", 1e-6)
    expected = r"^gelu: the error may be up to .* % above the optimum; a larger grid= than 4096 narrows the gap$"
    with pytest.warns(UserWarning, match=expected):
        solve("gelu", 3)
    solve("gelu", 3, grid=512)  # who chooses the grid chooses the gap


@pytest.mark.parametrize("most", [8, 100, 999])
def test_fewer_atoms_bound_the_optimum_from_below(most):
    rng = np.random.default_rng(most)
    for count in (2, 5):
        value = np.unique(rng.choice([0.0, 1.0, 1e3], 1000) + rng.normal(size=1000))
        mass = rng.exponential(size=len(value)) * (rng.uniform(size=len(value)) < 0.9)
        few, moved, excess = _fewer_atoms(value, mass, most)
        assert len(few) <= most and (moved >= 0).all() and excess >= 0
        assert moved.sum() == pytest.approx(mass.sum(), rel=1e-12)
        assert moved @ few == pytest.approx(mass @ value, rel=1e-12)
        optimum = partition(value, count, mass).cost
        bound = partition(few, count, moved).cost - excess
        assert bound <= optimum * (1 + 1e-9)
        assert most < 900 or bound > 0.99 * optimum


@pytest.mark.parametrize(
    ("f", "slopes"),
    [
        (np.arctan, (0.0, 0.0)),
        (lambda x: x + np.arctan(x), (1.0, 1.0)),
        (lambda x: np.sqrt(1 + x * x), (-1.0, 1.0)),
        (lambda x: np.arcsinh(x) / 3, (0.0, 0.0)),
        (lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), (0.0, 1.0)),
    ],
)
def test_pinned_tails_of_a_callable_are_its_asymptotic_slopes(f, slopes):
    table = solve(f, 3, tails="pinned")
    ends = table(np.array([-1e6, 1e6]))
    assert ends == pytest.approx(slopes, rel=0, abs=1e-9)


def xielu(alpha, eps):
    """Return f and f' of transformers' xIELU: f jumps at 0 by eps, and f' is 1/2 - alpha on (eps, 0]."""

    def f(x):
        below = (np.expm1(np.minimum(x, eps)) - x) * alpha + 0.5 * x
        return np.where(x > 0, alpha * x * x + 0.5 * x, below)

    def slope(x):
        rise = np.where(x < eps, np.exp(np.minimum(x, 0.0)), 0.0)
        return np.where(x > 0, 2 * alpha * x + 0.5, alpha * (rise - 1.0) + 0.5)

    return f, slope


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the derivative is unbounded")
def test_xielu_of_transformers():
    """The jump of f at 0 is a kink of the given derivative, whether kinks are given or not."""
    activations = pytest.importorskip("transformers.activations")
    alpha = 0.80078125
    f, slope = xielu(alpha, -0.0)
    smooth = solve(f, 3, derivative=slope).error
    f, slope = xielu(alpha, -1e-6)
    for kinks in (None, [-1e-6, 0.0]):
        table = solve(f, 3, derivative=slope, kinks=kinks)
        assert table.error == pytest.approx(smooth, rel=1e-5)
    assert solve(activations.XIELUActivation(), 3).error == pytest.approx(smooth, rel=0.02)


def test_a_jump_of_f_is_allowed_at_a_kink_that_is_named():
    hard = functions.get("hardshrink")
    table = solve(hard.value, 1, kinks=[-0.5, 0.5])
    assert table.error == 0 and table.breaks.tolist() == [-0.5, 0.5]
    expected = "jumps at x = -0.5: .* or pass it in kinks= to fewbit.solve; Pointwise"
    with pytest.raises(FunctionError, match=expected):
        solve(hard.value, 1)
