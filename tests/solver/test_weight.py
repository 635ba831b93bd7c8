"""Weights from every kind of specification, and refusals."""

import json

import numpy as np
import pytest
from naive import SampledError, normal_density
from problems import solved

from fewbit import functions
from fewbit.errors import SolveError, WeightError
from fewbit.solver import weight as weight_module
from fewbit.solver.solve import solve
from fewbit.solver.weight import make_weight

FORMS = ["levels", "intervals"]
EDGES = np.array([-4.0, -2.5, -1.0, 0.25, 0.5, 3.0])
HEIGHTS = np.array([1.0, 2.0, 0.0, 5.0, 0.5])
NOISE = np.random.default_rng(0)


def refusal_of(call, *arguments, **options):
    with pytest.raises(WeightError) as refusal:
        call(*arguments, **options)
    message = str(refusal.value)
    assert message and "\n" not in message
    return message


def mixture(n, seed=0):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n) < 0.7, rng.normal(-1.0, 0.5, n), rng.normal(1.5, 1.0, n))


def mixture_density(x):
    return 0.7 * normal_density(-1.0, 0.5)(x) + 0.3 * normal_density(1.5, 1.0)(x)


def test_uniform_is_one():
    weight = make_weight("uniform")
    assert weight.density(np.array([-100.0, 0.0, 3.0])).tolist() == [1.0, 1.0, 1.0]
    assert make_weight(None).document() == weight.document() == {"kind": "uniform"}


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [("normal", 0.0, 1.0), ("normal:1.5,0.25", 1.5, 0.25), ("normal:-3,2e1", -3.0, 20.0)],
)
def test_normal_is_the_density(text, mean, std):
    weight = make_weight(text)
    x = np.linspace(mean - 5 * std, mean + 5 * std, 101)
    assert weight.density(x) == pytest.approx(normal_density(mean, std)(x), rel=1e-14)
    assert weight.document() == {"kind": "normal", "mean": mean, "std": std}


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("scales", 0.03, 10), ("scales:0.5,2", 0.5, 2), ("scales:1e-3,1e3", 1e-3, 1e3)],
)
def test_scales_is_a_mixture_of_normal_densities(text, low, high):
    weight = make_weight(text)
    assert weight.document() == {"kind": "scales", "low": low, "high": high}
    x = np.array([0.0, 1e-9, 1e-5, 0.002, 0.05, 0.3, 1.0, -2.5, 7.0, 30.0])
    # The integral over log(s), by Gauss and Legendre.
    points, shares = np.polynomial.legendre.leggauss(200)
    s = np.exp(0.5 * (np.log(low * high) + np.log(high / low) * points))[:, None]
    expected = 0.5 * shares @ (np.exp(-0.5 * (x / s) ** 2) / (s * np.sqrt(2 * np.pi)))
    assert weight.density(x) == pytest.approx(expected, rel=1e-11, abs=1e-300)


def test_a_histogram_is_its_heights_normalized():
    weight = make_weight((EDGES, HEIGHTS))
    total = (HEIGHTS * np.diff(EDGES)).sum()
    middles = 0.5 * (EDGES[1:] + EDGES[:-1])
    assert weight.density(middles) == pytest.approx(HEIGHTS / total, rel=1e-15)
    assert weight.density(np.array([-4.5, 3.5])).tolist() == [0.0, 0.0]
    assert weight.domain == (-4.0, 3.0)
    assert make_weight(weight) is weight
    # The domain is where the histogram has mass.
    assert make_weight(([0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 0.0])).domain == (1.0, 2.0)


@pytest.mark.parametrize("n", [2, 3, 100, 10_000])
def test_samples_become_a_density_over_their_range(n):
    samples = np.random.default_rng(n).standard_normal(n)
    weight = make_weight(samples)
    assert weight.domain == (samples.min(), samples.max())
    edges = np.array(weight.document()["edges"])
    density = weight.density(0.5 * (edges[1:] + edges[:-1]))
    assert (density * np.diff(edges)).sum() == pytest.approx(1.0, rel=1e-12)
    counts = np.histogram(samples, edges)[0]
    assert density * np.diff(edges) * n == pytest.approx(counts, rel=1e-9)


