"""variance_profile: against closed forms, against all outcomes of rounding enumerated, and what it must not disturb."""

import itertools
import json
import re
from collections import UserDict
from dataclasses import fields

import naive_quantizer as naive
import numpy as np
import pytest
import torch
from measured import Images, gradient, squared
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import fewbit
from fewbit.analysis import deferred, progress
from fewbit.analysis.profile import ARRAYS, VarianceProfile
from fewbit.analysis.variance_profile import variance_profile
from fewbit.demo.small_transformer import CharTransformer
from fewbit.errors import InputError, OutputExistsError
from fewbit.planning.candidates import Candidate
from fewbit.render.terminal import plain
from fewbit.runtime.backends.reference_quantizer import squares
from fewbit.runtime.format.distortion import distortion, relative_distortion

SIGMAS = 4.5


def assert_measures(measured, error, expected, most=0.1):
    """Within its standard errors of what is expected, and those small."""
    assert error <= most * expected
    assert abs(measured - expected) <= SIGMAS * error


def variance_of_rows(rows, bits, kind):
    """Return the variance that rounding adds to each row: the sum of step^2 p (1 - p), or the rotated distortion."""
    if kind == "rotated":
        return distortion(kind, bits) * squares(rows, 256, kind=kind).double().numpy()
    grids = [naive.grid(group, bits) for group in rows.reshape(-1, 32)]
    variances = np.array([(step**2 * f * (1 - f)).sum() for _, step, f in grids])
    return variances.reshape(len(rows), -1).sum(1)


@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("bits", [1, 3])
def test_linear_layers_as_their_formula_says(bits, kind):
    """ActNN, equation 9 before its average over positions: sum of g^2 times the variance, own contexts alone."""
    n, d = 4, 256 if kind == "rotated" else 96
    model = nn.Sequential(nn.Linear(d, d, bias=False), nn.Linear(d, 3))
    x = torch.rand(n, d, requires_grad=True)  # otherwise it would have 1 bit more
    layers = {"quantizer": kind, "group_size": 256 if kind == "rotated" else 32}
    settings = {"layers": layers, "draws": 60, "chunks": 4}
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
    block = "norm1", "qkv", "", "proj", "norm2", "mlp.0", "mlp.1", "mlp.2"
    contexts = *(f"blocks.0.{name}".rstrip(".") for name in block), "norm", "head"
    yield "transformer", model, torch.randint(20, (16, 12)), contexts
    yield "dropout", Attention(), torch.randn(16, 8, 16), ("norm", "attention")


@pytest.mark.slow
@pytest.mark.parametrize("case", range(4))
def test_the_sum_of_the_terms_is_the_variance(case):
    name, model, x, contexts = list(cases())[case]
    layers = {"copies": 2 if name in ("residual", "dropout") else 1}
    profile = variance_profile(model, x, squared, draws=24, layers=layers)
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


class Late(nn.Module):
    """Parameters in another order than that of the forward, as in transformers' Llama: norms after what they feed."""

    def __init__(self):
        super().__init__()
        # The parameter is the model's own, so it comes first. It keeps nothing.
        self.unused = nn.Parameter(torch.ones(4))
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
    names = [name for name, _ in model.named_parameters()]
    gradients = [
        torch.autograd.grad(
            squared(model, batch),
            list(model.parameters()),
            materialize_grads=True,
            allow_unused=True,
        )
        for batch in batches
    ]
    for column, path in enumerate(profile.parameters):
        expected = sum(
            (first - second).square().sum().item() / 2
            for name, first, second in zip(names, *gradients, strict=True)
            if name.rpartition(".")[0].removesuffix(".out_proj") == path
        )
        assert profile.sampling[column] == pytest.approx(expected, rel=1e-4)
    head = profile.parameters.index("head")
    assert profile.terms[2, head] > 0 and not profile.terms[:2, head].any()
    assert profile.direct[head] == pytest.approx(profile.terms[2, head], rel=0.5)
    assert (profile.bias_error[[0, 6]] == 0).all() and profile.bias_error[head] > 0


def test_a_tied_parameter_and_a_frozen_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    profile = variance_profile(model, torch.randn(8, 8), squared, draws=4)
    assert profile.contexts == ("0", "1")  # the frozen layer keeps nothing
    assert profile.parameters == ("0", "1")  # 1 has its bias, which no context adds noise to
    assert (profile.terms[:, 0] > 0).all() and not profile.terms[:, 1].any()


@pytest.mark.slow
def test_chunks_with_a_batch_norm_come_with_a_warning():
    x = torch.randn(16, 1, 8, 8)
    profile = variance_profile(Images(), x, squared, draws=2)
    assert profile.sampled.startswith("8 chunks of one batch of 16 (too much, as chunks have batch")
    assert profile.sampled in " ".join(str(profile).split())
    several = variance_profile(Images(), list(x.split(4)), squared, draws=2)
    assert several.sampled == "4 batches of 4"
    assert several.sampling.shape == profile.sampling.shape


