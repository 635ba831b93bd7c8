"""fewbit.plan: bytes as counted by hand, errors against loops of their own and a closed form, what it recommends."""

import json
import math
import re
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from composed import Composed
from measured import Images, gradient, squared
from regions import Regions
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import fewbit
from fewbit import cli
from fewbit.errors import InputError, OutputExistsError
from fewbit.models import transformer
from fewbit.models.workload import workload
from fewbit.planning.candidates import Candidate, check_candidates, default_candidates
from fewbit.planning.loss import FewBitLoss
from fewbit.planning.plan import plan
from fewbit.planning.training_plan import TrainingPlan

FIXED = Candidate("fixed", 2)
SHARED = Candidate("shared", fewbit.AdaptiveBits(2))
ACTIVATIONS = Candidate("activations", 2, method="replace_activations_")


def net(dropout=0.0):
    return nn.Sequential(
        nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 4)
    )


def size(vector):
    return float(vector.square().sum())


def converted(candidate, model):
    """A copy, converted by hand, and the controller if there is one."""
    model, options = deepcopy(model), candidate.options
    if candidate.method == "replace_activations_":
        fewbit.replace_activations_(model, candidate.bits.bits, **options, verbose=False)
        return model, None
    return model, fewbit.compress_(model, candidate.bits, **options, verbose=False)


@pytest.mark.slow
def test_bytes_are_those_of_a_model_that_is_compressed_by_hand():
    model, x = net(0.1), torch.randn(16, 32)
    found = plan(model, x, squared, chunks=4)
    assert found.exact_bytes == fewbit.saved_bytes(lambda x: squared(model, x), x).total
    assert [row.candidate for row in found.rows] == list(default_candidates(model))
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


def test_a_slice_counts_alone_and_what_the_model_was_compressed_with_does_not_matter():
    data, model = torch.randn(64, 32), net()
    parts = [plan(model, part, squared, candidates=[FIXED], chunks=4) for part in data.split(16)]
    fewbit.compress_(model, bits=5, verbose=False)
    whole = plan(model, data[:16].clone(), squared, candidates=[FIXED], chunks=4)
    assert {part.exact_bytes for part in parts} == {whole.exact_bytes}
    assert whole.rows[0].error == parts[0].rows[0].error
    other = plan(model, data[:16], squared, candidates=[FIXED], chunks=4, seed=1)
    assert other.rows[0].error != whole.rows[0].error
    assert 0 < whole.exact_seconds_least <= whole.exact_seconds <= whole.exact_seconds_most
    assert all(0 < row.seconds_least <= row.seconds <= row.seconds_most for row in whole.rows)


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


@pytest.mark.slow
@pytest.mark.parametrize("candidate", [FIXED, SHARED, ACTIVATIONS], ids=lambda value: value.policy)
def test_errors_are_those_of_a_loop_by_hand(candidate, device):
    """60 draws on both sides have standard errors of 1 to 2 %; that of the bias is as large a part of the error."""
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


def test_several_batches_are_the_mean_of_what_each_has_alone():
    """A batch alone has the same draws from the same seed."""
    scales = torch.linspace(0.5, 1.5, 5)[:, None, None]
    model, batches = net(0.2), list(torch.randn(5, 8, 32) * scales)
    found = plan(model, batches, squared, candidates=[FIXED], seed=7)
    alone = [
        plan(model, batch, squared, candidates=[FIXED], chunks=4, seed=7 + number)
        for number, batch in enumerate(batches)
    ]
    (row,) = found.rows
    assert found.gradient == pytest.approx(np.mean([item.gradient for item in alone]))
    for name in ("error", "variance", "bias"):
        values = np.array([getattr(item.rows[0], name) for item in alone])
        assert getattr(row, name) == pytest.approx(values.mean())
        if name != "bias":
            error = getattr(row, f"{name}_error")
            assert error == pytest.approx(values.std(ddof=1) / math.sqrt(5))
    assert (found.batches, found.batch_size, found.sampled) == (5, 8, "5 batches of 8")


