"""fewbit.plan: bytes as counted by hand, errors against loops of their own and a closed form, what it recommends."""

import itertools
import json
import math
import re
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import naive_quantiser as naive
import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import fewbit  # noqa: E402
from fewbit import cli, plot  # noqa: E402
from fewbit.compress.candidates import Candidate, default_candidates  # noqa: E402
from fewbit.compress.labels import add_labels  # noqa: E402
from fewbit.compress.training_plan import Planned, TrainingPlan, plan  # noqa: E402
from fewbit.errors import InputError, OutputExistsError  # noqa: E402
from fewbit.models.workload import workload  # noqa: E402
from fewbit.report import render_plain  # noqa: E402

FIXED = Candidate("fixed", {"bits": 2})
SHARED = Candidate("shared", {"bits": 2, "level": "L3"})
ACTIVATIONS = Candidate("activations", {"bits": 2}, activations_only=True)


def net(dropout=0.0):
    return nn.Sequential(
        nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 4)
    )


def squared(model, batch):
    """A loss whose gradients differ between outputs."""
    y = model(batch)
    return (y * torch.linspace(0.5, 1.5, y.shape[1], device=y.device)).square().mean()


def gradient(model, batch, loss=squared):
    """All parameters' in one vector, float64."""
    found = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    return torch.cat([each.double().flatten() for each in found])


def size(vector):
    return float(vector.square().sum())


def converted(candidate, model):
    """A copy, converted by hand, and the controller if there is one."""
    model, options = deepcopy(model), candidate.options
    if candidate.activations_only:
        fewbit.replace_activations_(model, **options, verbose=False)
        return model, None
    return model, fewbit.compress_(model, **options, verbose=False)


# --- bytes ------------------------------------------------------------------------------------------


def test_bytes_are_those_of_a_model_that_is_compressed_by_hand():
    model, x = net(0.1), torch.randn(16, 32)
    found = plan(model, x, squared, chunks=4)
    assert found.exact_bytes == fewbit.saved_bytes(lambda x: squared(model, x), x).total
    assert [each.candidate for each in found.rows] == list(default_candidates(model))
    for row in found.rows:
        copy, controller = converted(row.candidate, model)
        adapts = row.policy in ("shared", "error-bound")
        for _ in range(3 if adapts else 0):
            torch.manual_seed(0)  # as in the plan, of its one batch
            squared(copy, x).backward()
        if adapts:
            controller.load_state_dict(controller.state_dict())
        assert row.saved_bytes == fewbit.saved_bytes(lambda x, copy=copy: squared(copy, x), x).total
        assert row.saved_bytes < found.exact_bytes


def test_a_slice_of_a_data_set_counts_alone():
    data, model = torch.randn(64, 32), net()
    parts = [plan(model, each, squared, candidates=[FIXED], chunks=4) for each in data.split(16)]
    whole = plan(model, data[:16].clone(), squared, candidates=[FIXED], chunks=4)
    assert {each.exact_bytes for each in parts} == {whole.exact_bytes}


# --- errors -----------------------------------------------------------------------------------------


def measured_by_hand(candidate, model, x, draws):
    """(error, variance, bias) from draws of a model that is converted by hand, no dropout."""
    copy, controller = converted(candidate, model)
    for step in range(3 if candidate is SHARED else 0):
        torch.manual_seed(step)
        gradient(copy, x)
    exact = gradient(model, x)
    found, state = [], controller and controller.state_dict()
    for draw in range(draws):
        if state:  # else bits would go on adapting
            controller.load_state_dict(state)
        torch.manual_seed(1000 + draw)
        found.append(gradient(copy, x))
    found = torch.stack(found)
    mean = found.mean(0)
    variance = size(found - mean) / (draws - 1)
    error = size(found - exact) / draws
    return error, variance, error - variance


@pytest.mark.parametrize("candidate", [FIXED, SHARED, ACTIVATIONS], ids=lambda each: each.policy)
def test_errors_are_those_of_a_loop_by_hand(candidate, device):
    """Of 60 draws here and there: standard errors of 1 to 2 %, of the bias of as much of the error."""
    model, x = net().to(device), torch.randn(32, 32, device=device)
    (row,) = plan(model, x, squared, candidates=[candidate], draws=60, chunks=4).rows
    error, variance, bias = measured_by_hand(candidate, model, x, 60)
    assert row.error == pytest.approx(error, rel=0.1)
    assert row.variance == pytest.approx(variance, rel=0.1, abs=1e-6 * error)
    assert row.bias == pytest.approx(bias, abs=0.1 * error)
    assert row.error == pytest.approx(row.variance + row.bias, rel=1e-6)
    assert abs(row.error - error) <= 4.5 * 2**0.5 * row.error_error + 1e-9
    if candidate is ACTIVATIONS:
        assert row.variance < 1e-6 * row.bias  # codes are alike in all draws


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_the_error_of_a_linear_layer_is_as_its_formula_says(bits):
    """ActNN, equation 9 before its average over positions: sum of g^2 step^2 p (1 - p)."""
    model, x = nn.Linear(96, 3), torch.rand(8, 96)
    candidate = Candidate("fixed", {"bits": bits})
    (row,) = plan(model, x, squared, candidates=[candidate], draws=60, chunks=4).rows
    y = model(x)
    (of_y,) = torch.autograd.grad((y * torch.linspace(0.5, 1.5, 3)).square().mean(), y)
    grids = [naive.grid(each, bits) for each in x]
    variance = np.array([(step**2 * p * (1 - p)).sum() for _, step, p in grids])
    expected = float(np.square(of_y.double().numpy()).sum(1) @ variance)
    assert row.error == pytest.approx(expected, rel=0.08)
    assert row.variance == pytest.approx(expected, rel=0.08)
    assert row.error_error < 0.03 * expected


