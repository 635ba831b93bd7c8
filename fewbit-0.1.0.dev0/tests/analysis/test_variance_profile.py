"""variance_profile: against closed forms, against all outcomes of rounding enumerated, and what it must not disturb."""

import itertools
import json
import re
from collections import UserDict
from dataclasses import fields

import naive_quantizer as naive
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from measured import Images, gradient, squared  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import fewbit  # noqa: E402
from fewbit.analysis import deferred  # noqa: E402
from fewbit.analysis.profile import ARRAYS, VarianceProfile  # noqa: E402
from fewbit.analysis.variance_profile import variance_profile  # noqa: E402
from fewbit.demo.transformer import CharTransformer  # noqa: E402
from fewbit.errors import InputError, OutputExistsError  # noqa: E402
from fewbit.planning.candidates import Candidate  # noqa: E402
from fewbit.render.terminal import plain  # noqa: E402
from fewbit.runtime.backends.reference_quantizer import squares  # noqa: E402
from fewbit.runtime.format.distortion import distortion, relative_distortion  # noqa: E402
from fewbit.runtime.quantizers.quantizer import Quantizer  # noqa: E402
from fewbit.runtime.saved.context import ForwardContext  # noqa: E402

SIGMAS = 4.5


def assert_measures(measured, error, expected, most=0.1):
    """Within its standard errors of what is expected, and those small."""
    assert error <= most * expected
    assert abs(measured - expected) <= SIGMAS * error


def outcomes(x, bits):
    """[(probability, rounded values)] of all the ways in which one group can be rounded."""
    lower, step, fraction = naive.grid(x, bits)
    return [
        (np.prod(np.where(up, fraction, 1 - fraction)), lower + step * np.array(up))
        for up in itertools.product((0, 1), repeat=len(lower))
    ]


# --- against closed forms ---------------------------------------------------------------------------


def variance_of_rows(rows, bits, kind):
    """Return the variance that rounding adds to each row: the sum of step^2 p (1 - p), or the rotated distortion."""
    if kind == "rotated":
        return distortion(kind, bits) * squares(rows, 256, kind=kind).double().numpy()
    grids = [naive.grid(row, bits) for row in rows]
    return np.array([(step**2 * f * (1 - f)).sum() for _, step, f in grids])


@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_linear_layers_as_their_formula_says(bits, kind):
    """ActNN, equation 9 before its average over positions: sum of g^2 times the variance, own contexts alone."""
    n, d = 4, 256 if kind == "rotated" else 96
    model = nn.Sequential(nn.Linear(d, d, bias=False), nn.Linear(d, 3))
    x = torch.rand(n, d)
    settings = {"layers": {"quantizer": kind}, "draws": 60, "chunks": 4}
    profile = variance_profile(model, x, squared, bits=bits, **settings)

    hidden = model[0](x)
    y = model[1](hidden)
    (of_y,) = torch.autograd.grad(
        (y * torch.linspace(0.5, 1.5, 3)).square().mean(), y, retain_graph=True
    )
    of_hidden = of_y @ model[1].weight
    assert profile.contexts == profile.parameters == ("0", "1")
    for i, (kept, grad) in enumerate([(x, of_hidden), (hidden, of_y)]):
        variance = variance_of_rows(kept.detach(), bits, kind)
        expected = np.square(grad.detach().double().numpy()).sum(1) @ variance
        assert_measures(profile.terms[i, i], profile.terms_error[i, i], expected)
        assert_measures(profile.direct[i], profile.direct_error[i], expected)
    # Nothing of what a linear layer keeps goes into its input's gradient.
    assert profile.terms[0, 1] == profile.terms[1, 0] == 0.0
    assert profile.own_share == 1.0
    assert profile.total() == pytest.approx(profile.sampling + profile.quantization)


class Norms(nn.Module):
    """A linear layer below two norms, of one sample with four features: all rounding can be enumerated."""

    def __init__(self):
        super().__init__()
        self.below = nn.Linear(3, 4, bias=False)
        self.first = nn.LayerNorm(4, eps=0.0, elementwise_affine=False)
        self.second = nn.LayerNorm(4, eps=0.0, elementwise_affine=False)

    def forward(self, x):
        return self.second(self.first(self.below(x)).square())