def test_bits_that_adapt_are_measured_as_they_are_after_some_steps():
    """The first layer's noise counts 10,000 times as much as the last one's: it gets the bits."""
    model = Composed(
        lambda model, x: torch.cat([model.loud(x[:, 0]), 0.01 * model.quiet(x[:, 1])], 1),
        loud=nn.Linear(64, 8),
        quiet=nn.Linear(64, 8),
    )
    x = torch.randn(16, 2, 64).requires_grad_()  # inputs without a gradient have 1 bit more
    fixed, shared = plan(model, x, squared, candidates=[FIXED, SHARED], chunks=4).rows
    assert shared.error < 0.5 * fixed.error
    assert shared.saved_bytes < 1.25 * fixed.saved_bytes  # bits of samples, and words not full


@pytest.mark.parametrize("several", [False, True])
def test_the_variance_between_minibatches_is_half_of_squared_differences(several):
    model, x = nn.Linear(5, 2), torch.randn(24, 5)
    parts = x.chunk(6)
    batch = list(parts) if several else x
    found = plan(model, batch, squared, candidates=[FIXED], chunks=6)
    gradients = [gradient(model, part) for part in parts]
    pairs = np.array(
        [size(a - b) / 2 for a, b in zip(gradients[::2], gradients[1::2], strict=True)]
    )
    pairs /= 1 if several else 6
    squares = [size(gradient) for gradient in gradients] if several else [size(gradient(model, x))]
    assert found.gradient == pytest.approx(np.mean(squares), rel=1e-5)
    assert found.sampling == pytest.approx(pairs.mean(), rel=1e-5)
    error = pairs.std(ddof=1) / 3**0.5
    assert found.sampling_error == pytest.approx(error, rel=1e-4)
    profile = fewbit.variance_profile(model, batch, squared, chunks=6, draws=2)
    assert profile.sampling[0] == pytest.approx(found.sampling, rel=1e-5)
    assert profile.sampling_error[0] == pytest.approx(error, rel=1e-4)
    assert profile.batches == found.batches == (6 if several else 1)
    sampled = "6 batches of 4" if several else "6 chunks of one batch of 24"
    assert profile.sampled == found.sampled == sampled


def test_names_are_those_of_the_model_before_it_was_compressed():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    fewbit.compress_(model, 4, verbose=False)
    found = plan(model, torch.randn(16, 32), squared, candidates=["activations"], chunks=4)
    assert [row.candidate.policy for row in found.rows] == ["activations"]


def test_candidates_by_name():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    given = ["fixed", "exact", fewbit.AdaptiveBits(2), 2]
    found = check_candidates(given, model=model)
    assert found[:-3] == default_candidates(model, ["fixed"])
    assert [one.policy for one in found[-3:]] == ["", "AdaptiveBits", ""]
    with pytest.raises(InputError, match="^candidates: policy: expected one of fixed, .*'fixd'"):
        check_candidates(["fixd"], model=model)