def test_bias_is_that_of_few_bit_activations():
    """Exact inputs but for 8 bits: what is left is the codes' difference, which no draw changes."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(16, 64)
    profile = variance_profile(model, x, squared, bits=8, layers={"activation_bits": 1}, draws=20)
    exact = gradient(model, x)
    layers = {"activation_bits": 1, "functional": False}
    fewbit.compress_(model, layers=layers, exclude=["0", "2"], verbose=False)
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


def disturbable(is_compressed):
    model = Images()
    model.body.insert(1, nn.Dropout2d(0.2))
    model.body[2].eval()
    squared(model, torch.randn(4, 1, 8, 8)).backward()
    if is_compressed:
        fewbit.compress_(model, bits=4, verbose=False)
    return model


def state_of(model):
    named = model.named_parameters()
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: (id(parameter), parameter.grad.clone()) for name, parameter in named},
        [(id(part), type(part), part.training, dict(vars(part))) for part in model.modules()],
        [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()],
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


def test_it_is_reproducible_and_what_the_model_was_compressed_with_does_not_matter():
    model, x = Images(), torch.randn(16, 1, 8, 8)
    first, other = (variance_profile(model, x, squared, draws=2, seed=seed) for seed in (0, 1))
    assert (first.terms != other.terms)[first.terms > 0].all()
    fewbit.compress_(model, bits=5, verbose=False)
    assert variance_profile(model, x, squared, draws=2).to_json() == first.to_json()


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
    assert document["sampling_error"] == [None] * 5  # two batches say nothing of it
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
        (lambda document: document["terms"].pop(), r"terms: expected shape \(2, 2\), got \(1, 2\)"),
        (lambda document: document["bias"].append("x"), r"bias\[2\]: expected a number or null, got 'x'"),
        (lambda document: document.update(direct=[1, 10**400]), "expected finite numbers, got '1000"),
        (lambda document: document.update(direct=[1, float("nan")]), "expected finite numbers, got 'NaN'"),
        (lambda document: document.update(contexts=["a", "a"]), "contexts: expected different items"),
        (lambda document: document.update(contexts=["a", "\x1b[2J"]), r"contexts\[1\]: expected printable characters, got"),
    ],
)  # fmt: skip
def test_files_that_are_no_profile(change, message, tmp_path):
    document = made(("a", "b")).to_dict()
    change(document)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"profile.json: {message}"):
        VarianceProfile.load(path)
    for content, message in ((b"{", "expected JSON"), (b"\xff", "expected JSON text in UTF-8")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
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
    rows = [label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()]
    columns = [label.get_window_extent() for label in axes.get_xticklabels()]
    for sides in ([(box.y0, box.y1) for box in rows], [(box.x0, box.x1) for box in columns]):
        assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(sorted(sides)))
    with pytest.raises(OutputExistsError):
        profile.plot(tmp_path / "profile.png")


@pytest.mark.parametrize(
    ("terminal", "asked"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_progress_is_shown_if_it_takes_long(terminal, asked, monkeypatch, capsys):
    """In a file, progress is a line from time to time."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal shows no progress
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    variance_profile(nn.Linear(4, 2), torch.randn(8, 4), mean, draws=2, progress=asked)
    out, err = capsys.readouterr()
    assert out == "" and ("variance profile" in err) == asked
    if asked and not terminal:
        first, *_, last = err.splitlines()
        assert re.fullmatch(r"variance profile: 1 of \d+ steps after \d+ s", first)
        assert re.search(r": (\d+) of \1 steps", last)


def test_zeros_behind_a_relu_are_not_rounded(monkeypatch):
    """The ReLU's own codes say where zeros are, as in a converted model."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    found = {}
    rounded = deferred._Deferred._rounded

    def note(spec, x, seed):
        found[spec.context, spec.kind] = x, rounded(spec, x, seed)
        return found[spec.context, spec.kind][1]

    monkeypatch.setattr(deferred._Deferred, "_rounded", note)
    variance_profile(model, torch.randn(16, 64), squared, bits=2, draws=2)
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


def test_every_quantizer_is_deferred():
    """Batch norms, gated units and activations have bits of their own, and are contexts too, also as functions."""

    class Called(nn.Module):
        def forward(self, x):
            return F.gelu(x)

    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    layers = nn.Linear(64, 64), nn.BatchNorm1d(64), Called(), LlamaMLP(config), nn.SiLU()
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    profile = variance_profile(model, torch.randn(16, 64), squared, bits=2, draws=2)
    assert {"0", "1", "2", "3", "4", "5"} <= set(profile.contexts)