def input_gradient(g, one, other, deviation):
    return (g - g.mean() - one * (other * g).mean()) / deviation


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 2])
def test_norms_as_all_their_outcomes_say(copies):
    """The terms, with the later norm's noise in the earlier one's, the direct variance, and the bias."""
    bits, model, x = 2, Norms(), torch.randn(4, 3)
    g = np.array([0.3, -1.0, 2.0, 0.7])

    def loss(model, batch):
        return (model(batch[:1]) @ torch.tensor(g, dtype=torch.float32)).sum()

    layers = {"copies": copies, "quantizer": "uniform"}
    profile = variance_profile(model, x, loss, bits=bits, layers=layers, draws=400, chunks=4)

    h = model.below(x[:1]).detach().double().numpy()[0]
    z = (h - h.mean()) / h.std()
    squares = z**2
    w = (squares - squares.mean()) / squares.std()
    norm = float((x[0].double() ** 2).sum())  # of the outer product with x

    def drawn(x):
        found = outcomes(x, bits)
        if copies == 1:
            return [(p, one, one) for p, one in found]
        return [(p * q, one, other) for p, one in found for q, other in found]

    def first(g):
        """Mean and variance of the first norm's input gradient, and its exact value."""
        rows = [(p, input_gradient(g, one, other, h.std())) for p, one, other in firsts]
        return *moments(rows), input_gradient(g, z, z, h.std())

    def moments(rows):
        p = np.array([row[0] for row in rows])
        values = np.array([row[1] for row in rows])
        mean = p @ values
        return mean, float(p @ ((values - mean) ** 2).sum(1))

    firsts = drawn(z)
    arriving = [
        (p, 2 * z * input_gradient(g, one, other, squares.std())) for p, one, other in drawn(w)
    ]
    results = [(p, *first(item)) for p, item in arriving]
    of_second = moments([(p, exact) for p, _, _, exact in results])[1]
    of_first = sum(p * variance for p, _, variance, _ in results)
    mean, between = moments([(p, mean) for p, mean, _, _ in results])
    exact = input_gradient(2 * z * input_gradient(g, w, w, squares.std()), z, z, h.std())

    below = profile.parameters.index("below")
    rows = [profile.contexts.index(item) for item in ("first", "second")]
    for row, expected in zip(rows, (of_first, of_second), strict=True):
        assert_measures(profile.terms[row, below], profile.terms_error[row, below], norm * expected)
    direct = norm * (of_first + between)
    assert_measures(profile.direct[below], profile.direct_error[below], direct)
    bias = norm * ((mean - exact) ** 2).sum()
    assert profile.bias_error[below] < 0.1 * direct
    assert abs(profile.bias[below] - bias) < SIGMAS * profile.bias_error[below]


# --- the theorem ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


def cases():
    images = torch.randn(16, 1, 8, 8)
    yield "residual", Images(), images, ("stem.0", "stem.1", "body.0", "body.1", "head")
    yield "channels last", Images(), images.to(memory_format=torch.channels_last), None
    model = CharTransformer(20, 12, width=32, depth=1, heads=2)
    block = "norm1", "qkv", "", "proj", "norm2", "mlp.0", "mlp.2"
    contexts = *(f"blocks.0.{name}".rstrip(".") for name in block), "norm", "head"
    yield "transformer", model, torch.randint(20, (16, 12)), contexts
    yield "dropout", Attention(), torch.randn(16, 8, 16), ("norm", "attention")


@pytest.mark.slow
@pytest.mark.parametrize("case", range(4))
def test_the_sum_of_the_terms_is_the_variance(case):
    name, model, x, contexts = list(cases())[case]
    profile = variance_profile(model, x, squared, draws=24)
    assert contexts is None or profile.contexts == contexts
    total, direct = profile.quantization.sum(), profile.direct.sum()
    assert total == pytest.approx(direct, rel=0.1)
    errors = profile.agreement
    assert np.abs(errors).max() < SIGMAS
    assert np.square(errors).mean() < 2.5
    # It would not do without the terms of other contexts.
    if name != "dropout":
        assert profile.own.sum() < 0.97 * direct
    # Later parameters have no noise of earlier contexts.
    last = profile.parameters.index(profile.contexts[-1])
    assert not profile.terms[:-1, last].any() and profile.terms[-1, last] > 0