def test_default_candidates_are_those_that_the_model_has_a_use_for():
    def names(model, *policies):
        return [f"{row.policy} {row.label}" for row in default_candidates(model, *policies)]

    fixed = [f"fixed {bits} bits" for bits in (8, 4, 3, 2)]
    shared = [f"shared {bits} bits" for bits in (4, 3, 2, 1.5)]
    shared += [f"error-bound e2={e2}" for e2 in ("0.1", "0.5", "1", "2")]
    everything = [f"everything {bits} bits, everything" for bits in (4, 2)]
    again = [f"recompute-linear {bits} bits, recompute_linear" for bits in (8, 4, 3, 2)]
    assert names(nn.Linear(4, 4)) == fixed + shared + again + everything
    fused = [f"pre-activation {bits} bits" for bits in (8, 4, 2)]
    assert names(Images()) == [*fixed, *shared, *fused, *again, *everything, "activations 1 bit"]
    few = [f"activations {bits} bits" for bits in (4, 3, 2)]
    assert names(net()) == [*fixed, *shared, *fused, *again, *everything, *few]
    assert names(net(), (name for name in ("activations", "fixed"))) == fixed + few
    with pytest.raises(
        InputError,
        match="policy: expected one of fixed, shared, error-bound, recompute-linear, everything, cross-entropy, compile, got 'none'",
    ):
        default_candidates(nn.Linear(4, 4), ["none"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_checkpoints_of_a_model_of_transformers(is_checkpointed):
    """The regions of other candidates and of the exact model are those of the given model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_models.llama()).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    ids = torch.randint(100, (4, 32))

    def loss(model, ids):
        return model(ids, use_cache=False).logits.square().mean()

    def kept(model):
        return fewbit.saved_bytes(lambda ids: loss(model, ids), ids).total

    candidates = [*default_candidates(model, ["checkpoints"]), FIXED]
    found = plan(model, ids, loss, candidates=candidates, chunks=4, progress=False)
    assert found.exact_bytes == kept(model)
    assert [row.policy for row in found.rows] == ["checkpoints", "checkpoints", "fixed"]
    for row in found.rows:
        copy = deepcopy(model)
        for line in row.candidate.call.split("; "):
            eval(line, {"fewbit": fewbit, "model": copy})
        assert row.saved_bytes == kept(copy)
    eight, four, _ = found.rows
    assert four.saved_bytes < eight.saved_bytes < found.exact_bytes
    assert 0 < eight.error < four.error < found.gradient
    assert TrainingPlan.from_json(found.to_json()) == found


def words_model(dropout=0.0):
    """Return a language model of one layer with 500 words, whose loss is outside of the model."""
    layers = nn.Embedding(500, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout)
    layers = nn.Sequential(*layers, nn.Linear(64, 500))
    return Composed(lambda model, words: model.layers(words), layers=layers)


def of_next_word(model, words, loss=nn.functional.cross_entropy, **options):
    logits = model(words[:, :-1])
    return loss(logits.flatten(0, 1), words[:, 1:].flatten(), **options)


@pytest.mark.slow
def test_the_loss_of_a_language_model_is_compressed_too():
    model, words = words_model(dropout=0.2), [torch.randint(500, (8, 17)) for _ in range(4)]
    found = plan(model, words, of_next_word, progress=False)
    *_, fixed = (row for row in found.rows if row.policy == "fixed")
    rows = [row for row in found.rows if row.policy == "cross-entropy"]
    assert [row.label for row in rows] == ["4 bits", "2 bits"]
    copy = deepcopy(model)
    exec(rows[1].candidate.call, {"fewbit": fewbit, "model": copy})
    few = {"loss": fewbit.functional.cross_entropy, "bits": 2}
    by_hand = fewbit.saved_bytes(lambda x: of_next_word(copy, x, **few), words[0]).total
    assert rows[1].saved_bytes == by_hand
    assert fixed.label == "2 bits"
    assert rows[1].saved_bytes < 0.5 * fixed.saved_bytes
    assert fixed.error == pytest.approx(rows[1].error, rel=0.2)
    assert rows[1].variance > 0.5 * rows[1].error  # draws differ


def test_the_rounding_of_the_loss_differs_between_draws():
    model, words = words_model(), torch.randint(500, (8, 17))
    candidate = Candidate("loss", 2, {"overrides": {"*": None}}, method="cross_entropy")
    (row,) = plan(model, words, of_next_word, candidates=[candidate], draws=8, chunks=4).rows
    assert 0 < row.error
    assert abs(row.bias) < 0.5 * row.error


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # which torch.compile causes
def test_compiled_candidates_are_compared_with_exact_compiled_code():
    """Dropout draws other masks in compiled code, so the distance from the uncompiled gradient would be large."""
    model, words = words_model(dropout=0.3), [torch.randint(500, (64, 17)) for _ in range(4)]
    settings = {"backend": "aot_eager"}
    candidates = [Candidate("compile", bits, settings, "compile") for bits in (8, 2)]
    found = plan(model, words, of_next_word, candidates=candidates, progress=False)
    eight, two = found.rows
    assert eight.error < 1e-3 * found.gradient
    assert eight.error < two.error < 0.2 * found.gradient
    assert two.saved_bytes < found.compiled_bytes <= found.exact_bytes
    assert found.compiled_seconds > 0
    assert "torch.compile's exact code" in " ".join(str(found).split())
    assert not vars(model).get("_compiled_call_impl")
    copy = deepcopy(model)
    eight.candidate.apply(copy)
    assert copy._compiled_call_impl is not None
    two_by_hand = fewbit.compile(deepcopy(model), 2, **settings)
    of_next_word(two_by_hand, words[0]).backward()
    by_hand = fewbit.saved_bytes(lambda x: of_next_word(two_by_hand, x), words[0]).total
    assert two.saved_bytes == by_hand
    assert TrainingPlan.from_json(found.to_json()) == found


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_of_torchs_own_classes_are_compiled_as_often_as_needed():
    """torch compiles a code object 8 times, and does not compile the methods of its own classes."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4)), torch.randn(32, 64)
    settings = {"backend": "aot_eager"}
    candidates = [Candidate("compile", 2, settings, "compile")] * 5
    plans = [plan(model, x, squared, candidates=candidates, chunks=4) for _ in range(2)]
    rows = [row for found in plans for row in found.rows]
    assert len({row.saved_bytes for row in rows}) == 1
    by_hand = fewbit.compile(deepcopy(model), 2, **settings)
    squared(by_hand, x).backward()
    assert rows[0].saved_bytes == fewbit.saved_bytes(lambda x: squared(by_hand, x), x).total
    assert all(row.error > 0 for row in rows)


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_another_candidate_undoes_compilation():
    model = net()
    Candidate("compile", 2, {"backend": "aot_eager"}, "compile").apply(model)
    assert model._compiled_call_impl is not None
    FIXED.apply(model)
    assert model._compiled_call_impl is None


def test_the_parts_of_a_loss_are_rounded_independently():
    target = torch.zeros(64, dtype=torch.long)
    logits = torch.randn(64, 100).expand(64, 64, 100).clone().requires_grad_()
    with FewBitLoss(2, seed=3):
        before = torch.get_rng_state()
        losses = [nn.functional.cross_entropy(part, target) for part in logits]
        assert torch.equal(torch.get_rng_state(), before)
    (found,) = torch.autograd.grad(torch.stack(losses).sum(), logits)
    exact = torch.autograd.grad(nn.functional.cross_entropy(logits[0], target), logits)[0][0]
    errors = found - exact
    # The mean of 64 independent errors is about an eighth as large as one error.
    assert errors.mean(0).norm() < 0.2 * errors[0].norm()


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (["activations"], "policy activations: expected a model with activations as modules, got"),
        (["checkpoints"], "policy checkpoints: expected a model with gradient checkpointing as in"),
        (["pre-activation"], "policy pre-activation: expected a model with a batch or layer norm,"),
        ("fixed", "policies: expected a list of names, as ['fixed'], got 'fixed'"),
    ],
)
def test_policies_that_are_none_of_the_models(policies, message):
    with pytest.raises(InputError, match=re.escape(message)):
        default_candidates(nn.Linear(4, 4), policies)