def test_the_shape_and_type_of_samples_do_not_matter():
    samples = np.random.default_rng(1).standard_normal(600).astype(np.float16)
    expected = make_weight(samples.astype(np.float64)).document()
    assert make_weight(samples.reshape(10, 3, 20)).document() == expected
    assert make_weight(samples.astype(float).tolist()).document() == expected
    assert make_weight(np.random.default_rng(2).permutation(samples)).document() == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gelu", "tanh"])
def test_a_table_for_samples_serves_the_density_they_came_from(name, form):
    best = solve(name, 3, weight=mixture_density, form=form)
    fitted = solve(name, 3, weight=mixture(200_000), form=form)
    assert fitted.error == pytest.approx(best.error, rel=0.05)
    error = SampledError(functions.get(name), (-10, 10), mixture_density).of_table(fitted)
    assert best.error * (1 - 1e-3) <= error <= best.error * 1.01


def test_samples_that_are_no_real_numbers_are_refused():
    torch = pytest.importorskip("torch")
    samples = np.exp(1j * np.arange(99.0))
    found = torch.tensor(samples)
    real = found.real
    odd = found, found.conj(), real > 0, real.to_sparse(), real.to("meta")
    for values in (samples, samples.real > 0, *odd):
        assert "samples: expected numbers, got" in refusal_of(make_weight, values)


def test_samples_with_a_heap_at_one_value():
    """Half of the values are exactly 0, as after a ReLU, so q is accurate there."""
    table = solve("gelu", 3, weight=np.maximum(mixture(50_000), 0.0))
    assert abs(table(np.array(0.0)) - 0.5) < 0.01


ATOMS = {
    "998 zeros and two outliers": np.concatenate([np.zeros(998), [1000.0, -1000.0]]),
    "three values": np.repeat([-1.0, 0.5, 2.0], 100),
    "integers": np.random.default_rng(4).integers(-4, 5, 5000).astype(np.float64),
    "a density beside an atom": np.maximum(np.random.default_rng(5).standard_normal(20_000), 0),
    "few different values": np.array([1.0, 1.0, 2.0]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gelu", "selu"])
@pytest.mark.parametrize("kind", ATOMS)
def test_the_error_for_samples_with_atoms_is_that_of_the_samples(kind, name, form):
    samples = ATOMS[kind]
    assert make_weight(samples).domain == (samples.min(), samples.max())
    for bits in (1, 3):
        table = solve(name, bits, weight=samples, form=form)
        difference = functions.get(name).derivative(samples) - table(samples)
        rel = 0.02 if kind == "a density beside an atom" else 1e-5
        assert table.error == pytest.approx(np.mean(difference**2), rel=rel, abs=1e-13)


@pytest.mark.parametrize("outlier", [1e2, 1e6])
def test_one_outlier_does_not_ruin_a_table(outlier):
    samples = np.random.default_rng(3).standard_normal(100_000)
    table = solve("gelu", 3, weight=np.append(samples, outlier))
    error = SampledError(functions.get("gelu"), (-8, 8), normal_density()).of_table(table)
    assert error <= 1.01 * solved("gelu", 3, weight="normal").error


@pytest.mark.parametrize("form", FORMS)
def test_a_callable_density_is_that_density(form):
    named = solve("gelu", 3, weight="normal:0.5,1.5", domain=(-10, 10), form=form)
    own = solve("gelu", 3, weight=normal_density(0.5, 1.5), form=form)
    assert own.error == pytest.approx(named.error, rel=1e-9)
    assert own.levels == pytest.approx(named.levels, abs=1e-8)
    assert own.weight["kind"] == "callable"


@pytest.mark.parametrize("form", FORMS)
def test_a_callable_density_that_jumps(form):
    low, high = 0.1 - 1.2345, 0.1 + 1.2345
    expected = solve("gelu", 3, weight=([low, high], [1.0]), form=form)
    table = solve("gelu", 3, weight=lambda x: ((x > low) & (x < high)) / (high - low), form=form)
    assert table.error == pytest.approx(expected.error, rel=1e-6)
    assert table.lower_bound <= expected.error * (1 + 1e-12)


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        (lambda x: x, "expected finite values >= 0, got -"),
        (lambda x: np.full_like(x, np.nan), "nan"),
        (lambda x: 1.0, "shape"),
        (lambda x: x[:1], "shape"),
        (lambda x: 1 / 0, "expected a function of float64 arrays, but it raised ZeroDivisionError"),
        (lambda x: NOISE.random(x.shape), "does it return random numbers?"),
    ],
)
def test_a_density_that_is_none(density, expected, monkeypatch):
    monkeypatch.setattr(weight_module, "_MOST_POINTS", 2**17)
    assert expected in refusal_of(solve, "gelu", 2, weight=density)