@pytest.mark.slow
def test_a_checkpoint_changes_nothing():
    class Region(Images):
        def forward(self, x):
            x = self.stem(x)
            x = F.relu(x + checkpoint(self.body, x, use_reentrant=False))
            return self.head(x.mean((2, 3)))

    x, profiles = torch.randn(16, 1, 8, 8), []
    for cls in (Images, Region):
        torch.manual_seed(0)
        # Rotated copies of a ReLU's result leave out zeros, but not in a checkpointed region.
        layers = fewbit.LayerSettings(quantizer="uniform")
        profiles.append(variance_profile(cls(), x, squared, draws=24, layers=layers))
    plain, regions = profiles
    assert plain.contexts == regions.contexts
    errors = np.hypot(plain.terms_error, regions.terms_error)
    assert (np.abs(plain.terms - regions.terms) <= SIGMAS * errors).all()
    assert np.abs(regions.agreement).max() < SIGMAS


def test_parameters_of_an_attention_are_its_own():
    profile = variance_profile(Attention(), torch.randn(16, 8, 16), squared, draws=2)
    assert profile.parameters == ("norm", "attention")


class Late(nn.Module):
    """Parameters in another order than that of the forward, as in transformers' Llama: norms after what they feed."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(
            torch.ones(4)
        )  # the model's own: it is called first, and keeps nothing
        self.head = nn.Linear(32, 4)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.bias = nn.Linear(1, 32)  # never called
        self.norm = nn.LayerNorm(32)
        self.embedding = nn.Embedding(20, 32)
        self.scale = nn.Embedding(20, 32)

    def forward(self, x):
        y = self.norm(self.embedding(x))
        y = y + self.attention(y, y, y, need_weights=False)[0] + self.bias.bias
        return self.head(y * (1 + self.scale(x)).detach() + 0 * self.scale(x)) + self.unused


def test_both_axes_are_in_the_order_of_the_forward():
    model, batches = Late(), [torch.randint(20, (8, 6)) for _ in range(2)]
    profile = variance_profile(model, batches, squared, draws=4)
    assert profile.contexts == ("norm", "attention", "head")
    called = "", "embedding", "norm", "attention", "scale", "head"
    assert profile.parameters == (*called, "bias")
    # The numbers are those of the names.
    gradients = []
    for batch in batches:
        model.zero_grad()
        squared(model, batch).backward()
        named = dict(model.named_parameters())
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in named.items()
                if parameter.grad is not None
            }
        )
    for column, path in enumerate(profile.parameters):
        own = [name for name in gradients[0] if path_of(name) == path]
        expected = sum((gradients[0][name] - gradients[1][name]).square().sum() / 2 for name in own)
        assert profile.sampling[column] == pytest.approx(expected.item(), rel=1e-4)
    head = profile.parameters.index("head")
    assert profile.terms[2, head] > 0 and not profile.terms[:2, head].any()
    assert profile.direct[head] == pytest.approx(profile.terms[2, head], rel=0.5)
    assert (profile.bias_error[[0, 6]] == 0).all() and profile.bias_error[head] > 0


def path_of(parameter):
    path = parameter.rpartition(".")[0]
    return path.removesuffix(".out_proj")


def test_a_tied_parameter_and_a_frozen_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    profile = variance_profile(model, torch.randn(8, 8), squared, draws=4)
    assert profile.contexts == ("0", "1")  # the frozen layer keeps nothing
    assert profile.parameters == ("0", "1")  # 1 has its bias, which no context adds noise to
    assert (profile.terms[:, 0] > 0).all() and not profile.terms[:, 1].any()


# --- sampling and bias ------------------------------------------------------------------------------


@pytest.mark.slow
def test_chunks_with_a_batch_norm_come_with_a_warning():
    x = torch.randn(16, 1, 8, 8)
    profile = variance_profile(Images(), x, squared, draws=2)
    assert profile.sampled.startswith("8 chunks of one batch of 16 (too much, as chunks have batch")
    assert profile.sampled in " ".join(str(profile).split())
    several = variance_profile(Images(), list(x.split(4)), squared, draws=2)
    assert several.sampled == "4 batches of 4"
    assert several.sampling.shape == profile.sampling.shape


def test_two_batches_say_nothing_of_the_error():
    profile = variance_profile(nn.Linear(3, 1), list(torch.randn(2, 8, 3)), squared, draws=2)
    assert np.isnan(profile.sampling_error).all() and np.isfinite(profile.sampling).all()


def test_bias_is_that_of_few_bit_activations():
    """Exact inputs but for 8 bits: what is left is the codes' difference, which no draw changes."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(16, 64)
    profile = variance_profile(model, x, squared, bits=8, layers={"activation_bits": 1}, draws=20)
    exact = gradient(model, x)
    fewbit.compress_(
        model, layers={"activation_bits": 1, "functional": False}, exclude=["0", "2"], verbose=False
    )
    expected = float((gradient(model, x) - exact).square().sum())
    assert_measures(profile.bias.sum(), profile.bias_error.sum(), expected)