@pytest.mark.parametrize(
    ("bits", "options", "label"),
    [
        (4, {}, "4 bits"),
        (1.5, {}, "1.5 bits"),
        (1, {"layers": fewbit.LayerSettings(copies=2)}, "1 bit, copies=2"),
        (fewbit.ErrorBound(1e-3, window="max"), {}, "e2=0.001, window=max"),
        (fewbit.Budget("6 GiB", interval=50), {"sample": torch.ones(2)}, "budget=6.00 GiB, interval=50"),
        (fewbit.Level("L3"), {}, "level L3"),
        (fewbit.Level("L2.5", 2), {}, "level L2.5, bits=2"),
        (None, {}, "4 bits"),
    ],
)  # fmt: skip
def test_labels_tell_candidates_of_a_policy_apart(bits, options, label):
    assert Candidate("any", bits, options).label == label


@pytest.mark.parametrize("candidate", [FIXED, SHARED, ACTIVATIONS], ids=repr)
def test_the_call_of_a_candidate_can_be_pasted(candidate):
    model, x = net(), torch.randn(4, 32)
    eval(candidate.call, {"fewbit": fewbit, "model": model})
    other, _ = converted(candidate, net())
    assert fewbit.saved_bytes(model, x).total == fewbit.saved_bytes(other, x).total


def test_calls_name_the_sample_and_the_bits_that_are_usual():
    candidate = Candidate("own", fewbit.Budget("1 MB"), {"sample": torch.ones(4, 32)})
    assert candidate.call == "fewbit.compress_(model, fewbit.Budget('1 MiB'), sample=sample)"
    assert Candidate.from_dict(candidate.to_dict()).call == candidate.call
    assert "(model, 3)" in Candidate("activations", method="replace_activations_").call