@pytest.mark.parametrize(
    "spec",
    ["uniform", "normal:0.25,3", "scales:0.1,3", (EDGES, HEIGHTS), mixture(5_000)],
    ids=["uniform", "normal", "scales", "histogram", "samples"],
)
def test_documents_round_trip(spec):
    weight = make_weight(spec)
    document = json.loads(json.dumps(weight.document()))
    assert make_weight(document).document() == weight.document()
    x = np.linspace(-5, 5, 101)
    assert (make_weight(document).density(x) == weight.density(x)).all()


def test_a_callable_does_not_come_back_from_a_document():
    """A document may come from an untrusted file, so a name in it is never imported."""
    document = make_weight(normal_density).document()
    assert document == {"kind": "callable", "name": "naive:normal_density"}
    assert "expected the callable naive:normal_density itself" in refusal_of(make_weight, document)


SAMPLES = mixture(1_000).astype(np.float32)


def _npy(array):
    return lambda path: np.save(path, array)


def _npz(**arrays):
    return lambda path: np.savez(path, **arrays)


def _bytes(content):
    return lambda path: path.write_bytes(content)


COUNTS = HEIGHTS * np.diff(EDGES)
GOOD_FILES = {
    "samples.npy": (lambda path: np.save(path, SAMPLES.reshape(10, 100)), SAMPLES),
    "samples.npz": (lambda path: np.savez_compressed(path, activations=SAMPLES), SAMPLES),
    "density.npz": (_npz(edges=EDGES, density=HEIGHTS), (EDGES, HEIGHTS)),
    "counts.npz": (_npz(edges=EDGES, counts=COUNTS), (EDGES, HEIGHTS)),
}


@pytest.mark.parametrize("name", GOOD_FILES)
def test_a_weight_from_a_file(tmp_path, name):
    save, spec = GOOD_FILES[name]
    save(tmp_path / name)
    expected = make_weight(spec).document()
    for path in (tmp_path / name, str(tmp_path / name)):
        document = make_weight(path).document()
        assert document["edges"] == expected["edges"]
        assert document["density"] == pytest.approx(expected["density"], rel=1e-15)
    assert solve("gelu", 2, weight=path).weight == document


def _zipped_half(path):
    np.savez(path, edges=EDGES, density=HEIGHTS)
    path.write_bytes(path.read_bytes()[:-40])


def _half(path):
    np.save(path, mixture(100))
    path.write_bytes(path.read_bytes()[:200])


OBJECTS = np.array([{"a": 1}, None], dtype=object)
FILES = {
    "empty.npy": _bytes(b""),
    "text.npy": _bytes(b"1.0 2.0\n3.0 4.0\n"),
    "truncated.npz": _zipped_half,
    "short.npy": _half,
    "pickled.npy": _npy(OBJECTS),
    "strings.npy": _npy(["a", "b"]),
    "records.npy": _npy(np.zeros(3, dtype=[("a", "f8"), ("b", "i4")])),
    "nan.npy": _npy([1.0, np.nan, 2.0]),
    "constant.npy": _npy(np.full(100, 3.0)),
    "complex.npy": _npy([1 + 2j, 3.0]),
    "names.npz": _npz(a=EDGES, b=HEIGHTS),
    "none.npz": _npz(),
    "lengths.npz": _npz(edges=EDGES, counts=np.ones(3)),
    "scalar.npz": _npz(edges=np.array(1.0), counts=np.ones(3)),
    "descending.npz": _npz(edges=EDGES[::-1], counts=HEIGHTS),
    "negative.npz": _npz(edges=EDGES, counts=-HEIGHTS),
    "missing.npy": lambda path: None,
    "folder.npz": lambda path: path.mkdir(),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FILES)