def test_layers_linear_in_what_they_keep_have_no_bias():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    profile = variance_profile(model, torch.randn(16, 64), squared, draws=40)
    assert (np.abs(profile.bias) < SIGMAS * profile.bias_error).all()
    assert (profile.bias_error < 0.1 * profile.direct).all()


def test_dropout_draws_alike_in_all_passes():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    x = torch.randn(16, 64)
    profile = variance_profile(model, x, squared, bits=8, draws=4)
    between = (gradient(model, x) - gradient(model, x)).square().sum() / 2
    assert 0 < profile.direct.sum() < 1e-3 * between
    assert abs(profile.bias.sum()) < 1e-3 * between


# --- what it must not disturb -----------------------------------------------------------------------


def disturbable(is_compressed):
    model = Images()
    model.body.insert(1, nn.Dropout2d(0.2))
    model.body[2].eval()
    squared(model, torch.randn(4, 1, 8, 8)).backward()
    if is_compressed:
        fewbit.compress_(model, bits=4, verbose=False)
    return model


def state_of(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {
            name: (id(parameter), parameter.grad.clone())
            for name, parameter in model.named_parameters()
        },
        [
            (id(module), type(module), module.training, dict(vars(module)))
            for module in model.modules()
        ],
        [
            (len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in model.modules()
        ],
        repr(model),
        torch.get_rng_state(),
    )


def assert_same(before, after):
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0, equal_nan=True)
    for name, (identity, grad) in before[1].items():
        assert after[1][name][0] == identity and torch.equal(after[1][name][1], grad)
    for (*first, own), (*second, others) in zip(before[2], after[2], strict=True):
        assert first == second and own.keys() == others.keys()
        assert all(own[name] is others[name] for name in own)
    assert before[3:5] == after[3:5] and torch.equal(before[5], after[5])


def profiled(model, x, loss):
    assert variance_profile(model, x, loss, draws=2).bits == 2  # whatever the model has


def planned(model, x, loss):
    shared = Candidate("shared", fewbit.AdaptiveBits(2))
    fewbit.plan(model, x, loss, candidates=[shared], chunks=4)


@pytest.mark.parametrize("measure", [profiled, planned])
@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("fails", ["no", "forward", "backward"])
def test_the_model_stays_as_it_is(measure, is_compressed, fails):
    model, x = disturbable(is_compressed), torch.randn(16, 1, 8, 8)
    copies = []

    def loss(copy, batch):
        copies.append(copy)
        y = copy(batch)
        if fails == "forward" and len(copies) > 9:
            raise RuntimeError("of the loss")
        if fails == "backward" and len(copies) > 9:
            y.register_hook(lambda gradient: 1 / 0)
        return y.square().mean()

    before = state_of(model)
    if fails == "no":
        measure(model, x, loss)
    else:
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            measure(model, x, loss)
    assert len(copies) >= 10 and all(copy is not model for copy in copies)
    assert_same(before, state_of(model))


def test_it_is_reproducible_and_the_seed_counts():
    model, x = Images(), torch.randn(16, 1, 8, 8)
    first, second, other = (
        variance_profile(model, x, squared, draws=2, seed=seed) for seed in (0, 0, 1)
    )
    assert first.to_json() == second.to_json()
    assert (first.terms != other.terms)[first.terms > 0].all()


def test_a_compressed_model_has_the_profile_of_the_model():
    model, x = Images(), torch.randn(16, 1, 8, 8)
    expected = variance_profile(model, x, squared, draws=2)
    fewbit.compress_(model, bits=5, verbose=False)
    assert variance_profile(model, x, squared, draws=2).to_json() == expected.to_json()