def test_several_batches_are_the_mean_of_what_each_has_alone():
    """From the same seed it has the same draws."""
    scales = torch.linspace(0.5, 1.5, 5)[:, None, None]
    model, batches = net(0.2), list(torch.randn(5, 8, 32) * scales)
    found = plan(model, batches, squared, candidates=[FIXED], seed=7)
    alone = [
        plan(model, each, squared, candidates=[FIXED], chunks=4, seed=7 + number)
        for number, each in enumerate(batches)
    ]
    (row,) = found.rows
    assert found.gradient == pytest.approx(np.mean([each.gradient for each in alone]))
    for name in ("error", "variance", "bias"):
        values = np.array([getattr(each.rows[0], name) for each in alone])
        assert getattr(row, name) == pytest.approx(values.mean())
        if name != "bias":
            error = getattr(row, f"{name}_error")
            assert error == pytest.approx(values.std(ddof=1) / math.sqrt(5))
    assert (found.batches, found.batch_size, found.sampled) == (5, 8, "5 batches of 8")


def test_dropout_draws_alike_and_rounding_does_not():
    model, x = net(0.5), torch.randn(16, 32)
    candidate = Candidate("fixed", {"bits": 8, "activation_bits": 8})
    (row,) = plan(model, x, squared, candidates=[candidate], chunks=4).rows
    first, second = gradient(model, x), gradient(model, x)
    assert 0 < row.variance <= row.error * 1.5
    assert row.error < 1e-2 * size(first - second)


def test_bits_that_adapt_are_measured_as_they_are_after_some_steps():
    """The first layer's noise counts 10,000 times as much as the last one's: it gets the bits."""

    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.loud, self.quiet = nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, x):
            return torch.cat([self.loud(x[:, 0]), 0.01 * self.quiet(x[:, 1])], 1)

    model, x = Uneven(), torch.randn(16, 2, 64)
    fixed, shared = plan(model, x, squared, candidates=[FIXED, SHARED], chunks=4).rows
    assert shared.error < 0.5 * fixed.error
    assert shared.saved_bytes < 1.25 * fixed.saved_bytes  # bits of samples, and words not full


# --- the variance between minibatches ---------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_the_variance_between_minibatches_is_half_of_squared_differences(several):
    model, x = nn.Linear(5, 2), torch.randn(24, 5)
    parts = x.chunk(6)
    batch = list(parts) if several else x
    found = plan(model, batch, squared, candidates=[FIXED], chunks=6)
    gradients = [gradient(model, each) for each in parts]
    pairs = np.array(
        [size(a - b) / 2 for a, b in zip(gradients[::2], gradients[1::2], strict=True)]
    )
    pairs /= 1 if several else 6
    squares = [size(each) for each in gradients] if several else [size(gradient(model, x))]
    assert found.gradient == pytest.approx(np.mean(squares), rel=1e-5)
    assert found.sampling == pytest.approx(pairs.mean(), rel=1e-5)
    error = pairs.std(ddof=1) / 3**0.5
    assert found.sampling_error == pytest.approx(error, rel=1e-4)


# --- what it predicts -------------------------------------------------------------------------------