OPTIONS = [
    {"layers": fewbit.LayerSettings(copies=2)},
    {"overrides": {"0": fewbit.LayerSettings(bits=8), "1": None}},
    {"offload": fewbit.HostOffload(True)},
    {"include": ["0"], "verbose": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_a_candidate_comes_back_from_json(options):
    candidate = Candidate("own", 2, options)
    loaded = Candidate.from_dict(json.loads(json.dumps(candidate.to_dict())))
    assert loaded.bits == candidate.bits
    assert loaded.options == {name: value for name, value in options.items() if name != "verbose"}
    loaded.apply(net())


def test_options_that_json_has_not_are_text():
    candidate = Candidate("own", 2, {"include": lambda path, module: True})
    loaded = Candidate.from_dict(json.loads(json.dumps(candidate.to_dict())))
    assert loaded.options["include"].startswith("<function")


METHODS = "compress_, replace_activations_, checkpoint_, cross_entropy, compile, exact"
WHOLE = "a whole number from 1 to 8 with"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Candidate("a", 3, 5), "expected a name and a mapping of options, got 'a' and 5"),
        (lambda: Candidate("a", 2, method="loss"), f"method: expected one of {METHODS}, got 'loss'"),
        (lambda: Candidate("a", fewbit.ErrorBound(), method="replace_activations_"), f"{WHOLE} replace_activations_"),
        (lambda: Candidate("a", 1.5, method="checkpoint_"), f"{WHOLE} checkpoint_"),
        (lambda: Candidate("a", 1.5, method="compile"), f"{WHOLE} compile"),
        (lambda: Candidate("a", 1.5, method="cross_entropy"), f"{WHOLE} cross_entropy"),
        (lambda: Candidate.from_dict({}), "expected a candidate's policy, bits, options, method, got {}"),
        (lambda: Candidate.from_dict(3), "expected a candidate's policy, bits, options, method, got 3"),
    ],
)  # fmt: skip
def test_candidates_that_cannot_be_made(make, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make()


def refused(measure, changes, message, **options):
    """Check that a measurement of a linear model with the changes is refused in one line."""
    arguments = {"model": nn.Linear(4, 2), "batch": torch.randn(8, 4), "loss": squared}
    arguments |= {**options, **changes}
    model, batch, loss = (arguments.pop(name) for name in ("model", "batch", "loss"))
    with pytest.raises(InputError, match=message) as error:
        measure(model, batch, loss, **arguments)
    assert "\n" not in str(error.value)


MEASURES = {"plan": (plan, {"candidates": [FIXED]}), "profile": (fewbit.variance_profile, {})}


@pytest.mark.parametrize(("measure", "options"), MEASURES.values(), ids=MEASURES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": torch.relu}, "model: expected a torch.nn.Module, got builtin"),
        ({"model": nn.Linear(4, 2).eval()}, "expected one in training mode"),
        ({"model": nn.Linear(4, 2).requires_grad_(False)}, "expected parameters that require grad"),
        ({"loss": 3}, r"loss: expected a function \(model, batch\) -> scalar tensor, got int"),
        ({"loss": lambda output: output.mean()}, "loss: .*too many positional arguments"),
        ({"loss": lambda model, batch: 1.0}, "expected a scalar tensor, got float"),
        ({"loss": lambda model, batch: model(batch)}, r"got one of shape \(\d, 2\)"),
        ({"loss": lambda model, batch: batch.sum()}, "got one that requires no grad"),
        ({"loss": lambda model, batch: model(batch).mean() / 0}, "expected a finite value"),
        ({"loss": lambda model, batch: batch.sum() * torch.ones((), requires_grad=True)}, "depends on none of its parameters"),
        ({"batch": 3}, "batch: expected a tensor, a tuple or a mapping"),
        ({"batch": []}, "got an empty list"),
        ({"batch": torch.empty(0, 4)}, "^batch: expected at least one sample, got 0$"),
        ({"batch": [torch.empty(0, 4)] * 2}, "^batch: expected at least one sample, got 0$"),
        ({"batch": list(torch.randn(10, 4).split(4))}, r"batches of one size, got 4, 4, 2 samples"),
        ({"batch": (3, "x")}, "expected a tensor with samples"),
        ({"batch": [torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)]}, r"cannot be called with one by one \(RuntimeError\(.*give tuple\(batch\)"),
        ({"batch": list(torch.full((4, 8, 4), math.nan))}, "loss: expected a finite value, got nan"),
        ({"batch": torch.ones(8, 5), "loss": lambda model, batch: model(batch).sum()}, "batch: expected one that loss.model, batch. takes, got shape .8, 5., for which it raises RuntimeError"),
        ({"chunks": 6}, "expected a multiple of chunks=6 samples, or several batches, got 8"),
        ({"chunks": 5}, "chunks: expected an even integer of at least 4, got 5"),
        ({"draws": 1}, "draws: expected an integer of at least 2, got 1"),
        ({"draws": True}, "draws: expected an integer of at least 2, got True"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(measure, options, changes, message):
    refused(measure, changes, message, **options)


@pytest.mark.parametrize(
    ("measure", "changes", "message"),
    [
        ("profile", {"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ("profile", {"bits": 9}, "bits"),
        ("profile", {"include": "nothing"}, "expected a glob that matches a module"),
        ("profile", {"model": nn.PReLU(), "exclude": "*"}, "expected layers that quantize"),
        ("plan", {"loss": lambda model, batch: 0 * model(batch).sum()}, "expected a gradient that is finite and not 0"),
        ("plan", {"share": 0}, "share: expected a finite number above 0, got 0"),
        ("plan", {"share": math.inf}, "share: expected a finite number above 0, got inf"),
        ("plan", {"candidates": []}, "candidates: expected at least one setting, got none"),
        ("plan", {"candidates": [{"bits": 2}]}, "candidates: expected 'exact', 'checkpoint', bits or a fewbit.Candidate, got"),
        ("plan", {"candidates": [Candidate("a", 4, {"layers": {"copies": 3}})]}, "candidates: a, 4 bits, layers=.*: layers: copies: expected 1 or 2, got 3"),
        ("plan", {"candidates": [Candidate("a", 4, {"bit": 2})]}, "candidates: a, 4 bits, bit=2: .*unexpected keyword"),
        ("plan", {"candidates": [Candidate("a", 2, {"bogus": 1}, "compile")]}, "candidates: a, 2 bits, bogus=1: .*'bogus'"),
        ("plan", {"candidates": [Candidate("a", 2, {"backend": name}, "compile") for name in ("aot_eager", "inductor")]}, "the same arguments of torch.compile in all with the method compile, got {'backend': 'aot_eager'} and {'backend': 'inductor'}"),
    ],
)  # fmt: skip
def test_options_that_are_refused(measure, changes, message):
    measure, options = MEASURES[measure]
    refused(measure, changes, message, **options)


def test_reentrant_checkpoints_are_refused_by_name():
    """Torch computes the gradients of such a checkpoint in backward() only."""
    model, x = Regions(True, width=4), torch.randn(8, 4)
    compressed = deepcopy(model)
    controller = fewbit.compress_(compressed, fewbit.ErrorBound(), verbose=False)
    for measure in (
        lambda: plan(model, [x, x], squared, candidates=[FIXED]),
        lambda: fewbit.variance_profile(model, x, squared),
        lambda: controller.gradient_ratio(x, squared),
    ):
        with pytest.raises(InputError, match="^model: expected checkpoints with use_reentrant=F"):
            measure()


def test_json_has_everything_back(tmp_path):
    found = plan(net(), torch.randn(16, 32), squared, candidates=[FIXED, ACTIVATIONS], chunks=4)
    path = tmp_path / "plan.json"
    found.save(path)
    document = json.loads(path.read_text())
    assert document["schema"] == "fewbit.plan/3"
    assert document["rows"][0]["candidate"] == {
        "policy": "fixed",
        "bits": {"kind": "fixed", "bits": 2},
        "options": {},
        "method": "compress_",
        "checkpoints": [],
        "head": None,
    }
    loaded = TrainingPlan.load(path)
    assert loaded.to_json() == found.to_json() and str(loaded) == str(found)
    with pytest.raises(OutputExistsError):
        found.save(path)
    found.save(path, force=True)


def test_batches_that_are_all_alike_have_no_variance_between_them():
    """The seed here is larger than 64 bits, which is allowed too."""
    found = plan(net(), [torch.randn(8, 32)] * 4, squared, candidates=[FIXED], seed=2**64)
    assert found.sampling == 0 and found.recommended is None
    assert re.search(r"comes closest, with an error of [\d.]+$", found.title)


def run(*arguments):
    arguments = ["plan", *arguments]
    return CliRunner().invoke(cli.app, arguments, prog_name="fewbit", env={"COLUMNS": "80"})


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


def single():
    model, batches, loss = setting()
    return model, (batch[:4] for batch in batches[:1]), loss


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


@pytest.mark.slow
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
    assert [row["candidate"]["policy"] for row in json.loads(result.stdout)["rows"]] == [
        "fixed"
    ] * 4
    assert Path("plan.html").read_text().startswith("<!doctype html>")


def test_command_knows_before_the_work_that_it_cannot_draw(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("fewbit.planning.plan.plan", None)  # is not called
    result = run(f"{own}:setting", "-o", "plan.png")
    assert result.exit_code == 2 and "needs matplotlib" in result.stderr


@pytest.mark.slow
def test_command_with_a_model_by_name():
    result = run("resnet18", "--batch", "2", "--batches", "2", "--policy", "activations", "--json")
    # On a slow machine, lines show the progress.
    errors = [line for line in result.stderr.splitlines() if not line.startswith("plan: ")]
    assert result.exit_code == 0 and errors == []
    found = TrainingPlan.from_json(result.stdout)
    assert (found.model, found.batches, found.batch_size) == ("ResNet", 2, 2)
    assert [row.label for row in found.rows] == ["1 bit"]
    assert found.rows[0].error == 0.0  # ReLU's derivative has two values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet19"], "unknown model 'resnet19': did you mean resnet18"),
        (["resnet18", "--size", "8"], "expected an image size of 64 to 8192 pixels, got 8"),
        (["resnet18", "-o", "plan.txt"], "plan.txt: expected a file name that ends in .json"),
        (["resnet18", "--policy", "none"], "policy: expected one of fixed, shared, error-bound, pre-activation, recompute-linear, everything, cross-entropy, compile, activations, got"),
        (["{own}:wrong"], "expected it to return (model, batch, loss), got tuple of 2"),
        (["{own}:missing"], "has no attribute 'missing'"),
        (["{own}:setting", "--batch", "3"], "--batch: expected the name of a model with it"),
        (["resnet18", "--batches", "1", "--batch", "4"], "--batches of at least 2, or --batch of a multiple of 8, got --batches 1 with --batch 4"),
        (["{own}:single"], "expected several batches, or one of a multiple of 8 samples, got one of 4"),
        (["{own}:needy"], "needy: expected a function without arguments, got one for which: missing"),
        (["{own}:broken"], "broken raised KeyError: 'data'"),
        (["{own}:refused"], "error: bits: expected 1 to 8"),
        (["{own}:setting", "--policy", "pre-activation"], "a batch or layer norm, got one without"),
    ],
)  # fmt: skip
def test_command_errors_are_one_line(arguments, message, own):
    result = run(*(argument.format(own=own) for argument in arguments))
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_workloads_are_the_same_for_the_same_seed_and_leave_the_random_state():
    state = torch.get_rng_state()
    first, second, other = (workload("resnet18", batch=2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert len(first.batches) == 4 and first.batches[0][0].shape == (2, 3, 64, 64)
    assert torch.equal(first.batches[1][0], second.batches[1][0])
    assert not torch.equal(first.batches[1][0], other.batches[1][0])
    assert torch.equal(first.model.fc.weight, second.model.fc.weight)
    with pytest.raises(InputError, match="batches: expected an integer of at least 1, got 0"):
        workload("resnet18", batches=0)


@pytest.mark.parametrize("name", ["roberta-base", "gpt2"])
def test_workloads_of_text_tell_hidden_tokens(name, monkeypatch):
    """An untrained model has the loss of a guess. The model has two small layers here."""
    if name == "gpt2":
        small = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    else:
        small = {**tiny_models.SIZES, "max_position_embeddings": 70}
    monkeypatch.setitem(transformer.SIZES, name, {**small, "vocab_size": 100})
    model, batches, loss = workload(name, batch=3, size=20)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert loss(model, batches[0]).item() == pytest.approx(math.log(100), rel=0.05)
    if name == "roberta-base":
        tokens, places, masked = batches[0]
        assert places.shape == masked.shape == (3, 3)
        assert all(batch._base is None for batch in batches[0])  # or bytes are of more than a batch
        assert (tokens == 99).sum() == 9 and (tokens.gather(1, places) == 99).all()
        assert (masked < 99).all()


@pytest.mark.parametrize(("count", "is_known"), [(2, False), (4, True)])
def test_a_single_pair_of_batches_has_no_standard_error(count, is_known):
    batches = list(torch.randn(count, 8, 4))
    text = str(plan(nn.Linear(4, 3), batches, squared, candidates=[FIXED]))
    assert ("only 4 batches or more show" in " ".join(text.split())) != is_known
    assert "?" not in text