@pytest.mark.slow
def test_settings_are_those_of_a_conversion():
    model, x = CharTransformer(20, 12, 32, 1, 2), torch.randint(20, (16, 12))
    exclude = ["blocks.0.mlp", "head"]
    profile = variance_profile(
        model, x, squared, exclude=exclude, layers={"functional": False}, draws=2
    )
    block = "norm1", "qkv", "proj", "norm2"
    assert profile.contexts == (*(f"blocks.0.{name}" for name in block), "norm")
    few = variance_profile(model, x, squared, draws=4)
    more = variance_profile(model, x, squared, overrides={"blocks.0.proj": 6}, draws=4)
    row = few.contexts.index("blocks.0.proj")
    ratio = more.terms[row].sum() / few.terms[row].sum()
    expected = relative_distortion("rotated", 6) / relative_distortion("rotated", 2)
    assert ratio == pytest.approx(expected, rel=0.3)
    others = np.arange(len(few.contexts)) != row
    assert more.terms[others].sum() == pytest.approx(few.terms[others].sum(), rel=0.2)


# --- bad input --------------------------------------------------------------------------------------


def mean(model, batch):
    return model(batch).mean()


def test_a_mapping_is_one_batch_and_its_tensors_are_split_together():
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 2), "weight": torch.ones(2), "scale": 0.5}

    def loss(model, batch):
        assert len(batch["x"]) == len(batch["y"]) in (2, 8) and len(batch["weight"]) == 2
        error = (model(batch["x"]) - batch["y"]) * batch["weight"]
        return batch["scale"] * error.square().mean()

    profile = variance_profile(nn.Linear(4, 2), UserDict(batch), loss, chunks=4, draws=2)
    assert profile.sampled == "4 chunks of one batch of 8"


# --- what it shows, and files -----------------------------------------------------------------------


def made(contexts, seed=0):
    """A profile of made-up numbers."""
    generator, n = np.random.default_rng(seed), len(contexts)
    values = {name: generator.random((n, n) if "terms" in name else n) for name in ARRAYS}
    values["terms"] = np.triu(values["terms"]).T
    others = {"model": "Net<1>", "bits": 2, "draws": 3, "batches": 1, "sampled": "8 chunks"}
    return VarianceProfile(contexts=contexts, parameters=contexts, **values, **others)


def test_json_has_every_number_back(tmp_path):
    profile = variance_profile(Images(), list(torch.randn(2, 8, 1, 8, 8)), squared, draws=2)
    path = tmp_path / "profile.json"
    profile.save(path)
    document = json.loads(path.read_text())
    assert document["schema"] == "fewbit.variance_profile/1"
    assert document["sampling_error"] == [None] * 5
    loaded = VarianceProfile.load(path)
    for item in fields(VarianceProfile):
        np.testing.assert_array_equal(getattr(loaded, item.name), getattr(profile, item.name))
    with pytest.raises(OutputExistsError):
        profile.save(path)
    profile.save(path, force=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(schema="fewbit.table/1"), "expected the schema"),
        (lambda document: document.pop("direct"), 'expected the field "direct", got none'),
        (lambda document: document.update(of=1), "expected no other field than .*, got 'of'"),
        (lambda document: document["terms"].pop(), r"terms: expected shape \(2, 2\), got \(1, 2\)"),
        (lambda document: document["terms"][1].pop(), r"terms: expected shape \(2, 2\), got rows of diff"),
        (lambda document: document["bias"].append("x"), r"bias\[2\]: expected a number or null, got 'x'"),
        (lambda document: document.update(bias=["1", 2]), r"bias\[0\]: expected a number or null"),
        (lambda document: document.update(bias=[1, True]), r"bias\[1\]: expected a number or null"),
        (lambda document: document.update(direct=[1, 10**400]), "expected finite numbers, got '1000"),
        (lambda document: document.update(direct=[1, float("nan")]), "expected finite numbers, got 'NaN'"),
        (lambda document: document.update(terms={"a": 1}), "terms: expected an array"),
        (lambda document: document.update(contexts=["a", 2]), r"contexts\[1\]: expected a string, got 2"),
        (lambda document: document.update(contexts=["a", "a"]), "contexts: expected different items"),
        (lambda document: document.update(parameters=[]), "parameters: expected at least 1 item,"),
        (lambda document: document.update(bits=9), "bits: expected at most 8, got 9"),
    ],
)  # fmt: skip
def test_files_that_are_no_profile(change, message, tmp_path):
    document = made(("a", "b")).to_dict()
    change(document)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"profile.json: {message}"):
        VarianceProfile.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="expected JSON"):
        VarianceProfile.load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="expected JSON text in UTF-8"):
        VarianceProfile.load(path)
    with pytest.raises(InputError, match="expected a readable file, got: No such file"):
        VarianceProfile.load(tmp_path / "other.json")