def test_files_that_hold_no_weight(tmp_path, name):
    with np.errstate(invalid="ignore"):
        FILES[name](tmp_path / name)
    assert name in refusal_of(make_weight, tmp_path / name)


SPECIFICATIONS = [
    "", "norm", "normal:", "normal:1", "normal:1,2,3", "normal:a,b", "normal:0,0", "normal:0,-1", "normal:nan,1",
    "normal:0,inf", "scales:", "scales:1", "scales:2,1", "scales:0,1", "scales:1,inf", "scales:1e-40,1", "weights.txt", 5, [], [1.0], [2.0, 2.0], [1.0, float("inf")], ["a", "b"], [[1.0, 2.0], [3.0]],
    ([0.0, 1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0]), ([0.0, 1.0], [0.0]), ([0.0, 1.0], [-1.0]), ("a", "b"),
    np.array([1 + 2j, 3.0]), np.array([True, False]),
    {}, {"kind": "cauchy"}, {"kind": "scales"}, {"kind": "scales", "low": 2.0, "high": 1.0}, {"kind": "normal", "mean": "zero"}, {"kind": "normal", "mean": 0.0, "std": -1.0},
    {"kind": "histogram"}, {"kind": "histogram", "edges": [0.0, 1.0]},
    {"kind": "histogram", "edges": "ab", "density": [1.0]}, {"kind": "callable"},
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECIFICATIONS, ids=repr)
def test_specifications_that_are_none(spec):
    refusal_of(make_weight, spec)


def ripple(x):
    """A density whose integral over [-10, 10] is 0.59, so that it is not scaled."""
    return 0.03 + 0.01 * np.cos(x)


OBJECTIVES = {
    "levels": {},
    "intervals": {"form": "intervals"},
    "unrefined": {"refine": False},
    "pinned": {"tails": "pinned"},
    "minimax": {"objective": "minimax"},
    "unbiased": {"objective": "unbiased"},
}


@pytest.mark.parametrize("power", [1026, -1000])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_weight_times_a_power_of_two_has_the_same_table(kind, power):
    """The largest value is 1.4e307, so its integral overflows. The smallest error, 1e-305, is barely normal."""
    options = {"levels": 3, **OBJECTIVES[kind]}
    plain = solve("gelu", weight=ripple, **options)
    scaled = solve("gelu", weight=lambda x: np.ldexp(ripple(x), power), **options)
    for name in ("levels", "breaks", "codes"):
        assert (getattr(scaled, name) == getattr(plain, name)).all()
    assert scaled.relative_error == plain.relative_error > 0
    assert scaled.solver["status"] == plain.solver["status"]
    factor = 0 if kind == "minimax" else power
    assert scaled.error == np.ldexp(plain.error, factor)
    assert scaled.lower_bound == np.ldexp(plain.lower_bound, factor) > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("factor", [1e-320, 1e-300, 1e300, 1e308])
def test_a_histogram_of_counts_near_the_ends_of_float64(tmp_path, factor, form):
    counts = np.array([1.0, 0.0, 1.0, 1.0]) * factor
    np.savez(tmp_path / "counts.npz", edges=[-4.0, -2.0, 0.0, 1.0, 3.0], counts=counts)
    expected = ([-4.0, -2.0, 0.0, 1.0, 3.0], [0.5, 0.0, 1.0, 0.5])
    for weight in (tmp_path / "counts.npz", (expected[0], np.array(expected[1]) * factor)):
        document = make_weight(weight).document()
        assert document == make_weight(expected).document()
    assert solve("gelu", 1, form=form, weight=weight).weight == document


FAR = [
    (lambda x: 1e-320 + 0 * x, "error that float64 can represent, got about 1e-32"),
    (lambda x: 1e-310 * np.exp(-x * x), "error that float64 can represent, got about 1e-31"),
    (([-5, 0, 5], [1e308, 1e-308]), "heights that float64 can divide by their integral"),
    (([-1e300, 1e300], [1.0]), "histogram edges: expected numbers within 1e\\+30"),
    ("normal:0,1e-310", "expected STD from 1e-30 to 1e\\+30 for MEAN 0, got 1e-310$"),
    ("normal:1e20,1", "expected STD from 1e\\+08 to 1e\\+30 for MEAN 1e\\+20, got 1$"),
    ("normal:1e300,1", "expected MEAN within 1e\\+30, got 1e\\+300$"),
    ("normal:0,1e30", "domain of .*: expected numbers within 1e\\+30, got -8e\\+30 to 8e\\+30"),
    (np.linspace(-1, 1, 99) * 1.7e308, "samples: expected numbers within 1e\\+30"),
    (np.linspace(-1, 1, 99) * 1e-310, "samples: expected a range that is at least 1.18e-38"),
    (1 + 1e-12 * np.arange(99), "samples: expected a range that is at least 1e-09 wide"),
]