class Images(nn.Module):
    """A small residual network with batch norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.body(x)).mean((2, 3)))


def test_the_next_batches_have_the_predicted_error_and_bytes():
    """After some training, where gradients are small; within 20 % of the mean over 20 batches more."""
    model, pattern = Images(), torch.randn(4, 1, 8, 8)

    def batch():
        y = torch.randint(4, (32,))
        return pattern[y] + 2 * torch.randn(32, 1, 8, 8), y

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss(model, batch()).backward()
        optimizer.step()
    candidates = FIXED, replace(FIXED, options={"bits": 4})
    found = plan(model, [batch() for _ in range(8)], loss, candidates=candidates)
    following = [batch() for _ in range(20)]
    for row in found.rows:
        copy, _ = converted(row.candidate, model)
        exact = [gradient(model, each, loss) for each in following]
        errors = [size(gradient(copy, b, loss) - g) for b, g in zip(following, exact, strict=True)]
        assert row.error == pytest.approx(np.mean(errors), rel=0.2)
        for each in following[:2]:
            assert row.saved_bytes == fewbit.saved_bytes(lambda b, c=copy: loss(c, b), each).total


# --- what it must not disturb -----------------------------------------------------------------------


def state_of(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [each.grad for each in model.parameters()],
        [(id(each), type(each), each.training, list(vars(each))) for each in model.modules()],
        [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()],
        torch.get_rng_state(),
    )


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_stays_as_it_is(is_compressed, fails):
    model, x, calls = Images(), torch.randn(8, 1, 8, 8), []
    if is_compressed:
        fewbit.compress_(model, bits=4, verbose=False)

    def loss(copy, batch):
        calls.append(copy)
        if fails and len(calls) > 8:
            raise RuntimeError("of the loss")
        return squared(copy, batch)

    before = state_of(model)
    if fails:
        with pytest.raises(RuntimeError, match="of the loss"):
            plan(model, x, loss, candidates=[SHARED], chunks=4)
    else:
        plan(model, x, loss, candidates=[SHARED], chunks=4)
    assert len(calls) > 8 and all(each is not model for each in calls)
    after = state_of(model)
    assert before[1:4] == after[1:4]
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert torch.equal(before[4], after[4])


def without_times(found):
    none = dict.fromkeys(("seconds", "seconds_least", "seconds_most"), 0.0)
    rows = tuple(replace(each, **none) for each in found.rows)
    none = {f"exact_{name}": value for name, value in none.items()}
    return replace(found, **none, rows=rows).to_json()


def test_it_is_reproducible_and_what_the_model_was_compressed_with_does_not_matter():
    model, x = net(0.1), torch.randn(16, 32)
    arguments = {"candidates": [FIXED, SHARED], "chunks": 4}
    first = plan(model, x, squared, **arguments)
    other = plan(model, x, squared, seed=1, **arguments)
    fewbit.compress_(model, bits=5, verbose=False)
    second = plan(model, x, squared, **arguments)
    assert without_times(first) == without_times(second)
    assert all(a.error != b.error for a, b in zip(first.rows, other.rows, strict=True))
    assert 0 < first.exact_seconds_least <= first.exact_seconds <= first.exact_seconds_most
    assert all(0 < each.seconds_least <= each.seconds <= each.seconds_most for each in first.rows)


# --- what it recommends -----------------------------------------------------------------------------


def made(*rows, sampling=1.0, share=0.1):
    """A plan of made-up numbers; a row: (policy, bits, bytes, error)."""
    times, exact = (2.0, 1.6, 2.5), (1.0, 0.875, 1.25)
    planned = [
        Planned(Candidate(policy, {"bits": bits}), size, error, 0.01, error, math.nan, 0.0, *times)
        for policy, bits, size, error in rows
    ]
    about = "Net<1>", "cpu", 2, 8, 2, share, 4096, *exact, 3.0, sampling, math.nan, "2 batches of 8"
    return TrainingPlan(*about, tuple(planned))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("a", 8, 1000, 0.01), ("a", 4, 500, 0.09), ("a", 2, 250, 0.11)], 1),
        ([("a", 4, 500, 0.1)], 0),  # at most the share
        ([("a", 4, 500, 0.09), ("b", 4, 500, 0.08)], 1),  # of as many bytes the one of less error
        ([("a", 4, 500, math.nan), ("a", 8, 900, 0.01)], 1),
        ([("a", 8, 4096, 0.0), ("a", 2, 250, 0.2)], None),  # keeps as much as the exact model
        ([("a", 2, 250, 0.2), ("a", 3, 300, 0.15)], None),
    ],
)
def test_the_cheapest_within_the_share_is_recommended(rows, expected):
    found = made(*rows)
    assert found.recommended is (None if expected is None else found.rows[expected])
    assert [each["recommended"] for each in found.records()].count(True) == (expected is not None)
    title = " ".join(found.title.split())
    if expected is None:
        least = min((each for each in found.rows if each.saved_bytes < 4096), key=lambda x: x.error)
        assert found.closest is least
        assert (
            f"no setting keeps its error within 10% of the variance between minibatches; {least.policy} at {least.label} comes closest, with {100 * least.error:.0f}% of it"
            in title
        )
        assert "*" not in re.sub(r"\*:", "", str(found))
    else:
        row = found.rows[expected]
        assert (
            f"{row.policy} at {row.label} keeps {row.saved_bytes} B in place of 4.00 KiB" in title
        )
        assert "2.00 times as long (1.6 to 2.5)" in title
        assert f"{row.label}*" in str(found)


def test_the_share_says_what_is_allowed():
    rows = ("a", 8, 1000, 0.01), ("a", 4, 500, 0.09), ("a", 2, 250, 0.3)
    assert [made(*rows, share=each).recommended.label for each in (0.02, 0.1, 0.5)] == [
        "8 bits",
        "4 bits",
        "2 bits",
    ]
    assert made(*rows, sampling=5.0).recommended.label == "2 bits"


# --- candidates -------------------------------------------------------------------------------------


def test_default_candidates_are_those_that_the_model_has_a_use_for():
    def names(model, *policies):
        return [f"{each.policy} {each.label}" for each in default_candidates(model, *policies)]

    fixed = [f"fixed {each} bits" for each in (8, 4, 3, 2)]
    shared = [f"shared {each} bits" for each in (4, 3, 2, 1.5)]
    shared += [f"error-bound e2={each}" for each in ("0.1", "0.5", "1", "2")]
    assert names(nn.Linear(4, 4)) == fixed + shared
    fused = [f"pre-activation {each} bits" for each in (8, 4, 2)]
    assert names(Images()) == [*fixed, *shared, *fused, "activations 1 bit"]
    few = [f"activations {each} bits" for each in (4, 3, 2)]
    assert names(net()) == [*fixed, *shared, *fused, *few]
    assert names(net(), ["activations"]) == few
    with pytest.raises(
        InputError, match="expected one of fixed, shared, error-bound for policy, got 'none'"
    ):
        default_candidates(nn.Linear(4, 4), ["none"])


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (["activations"], "policy activations: expected a model with activations as modules, got"),
        (["pre-activation"], "policy pre-activation: expected a model with a batch or layer norm,"),
        ("fixed", "policies: expected a list of names, as ['fixed'], got 'fixed'"),
        (3, "policies: expected a list of names, as ['fixed'], got 3"),
    ],
)
def test_policies_that_are_none_of_the_models(policies, message):
    with pytest.raises(InputError, match=re.escape(message)):
        default_candidates(nn.Linear(4, 4), policies)


def test_policies_may_come_from_a_generator():
    found = default_candidates(net(), (each for each in ("shared", "fixed")))
    assert {each.policy for each in found} == {"fixed", "shared"}


@pytest.mark.parametrize(
    "batch", [torch.empty(0, 32), [torch.empty(0, 32)] * 2, (torch.empty(0, 32),)]
)
def test_a_batch_without_samples(batch):
    def ratio(model, batch, loss):
        return fewbit.compress_(model, bits=2, verbose=False).gradient_ratio(batch, loss)

    def first(model, batch):
        return squared(model, batch if isinstance(batch, torch.Tensor) else batch[0])

    for measure in (plan, fewbit.variance_profile, ratio):
        with pytest.raises(InputError, match="^batch: expected at least one sample, got 0$"):
            measure(net(), batch, first)


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"bits": 4, "level": "L2"}, "4 bits"),
        ({"bits": 1.5}, "1.5 bits"),
        ({"bits": 1, "copies": 2}, "1 bit, copies=2"),
        ({"policy": "error-bound", "e2": 1e-3}, "e2=0.001"),
        ({"budget": "6 GiB", "sample": None}, "budget=6 GiB"),
        ({"level": "L3"}, "default"),
    ],
)
def test_labels_tell_candidates_of_a_policy_apart(options, label):
    assert Candidate("any", options).label == label


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": torch.relu}, "model: expected a torch.nn.Module, got builtin"),
        ({"model": nn.Linear(4, 2).eval()}, "expected one in training mode"),
        ({"loss": 3}, r"loss: expected a function \(model, batch\) -> scalar tensor, got int"),
        ({"loss": lambda model, batch: model(batch)}, r"got one of shape \(\d, 2\)"),
        (
            {"loss": lambda model, batch: 0 * model(batch).sum()},
            "expected a gradient that is finite and not 0",
        ),
        ({"batch": []}, "got an empty list"),
        (
            {"batch": [torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)]},
            r"cannot be called with one by one \(RuntimeError\(.*give tuple\(batch\)",
        ),
        (
            {"batch": list(torch.full((4, 8, 4), math.nan))},
            "loss: expected a finite value, got nan",
        ),
        ({"chunks": 6}, "expected a multiple of chunks=6 samples, or several batches, got 8"),
        ({"draws": 1}, "draws: expected an integer of at least 2, got 1"),
        ({"share": 0}, "share: expected a number above 0, got 0"),
        ({"share": "much"}, "share: expected a number above 0, got 'much'"),
        ({"share": math.inf}, "share: expected a number above 0, got inf"),
        ({"candidates": []}, "candidates: expected a Candidate or several, got none"),
        ({"candidates": [{"bits": 2}]}, "expected instances of fewbit.Candidate, got dict"),
        ({"candidates": 4}, "expected instances of fewbit.Candidate, got int"),
        (
            {"candidates": [Candidate("a", 3)]},
            "expected a name and a mapping of options, got 'a' and 3",
        ),
        ({"candidates": [Candidate("a", {"bits": 9})]}, "candidates: a, 9 bits: expected"),
        (
            {"candidates": [Candidate("a", {"bit": 2})]},
            "candidates: a, bit=2: .*unexpected keyword",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(changes, message):
    arguments = {
        "model": nn.Linear(4, 2),
        "batch": torch.randn(8, 4),
        "loss": squared,
        "candidates": [FIXED],
        **changes,
    }
    model, batch, loss = (arguments.pop(each) for each in ("model", "batch", "loss"))
    with pytest.raises(InputError, match=message) as error:
        plan(model, batch, loss, **arguments)
    assert "\n" not in str(error.value)


class Reentrant(nn.Sequential):
    """With a checkpoint whose gradients torch gives by backward() alone."""

    def forward(self, x):
        first, *rest = self
        return checkpoint(nn.Sequential(*rest), first(x), use_reentrant=True)


def test_reentrant_checkpoints_are_refused_by_name():
    model, x = Reentrant(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(8, 4)
    compressed = deepcopy(model)
    controller = fewbit.compress_(compressed, policy="error-bound", verbose=False)
    for measure in (
        lambda: plan(model, [x, x], squared, candidates=[FIXED]),
        lambda: fewbit.variance_profile(model, x, squared),
        lambda: controller.gradient_ratio(x, squared),
    ):
        with pytest.raises(
            InputError, match="^model: expected checkpoints with use_reentrant=False"
        ):
            measure()


# --- what it shows, and files -----------------------------------------------------------------------


def test_json_has_everything_back(tmp_path):
    found = plan(net(), torch.randn(16, 32), squared, candidates=[FIXED, ACTIVATIONS], chunks=4)
    path = tmp_path / "plan.json"
    found.save(path)
    document = json.loads(path.read_text())
    assert document["schema"] == "fewbit.plan/1"
    assert document["rows"][0]["candidate"] == {
        "policy": "fixed",
        "options": {"bits": 2},
        "activations_only": False,
    }
    loaded = TrainingPlan.load(path)
    assert loaded.to_json() == found.to_json() and str(loaded) == str(found)
    with pytest.raises(OutputExistsError):
        found.save(path)
    found.save(path, force=True)


def test_names_in_a_file_are_no_formulas():
    candidate = Candidate("fixed", {"bits": 2})
    found = plan(net(), torch.randn(8, 32), squared, candidates=candidate, chunks=4)
    document = json.loads(found.to_json())
    document["model"] = document["rows"][0]["candidate"]["policy"] = r"$\nonsense{$"
    assert "<img" in TrainingPlan.from_json(json.dumps(document))._repr_html_()


def test_options_that_json_has_not_are_text():
    candidate = Candidate("own", {"bits": 2, "include": lambda path, module: True})
    found = plan(net(), torch.randn(8, 32), squared, candidates=candidate, chunks=4)
    options = TrainingPlan.from_json(found.to_json()).rows[0].candidate.options
    assert options["bits"] == 2 and options["include"].startswith("<function")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(schema="fewbit.table/1"), "expected the schema"),
        (lambda document: document.pop("share"), 'expected the field "share", got none'),
        (lambda document: document.update(of=1), "expected no other field than .*, got 'of'"),
        (lambda document: document.update(share="x"), "share: expected a number, got 'x'"),
        (lambda document: document.update(draws=1.5), "draws: expected an integer, got 1.5"),
        (lambda document: document.update(rows=[]), "rows: expected at least 1 item,"),
        (lambda document: document.update(rows=[3]), r"rows\[0\]: expected an object, got 3"),
        (lambda document: document["rows"][0].pop("error"), r'rows\[0\]: expected the field "error"'),
        (lambda document: document["rows"][0].update(candidate={}), 'expected the field "policy"'),
        (lambda document: document["rows"][0]["candidate"].update(options=3), "expected an object"),
        (lambda document: document.update(model="\x1b[2J"), "model: expected printable characters"),
        (lambda document: document["rows"][0]["candidate"].update(policy="\u202e"), r"rows\[0\].candidate.policy: expected printable"),
        (lambda document: document["rows"][0]["candidate"].update(options={"\r": 1}), "expected printable characters"),
    ],
)  # fmt: skip
def test_files_that_are_no_plan(change, message, tmp_path):
    document, path = made(("a", 2, 10, 0.1)).to_dict(), tmp_path / "plan.json"
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"plan.json: .*{message}"):
        TrainingPlan.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="expected JSON"):
        TrainingPlan.load(path)


def test_the_table_fits_80_columns_whatever_is_in_it():
    rows = [
        (
            "a-policy-of-a-long-name",
            1.23456789,
            round(1023.994 * 2**20 / 10**k),
            1.234567 * 10.0**-k,
        )
        for k in range(9)
    ]
    found = made(*rows, ("b", 8, 0, math.nan), sampling=1e-7)
    found = replace(found, exact_bytes=1023 * 2**20, exact_seconds=1.1e-3)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    table = [line for line in lines if "1.2…57 bits" in line]
    assert len(table) == 9 and table[0].startswith("a-p…ng-name ")
    assert all(
        each.count("…") == 1 + (not i) for i, each in enumerate(table)
    )  # names alone are cut
    assert "a-policy-of-a-long-name" in render_plain(found, 120)
    assert "a-policy-of-a-long-name" in found._repr_html_()
    assert len(found.to_csv().splitlines()) == 1 + len(found.rows)


@pytest.mark.parametrize("width", [*range(50, 121, 5), 82, 83])
def test_numbers_and_the_star_are_whole_in_any_terminal(width):
    rows = [("pre-activation", 2, 8_876_932, 1.2345e-3), ("error-bound", 1.5, 88_769_320, 0.9876)]
    found = replace(made(*rows, sampling=1e-1), exact_bytes=1_034_567_890)
    found = replace(
        found, rows=tuple(replace(row, error_error=row.error / 9) for row in found.rows)
    )
    text = render_plain(found, width)
    assert max(map(len, text.splitlines())) <= width
    lines = [re.split(" {2,}", each.strip()) for each in text.splitlines()]
    header = next(i for i, each in enumerate(lines) if each[:2] == ["policy", "setting"])
    shown = lines[header]
    left_out = [each for each in ("passes", "random", "±", "less") if each not in shown]
    # In that order, and only where it has to be.
    assert left_out == ["passes", "random", "±", "less"][: len(left_out)]
    assert {"MiB", "error", "noise", "time"} <= set(shown)
    said = f"no room here for: {', '.join(sorted(left_out, key=found._header.index))}"
    assert " ".join(text.split()).endswith(said) or not left_out
    for cells, full in zip(lines[header + 3 : header + 5], found._cells()[1:], strict=True):
        wanted = dict(zip(found._header, full, strict=True))
        assert cells[2:] == [wanted[name] for name in shown[2:]]
        assert cells[1].endswith("*") == full[1].endswith("*")
    assert found._cells()[1][1] == "2 bits*"
    assert (not left_out) == (width >= 83)


def test_times_come_with_the_spread_of_their_passes():
    found = made(("a", 2, 300, 0.04), ("b", 2, 300, 0.04))
    found = replace(found, rows=(replace(found.rows[0], seconds_least=1.25), found.rows[1]))
    first, second = found.records()
    names = "time_ratio", "time_least", "time_most"
    assert [first[each] for each in names] == [2.0, 1.25, 2.5]
    assert [second[each] for each in names] == [2.0, 1.6, 2.5]
    narrow, wide = render_plain(found, 70), str(found)
    assert "median of 2 passes" in " ".join(narrow.split())
    assert "1.25 to 2.5" in wide and "0.875 to 1.25" in wide and "1.6 to 2.5" in found._repr_html_()
    (exact,) = [line for line in narrow.splitlines() if line.startswith("exact")]
    table = narrow[: narrow.index("kept for the backward pass")]
    assert exact.endswith("  1.00") and "0.875 to" not in narrow and "passes  " not in table


def test_what_is_random_is_shown_within_the_error_and_kept_as_it_came():
    (row,) = made(("a", 2, 300, 0.04)).rows
    for variance, shown, told in (
        (0.0412, "100%", True),
        (0.04, "100%", False),
        (0.03, "75%", False),
        (-0.001, "0%", False),
    ):
        row = replace(row, variance=variance, bias=0.04 - variance)
        found = replace(made(("a", 2, 300, 0.04)), rows=(row,))
        assert found._cells()[1][6] == shown
        assert ("by chance it came out above the error" in " ".join(str(found).split())) == told
        assert (found.records()[0]["variance"], found.records()[0]["bias"]) == (variance, row.bias)


def test_the_notes_say_when_batches_are_too_few():
    unsure, sure = (
        made(("a", 2, 300, 0.04)),
        made(("a", 2, 300, 0.06)),
    )  # 0.01 is the standard error
    assert "give more of them" in str(unsure) and "give more" not in str(sure)


def test_batches_that_are_all_alike_have_no_variance_between_them():
    """And a seed may be any number."""
    found = plan(net(), [torch.randn(8, 32)] * 4, squared, candidates=[FIXED], seed=2**64)
    assert found.sampling == 0 and found.recommended is None
    assert re.search(r"comes closest, with an error of [\d.]+$", found.title)
    assert "0 of the variance" in made(("a", 2, 300, 0.0), sampling=0.0).title
    assert "% of it" in made(("a", 2, 300, 5.0)).title


def test_html_is_one_piece_with_the_picture():
    found = made(("a<b", 2, 300, 0.05))
    text = found._repr_html_()
    assert "Net&lt;1&gt;" in text and "a&lt;b" in text and "<1>" not in text
    assert text.count("data:image/png;base64,iVBOR") == 1 and "http" not in text
    assert found.to_html().startswith("<!doctype html>") and text in found.to_html()


def test_the_picture_has_a_curve_for_each_policy_and_marks_what_is_recommended(tmp_path):
    rows = ("a", 8, 1024, 0.01), ("a", 2, 256, 0.3), ("b", 4, 512, 0.05), ("c", 1, 2048, 0.0)
    found = made(*rows)
    (axes,) = found.plot(tmp_path / "plan.svg").axes
    assert (tmp_path / "plan.svg").read_bytes().startswith(b"<?xml")
    curves = {each.get_label(): each.get_xydata() for each in axes.lines}
    np.testing.assert_allclose(curves["a"], [[0.25, 0.3], [1, 0.01]])
    np.testing.assert_allclose(curves["recommended"], curves["b"])
    np.testing.assert_allclose(curves["variance between minibatches"][:, 1], 1.0)
    np.testing.assert_allclose(curves["10% of it"][:, 1], 0.1)
    np.testing.assert_allclose(curves["exact"][:, 0], 4.0)
    assert curves["c"][0, 1] == axes.get_ylim()[0]  # an error of 0 lies on the edge
    assert {each.get_text() for each in axes.texts} == {"8 bits", "4 bits", "2 bits", "1 bit"}
    assert axes.get_xscale() == axes.get_yscale() == "log"
    labels = {each.get_label() for each in made(rows[1]).plot().axes[0].lines}
    assert "recommended" not in labels
    with pytest.raises(OutputExistsError):
        found.plot(tmp_path / "plan.svg")


def boxes(texts):
    """Their corners in pixels, in the order of the texts."""
    extents = [each.get_window_extent() for each in texts]
    return [(each.x0, each.y0, each.x1, each.y1) for each in extents]


CROWD = [("a", 8 - i, 1100 - 100 * i, 0.004 * 2.5**i) for i in range(7)]
CROWD += [("b", 8 - i, 1070 - 90 * i, 0.005 * 2.2**i) for i in range(7)]
CROWD += [("c", 4 - i, 700 - 130 * i, 0.02 * 4**i) for i in range(3)]


@pytest.mark.parametrize("rows", [CROWD, [CROWD[0], *CROWD[7:]], CROWD[:1]], ids=len)
@pytest.mark.parametrize("dpi", [80, 160])
def test_labels_cover_neither_each_other_nor_points(rows, dpi):
    found = made(*rows)
    (axes,) = (figure := found.plot()).axes
    figure.set_dpi(dpi)
    figure.draw_without_rendering()
    labels = boxes(axes.texts)
    for (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) in itertools.combinations(labels, 2):
        assert ax1 <= bx0 or bx1 <= ax0 or ay1 <= by0 or by1 <= ay0
    places = [(each.saved_bytes / 1024, each.error) for each in found.rows]
    for x, y in axes.transData.transform(places):
        assert not any(x0 < x < x1 and y0 < y < y1 for x0, y0, x1, y1 in labels)
    frame = axes.get_window_extent()
    assert all(frame.x0 <= each[0] and each[2] <= frame.x1 for each in labels)
    assert len(labels) >= 0.8 * len(rows)
    assert [each.get_text() for each in axes.texts][0] == found.recommended.label


NEAR_LIMITS = [("a", 8, 1100, 0.012), ("a", 4, 800, 0.09), ("a", 3, 600, 0.12), ("a", 2, 420, 0.9)]
NEAR_LIMITS += [("b", 8, 900, 0.02), ("b", 4, 560, 0.1), ("b", 3, 450, 0.3), ("b", 2, 330, 1.1)]


@pytest.mark.parametrize("rows", [NEAR_LIMITS, NEAR_LIMITS[:4], CROWD[7:]], ids=len)
def test_labels_are_crossed_by_no_line_where_there_is_room(rows):
    (axes,) = (figure := made(*rows).plot()).axes
    figure.draw_without_rendering()
    corners = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
    segments = [pair for each in corners for pair in itertools.pairwise(each)]
    places = np.concatenate([np.linspace(*pair, 5000) for pair in segments])
    assert len(axes.texts) == len(rows)
    for x0, y0, x1, y1 in boxes(axes.texts):
        assert not ((places > (x0, y0)) & (places < (x1, y1))).all(1).any()


def test_a_label_stands_beside_its_own_point():
    """And one for which there is no place is left out; that of what is recommended is the first to get one."""
    rows = [(f"policy {i}", 1 + i / 100, 500 + i / 100, 0.05) for i in range(40)]
    (axes,) = made(*rows).plot().axes
    assert 1 <= len(axes.texts) < 40 and axes.texts[0].get_text() == "1 bit"
    axes.figure.draw_without_rendering()
    x, y = axes.transData.transform((500 / 1024, 0.05))
    for x0, y0, x1, y1 in boxes(axes.texts):
        assert (
            max(x0 - x, x - x1, y0 - y, y - y1) < 23
        )  # (7 + 9) / 72 of 100: the ring, and the distance


@pytest.mark.parametrize(
    ("lines", "side"),
    [
        ([], ("left", "center")),  # of the text: it is right of the point
        ([([0.52, 0.52], [0, 1])], ("right", "center")),
        (
            [([0.52, 0.52], [0, 1]), ([0.48, 0.48], [0, 1]), ([0, 1], [0.53, 0.53])],
            ("center", "top"),  # lines cross it, but none lies between it and the point
        ),
        ([([0.5, 0.5], [0, 1]), ([0, 1], [0.5, 0.5])], ("left", "bottom")),
        ([([each, each], [0, 1]) for each in np.linspace(0, 1, 80)], ("center", "bottom")),
    ],
)
def test_labels_are_where_no_line_is(lines, side):
    axes = plot._new_figure(4, 4).subplots()
    for line in lines:
        axes.plot(*line)
    axes.plot([0.5], [0.5], "o", markersize=5)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    add_labels(axes, [("text", (0.5, 0.5), "black")])
    (note,) = axes.texts
    assert (note.get_ha(), note.get_va()) == side


@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ((1000, 1000), ["960", "970", "980", "990", "1000"]),
        ((300, 1000), ["300", "400", "500", "700", "1000"]),
        ((10, 1000), ["10", "30", "100", "300", "1000"]),
        ((0, 1000), ["1", "10", "100", "1000"]),
        ((2**30, 2**50), ["1", "10", "100", "1000", "10000", "1e5", "1e6"]),
    ],
)
def test_ticks_are_plain_numbers_and_enough(sizes, ticks):
    found = made(*(("a", 2, size, 0.05) for size in sizes))
    (axes,) = replace(found, exact_bytes=sizes[1]).plot().axes
    shown = [each.get_text() for each in axes.get_xticklabels()]
    assert shown == ticks
    assert [float(each) for each in shown] == pytest.approx(list(axes.get_xticks()))
    low, high = axes.get_xlim()
    assert all(low < each < high for each in (*axes.get_xticks(), *axes.lines[0].get_xdata()))


# --- the command line -------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(
        cli.app, ["plan", *arguments], prog_name="fewbit", env={"COLUMNS": "80"}
    )


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, in the current directory."""
    text = """
import torch
from torch import nn


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    return model, list(torch.randn(4, 8, 32)), lambda model, batch: model(batch).square().mean()


def single(samples=4):
    model, batches, loss = setting()
    return model, (batch[:samples] for batch in batches[:1]), loss


def empty():
    return single(0)


def needy(size):
    return setting()


def broken():
    return {}["data"]


def refused():
    from fewbit.errors import InputError

    raise InputError("bits: expected 1 to 8")


def wrong():
    return 1, 2
"""
    (tmp_path / "planned_by_a_test.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "planned_by_a_test"


def test_command_with_a_function_of_the_users(own, tmp_path):
    result = run(f"{own}:setting", "--share", "0.5", "--draws", "3", "-o", "plan.json")
    assert result.exit_code == 0 and result.stderr == ""
    found = TrainingPlan.load("plan.json")
    assert (found.share, found.draws, found.batches, found.batch_size) == (0.5, 3, 4, 8)
    shown = [line.rstrip() for line in result.stdout.splitlines()]
    assert shown == [*str(found).splitlines(), "", "saved to plan.json"]
    again = run(f"{own}:setting", "-o", "plan.json")
    assert again.exit_code == 2 and "pass --force" in again.stderr
    result = run(f"{own}:setting", "--policy", "fixed", "--json", "-o", "plan.html")
    assert [each["candidate"]["policy"] for each in json.loads(result.stdout)["rows"]] == [
        "fixed"
    ] * 4
    assert Path("plan.html").read_text().startswith("<!doctype html>")


def test_command_knows_before_the_work_that_it_cannot_draw(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("fewbit.compress.training_plan.plan", None)  # is not called
    result = run(f"{own}:setting", "-o", "plan.png")
    assert result.exit_code == 2 and "needs matplotlib" in result.stderr


def test_command_with_a_model_by_name():
    result = run("resnet18", "--batch", "2", "--batches", "2", "--policy", "activations", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    found = TrainingPlan.from_json(result.stdout)
    assert (found.model, found.batches, found.batch_size) == ("ResNet", 2, 2)
    assert [each.label for each in found.rows] == ["1 bit"]
    assert found.rows[0].error == 0.0  # ReLU's derivative has two values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet19"], "unknown model 'resnet19': did you mean resnet18"),
        (["resnet18", "--size", "8"], "expected an image size of 64 to 8192 pixels, got 8"),
        (["resnet18", "-o", "plan.txt"], "plan.txt: expected a file name that ends in .json"),
        (
            ["resnet18", "--policy", "none"],
            "expected one of fixed, shared, error-bound, pre-activation, activations for",
        ),
        (["{own}:wrong"], "expected it to return (model, batch, loss), got a tuple of 2"),
        (["{own}:missing"], "has no attribute 'missing'"),
        (["{own}:setting", "--batch", "3"], "--batch: expected the name of a model with it"),
        (
            ["resnet18", "--batches", "1", "--batch", "4"],
            "--batches of at least 2, or --batch of a multiple of 8, got --batches 1 with --batch 4",
        ),
        (
            ["{own}:single"],
            "expected several batches, or one of a multiple of 8 samples, got one of 4",
        ),
        (["{own}:empty"], "batch: expected at least one sample, got 0"),
        (
            ["{own}:needy"],
            "needy: expected a function without arguments, got one for which: missing",
        ),
        (["{own}:broken"], "broken raised KeyError: 'data'"),
        (["{own}:refused"], "error: bits: expected 1 to 8"),
        (["{own}:setting", "--policy", "pre-activation"], "a batch or layer norm, got one without"),
        (["resnet18", "--share", "0"], "'--share': 0.0 is not in the range"),
        (["resnet18", "--draws", "1"], "'--draws': 1 is not in the range"),
    ],
)
def test_command_errors_are_one_line(arguments, message, own):
    result = run(*(each.format(own=own) for each in arguments))
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


# --- workloads --------------------------------------------------------------------------------------


def test_workloads_are_the_same_for_the_same_seed_and_leave_the_random_state():
    state = torch.get_rng_state()
    first, second, other = (workload("resnet18", batch=2, seed=each) for each in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert len(first.batches) == 4 and first.batches[0][0].shape == (2, 3, 64, 64)
    assert torch.equal(first.batches[1][0], second.batches[1][0])
    assert not torch.equal(first.batches[1][0], other.batches[1][0])
    assert torch.equal(first.model.fc.weight, second.model.fc.weight)
    with pytest.raises(InputError, match="batches: expected an integer of at least 1, got 0"):
        workload("resnet18", batches=0)


@pytest.mark.parametrize("name", ["roberta-base", "gpt2"])
def test_workloads_of_text_tell_hidden_tokens(name, monkeypatch):
    """With two small layers; the loss of an untrained model is that of a guess."""
    pytest.importorskip("transformers")
    from fewbit.models import transformer

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    small |= {"max_position_embeddings": 70}
    small = small if name == "roberta-base" else {"n_embd": 32, "n_layer": 2, "n_head": 2}
    monkeypatch.setitem(transformer.SIZES, name, {**small, "vocab_size": 100})
    model, batches, loss = workload(name, batch=3, size=20)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert loss(model, batches[0]).item() == pytest.approx(math.log(100), rel=0.05)
    if name == "roberta-base":
        tokens, places, masked = batches[0]
        assert places.shape == masked.shape == (3, 3)
        assert all(each._base is None for each in batches[0])  # or bytes are of more than a batch
        assert (tokens == 99).sum() == 9 and (tokens.gather(1, places) == 99).all()
        assert (masked < 99).all()


@pytest.mark.slow
def test_the_examples_of_the_docs_run(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parent.parent / "docs" / "plan.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    assert {each.name for each in tmp_path.iterdir()} == {"plan.csv", "plan.json", "plan.png"}
    assert type(names["model"][0]) is fewbit.nn.Linear
    shown = capsys.readouterr().out
    assert "coarse norms" in shown and "20% of that variance" in " ".join(shown.split())


def test_a_title_says_if_no_setting_saves_anything():
    found = made(("a", 8, 4096, 0.0), ("a", 4, 5000, 0.2))
    assert "no setting keeps less than the 4.00 KiB of the exact model" in " ".join(
        found.title.split()
    )