@pytest.mark.slow
def test_numbers_that_are_not_known_come_back_and_are_shown():
    profile = made(("a", "b"))
    profile.terms[1, 0] = profile.sampling[1] = profile.bias_error[0] = np.nan
    text = profile.to_json()
    document = json.loads(text)
    assert document["terms"][1][0] is None and document["sampling"][1] is None
    loaded = VarianceProfile.from_json(text.replace('"bits": 2', '"bits": 2.0'))
    assert type(loaded.bits) is int and loaded.to_json() == text
    assert "nan" in str(loaded) and "nan" in loaded._repr_html_()


def test_names_in_a_file_are_no_formulas():
    text = made((r"$\nonsense{$", "b")).to_json()
    assert "<img" in VarianceProfile.from_json(text)._repr_html_()
    with pytest.raises(InputError, match=r"contexts\[1\]: expected printable characters, got"):
        VarianceProfile.from_json(made(("a", "\x1b[2J")).to_json())


def test_findings_are_sums_of_the_matrix():
    profile = made(("", "a", "b"))
    assert profile.sampling_ratio == pytest.approx(profile.sampling.sum() / profile.terms.sum())
    assert profile.own_share == pytest.approx(np.trace(profile.terms) / profile.terms.sum())
    (first, *_) = profile.records()
    assert first["quantization"] == pytest.approx(profile.terms[:, 0].sum())
    difference = first["quantization"] - first["direct"]
    error = np.sqrt((profile.terms_error[:, 0] ** 2).sum() + first["direct_error"] ** 2)
    assert first["agreement"] == pytest.approx(difference / error)


def test_table_names_the_largest_and_cuts_the_rest():
    profile = made(tuple(f"layers.{i}.linear" for i in range(50)))
    text = plain(profile, 80)
    lines = text.splitlines()
    largest = int(profile.quantization.argmax())
    (row,) = [line.split() for line in lines if line.startswith(f"layers.{largest}.linear ")]
    assert row[-1] == f"{100 * profile.own[largest] / profile.quantization[largest]:.0f}%"
    percent = 100 * profile.quantization_error[largest] / profile.quantization[largest]
    assert row[4] == f"{percent:.0f}%"
    far = profile.terms - np.diag(np.diag(profile.terms))
    context, module = np.unravel_index(far.argmax(), far.shape)
    expected = f"most from other contexts: layers.{context}.linear to layers.{module}.linear"
    assert expected in " ".join(lines)
    assert "… and 30 more" in text
    assert f"sampling variance is {profile.sampling_ratio:.3g} times" in text.replace("\n", " ")


def test_numbers_of_a_column_have_one_form_and_room():
    profile = made(tuple(f"layers.{i}.{'x' * 40}" for i in range(12)))
    for name in ("terms", "sampling", "direct"):
        getattr(profile, name)[:] *= 10.0 ** np.arange(-11, 1)
        np.copyto(getattr(profile, f"{name}_error"), getattr(profile, name))  # 100%
    profile.sampling[4], profile.direct[5] = 0.0, np.nan
    profile.sampling_error[7] = 1e-3 * profile.sampling[7]
    lines = plain(profile, 80).splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("───"))
    rows = [line.split()[1:] for line in lines[start + 1 : start + 15] if line]
    assert not any("…" in cell for row in rows for cell in row)
    cells = [cell for row in rows for cell in row if "%" not in cell]
    assert len(cells) == 39 and {"0", "nan"} <= set(cells)
    assert all(re.fullmatch(r"\d\.\de-?\d+|0|nan", cell) for cell in cells)
    assert "<1%" in rows[4]  # the fifth by its rounding, which rises with the number