@pytest.mark.parametrize(("weight", "expected"), FAR)
def test_weights_beyond_the_range_of_float64(weight, expected):
    for objective in ("mse", "unbiased"):
        with pytest.raises((WeightError, SolveError), match=expected) as refusal:
            solve("gelu", 1, weight=weight, objective=objective)
        assert "\n" not in str(refusal.value)


def test_an_error_of_zero_does_not_ignore_negligible_parts_of_the_weight():
    """One level is exact on the left, and wrong on the right, where the products of the weight underflow."""
    with pytest.raises(SolveError, match="integrate together, got positive values at x = [0-9]"):
        solve("relu", 1, weight=lambda x: np.where(x < 0, 1e308, 1e-320))
    table = solve("relu", 1, weight=lambda x: np.where(x < 0, 1e308, 0.0))
    assert table.exact and table.levels.tolist() == [0.0]


@pytest.mark.parametrize(
    ("weight", "half"),
    [
        (lambda x: np.maximum(0.0, 1 - x * x), 1.0),
        (lambda x: 1e-300 * np.maximum(0.0, 1 - x * x), 1.0),
        (lambda x: np.where(x < 0, 1e308, 1e-320), 10.0),
        ("normal:0,0.2", 10.0),
        (([-3.0, -1.0, 1.0, 3.0], [0.0, 1.0, 0.0]), 1.0),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_minimax_counts_every_x_with_a_positive_weight(weight, half, form):
    """The derivative x on [-h, h] has the least largest error h / 4 with four levels."""
    table = solve("value", 2, weight=weight, domain=(-10, 10), objective="minimax", form=form)
    assert table.error == pytest.approx(half / 4, rel=1e-12)
    assert table.lower_bound == pytest.approx(half / 4, rel=1e-12)


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_a_peak_between_the_first_sample_points(floor):
    """The first points of the mesh are 0 and 0.0049."""
    table = solve("gelu", 2, weight=lambda x: floor + 1e4 * ((x > 0.002) & (x < 0.003)))
    edges, heights = [-10.0, 0.002, 0.003, 10.0], [floor, floor + 1e4, floor]
    expected = solve("gelu", 2, weight=(edges, heights), domain=(-10, 10))
    mass = np.dot(heights, np.diff(edges))
    assert table.error == pytest.approx(mass * expected.error, rel=1e-5)
    assert table.relative_error == pytest.approx(expected.relative_error, rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_where_the_weight_is_zero_q_continues_to_the_middle(form):
    for edges, middle in (
        ([-4.0, -2.0, 2.0, 4.0], 0.0),
        ([-4.0, -1.0, 3.0, 5.0], 1.0),
        ([-2.0, -1.5, 2.0, 9.0], 0.25),
    ):
        table = solve("gelu", 1, weight=(edges, [1.0, 0.0, 1.0]), form=form)
        assert table.breaks.tolist() == [middle]


@pytest.mark.parametrize(
    ("weight", "domain"),
    [
        (([0.0, 1.0], [1.0]), (1.0, 2.0)),
        (([0.0, 1.0], [1.0]), (-1.0, 0.0)),
        (([-6.0, 1.0, 4.0], [0.0, 1.0]), (-1.0, 1.0)),
        ("normal:0,0.01", (5.0, 6.0)),
        (lambda x: 0.0 * x, None),
        (lambda x: (x == 0) * 1.0, None),
    ],
)
def test_no_mass_on_the_domain(weight, domain):
    for form in FORMS:
        with pytest.raises(SolveError, match="mass") as refusal:
            solve("gelu", 2, weight=weight, domain=domain, form=form)
        assert "\n" not in str(refusal.value)