def test_html_is_one_piece_with_the_picture():
    text = made(("", "a<b"))._repr_html_()
    assert "Net&lt;1&gt;, 2 bits" in text and "a&lt;b" in text and "<1>" not in text
    assert text.count("data:image/png;base64,iVBOR") == 1 and "http" not in text
    # Nothing sets a color, so that both themes of a notebook show it.
    assert "color" not in text.split("<img")[0]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 50])
def test_picture_has_a_row_for_each_source_and_room_for_its_name(count, tmp_path):
    profile = made(tuple(f"layers.{i}.convolution" for i in range(count)))
    figure = profile.plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    axes, bar = figure.axes
    shown = axes.images[0].get_array()
    np.testing.assert_array_equal(shown[:count].filled(0), profile.terms)
    np.testing.assert_array_equal(shown[-1], profile.sampling)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [*profile.contexts, "", "sampling"]
    assert bar.get_ylabel() == "variance (white: none)"
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()]
    heights = sorted((box.y0, box.y1) for box in boxes)
    assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(heights))
    boxes = sorted(
        (label.get_window_extent().x0, label.get_window_extent().x1)
        for label in axes.get_xticklabels()
    )
    assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(boxes))
    with pytest.raises(OutputExistsError):
        profile.plot(tmp_path / "profile.png")


def test_progress_in_a_file_is_a_line_from_time_to_time(monkeypatch, capsys):
    from fewbit.analysis import progress

    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    variance_profile(nn.Linear(4, 2), torch.randn(8, 4), mean, draws=2)
    out, err = capsys.readouterr()
    first, *_, last = err.splitlines()
    assert out == "" and re.fullmatch(r"variance profile: 1 of \d+ steps after \d+ s", first)
    assert re.search(r": (\d+) of \1 steps", last)


def test_progress_is_shown_if_it_takes_long(monkeypatch, capsys):
    from fewbit.analysis import progress

    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal shows no progress
    for terminal, asked in ((True, True), (True, False), (False, True)):
        monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
        variance_profile(nn.Linear(4, 2), torch.randn(8, 4), mean, draws=2, progress=asked)
        captured = capsys.readouterr()
        assert captured.out == "" and ("variance profile" in captured.err) == (terminal and asked)
        assert terminal or captured.err == ""


def test_a_deferred_quantizer_rounds_with_all_settings():
    """A setting that is added to the quantizer is one of them."""
    noise = deferred.Noise(0, lambda: "layer")
    quantizer = noise.defer(Quantizer(3, 64, "float32", ForwardContext()))
    quantizer.added = "a setting"
    found = []

    class Rounding(deferred._Seeded):
        def quantize(self, x, *arguments):
            found.append(self)
            return super().quantize(x, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred, "_Seeded", Rounding)
        tensors, spec, _ = quantizer.quantize(torch.randn(4, 64))
        with noise.drawn({"layer": 1}):
            spec.dequantize(tensors)
    (one,) = found
    assert (one.bits, one.group_size, one.min_dtype, one.added) == (3, 64, "float32", "a setting")
    assert one.context is None and one._selector is quantizer._selector


def test_zeros_behind_a_relu_are_not_rounded():
    """The ReLU's own codes say where zeros are, as in a converted model."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    x = torch.randn(16, 64)
    found = {}
    rounded = deferred._Deferred._rounded

    def note(spec, x, seed):
        found[spec.context, spec.kind] = x, rounded(spec, x, seed)
        return found[spec.context, spec.kind][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred._Deferred, "_rounded", note)
        variance_profile(model, x, squared, bits=2, draws=2)
    assert found.keys() == {("0", "rotated"), ("2", "masked")}
    exact, values = found["2", "masked"]
    assert ((values == 0) == (exact == 0)).all() and (exact == 0).any()
    assert not (found["0", "rotated"][1] == 0).any()


def test_what_torchs_operations_save_is_refused():
    """The copies of such tensors would be the same in all draws, so the profile would not see their variance."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(InputError, match="expected everything=False"):
        fewbit.variance_profile(
            model, torch.randn(8, 4), lambda m, x: m(x).sum(), layers={"everything": True}
        )
