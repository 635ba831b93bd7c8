"""ErrorBound in training: gradients stay within their bounds with any loop, codec and precision."""

import copy
import math
import re
import sys
import warnings

import pytest
import torch
from composed import Composed
from probed_models import MODELS, loss_of
from samples import normal
from test_error_bound_formulas import brute
from torch import nn
from torch.nn import functional as F
from training import bounded, saved_rows, step

import fewbit
from fewbit.errors import BoundWarning, MissingPackageError
from fewbit.policies.error_bound.choices import BitChoice
from fewbit.runtime.saved.bit_policy import BitPolicy


def build(name="convnet", **options):
    """Return a model with an error bound, its controller and a batch. options: those of `bounded`."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    return model, bounded(model, **options), normal(shape, scale=1.0)


def steps(model, x, count=2):
    for _ in range(count):
        step(model, x)


def largest_error(function, bits):
    return brute(fewbit.load_table(function, bits), -10.0, 10.0)


def activation_rows(controller):
    """Return {name: row} of the activations."""
    return {row.name: row for row in controller.bounds if row.input is None}


SINGLE = {
    "linear": (lambda: nn.Sequential(nn.Linear(96, 24)), (32, 96)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3)), (12, 6, 9, 9)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, groups=2)), (12, 6, 13, 13)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 1)), (12, 4, 8, 8)),
    "function": (
        lambda: Composed(
            lambda model, x: F.linear(x, model.weight),
            weight=nn.Parameter(torch.randn(24, 96) / 10),
        ),
        (32, 96),
    ),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(16)), (24, 16, 10)),
}


def squared(model, batch):
    """A loss without symmetries, so that the samples' gradients have different sizes."""
    x, y = batch
    return (model(x) - y).square().sum(0).mean()


@pytest.mark.fast(3)
@pytest.mark.parametrize("e2", [0.05, 0.5])
@pytest.mark.parametrize("name", SINGLE)
def test_the_true_ratio_is_within_the_bound_and_not_far_below(name, e2):
    """E|g^|^2 / E|g|^2, sampled against the exact model, is between 1 + e2 / 8 and 1 + e2."""
    make, shape = SINGLE[name]
    torch.manual_seed(1)
    model, x = make(), torch.randn(shape)
    y = model(x).detach() + torch.randn_like(model(x))
    controller = bounded(model, e2=e2)
    for _ in range(5):
        squared(model, (x, y)).backward()
    found = controller.gradient_ratio((x, y), squared, draws=24)
    assert found.limit == 1 + e2
    assert found.ratio <= 1 + e2 + 2 * found.error
    assert found.ratio > 1 + e2 / 8
    assert controller.bounds.limit == 1 + e2


def test_bits_before_the_first_measurement(monkeypatch):
    """They are 8 for each layer's own copy."""
    monkeypatch.setattr(BitPolicy, "shares_results", False)
    model, controller, x = build()
    plain = MODELS["convnet"][0]()
    layers = {"activation_bits": 8, "attention_bits": 8}
    fewbit.compress_(plain, fewbit.SampleBits(8), layers=layers, verbose=False)
    kept = [fewbit.saved_bytes(either, x).total for either in (model, plain)]
    assert kept[0] == pytest.approx(kept[1], rel=0.01)
    assert not controller.bounds and controller.bounds.ratio is None
    assert str(controller.bounds).startswith("no bounds found yet")
    assert str(fewbit.compress_(plain, 2, verbose=False).bounds) == (
        "bounds are found with fewbit.ErrorBound"
    )


def test_a_part_that_is_kept_exactly_does_not_hold_the_whole():
    """A layer saves a part of a tensor that nothing else saves."""
    model = Composed(
        lambda model, x: model.b(model.a(x)[:, :24]), a=nn.Linear(32, 96), b=nn.Linear(24, 8)
    )
    x = normal((64, 32), scale=1.0)
    bounded(model, e2=1e-12)
    steps(model, x)
    kept = fewbit.saved_bytes(model, x)
    assert {entry.module: entry.bytes for entry in kept.kept} == {"a": x.nbytes, "b": 4 * 64 * 24}


def test_what_would_need_more_than_eight_bits_is_kept_exactly():
    """Gradients are then those of the exact model."""
    model, controller, x = build(e2=1e-12)
    steps(model, x)
    layers = saved_rows(controller)
    assert layers and all(row.kept == "exact" and row.bits is None for row in layers)
    assert controller.bounds.ratio == 1
    exact = copy.deepcopy(model)
    fewbit.restore_(exact)
    for either in (model, exact):
        torch.manual_seed(0)
        step(either, x)
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_smaller_batches_do_not_lose_bits_to_rounding():
    """A fraction of a bit below the bound's number would make the error up to four times too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 24))
    controller = bounded(model)
    x = normal((16, 96), scale=1.0)
    steps(model, x)
    (row,) = controller.bounds
    assert row.bits % 1
    for samples in (16, 5, 1):
        assignment = controller.context.policy.assign((x[:samples],))
        slot = assignment.slot(("0", 0), 8, False)
        assert row.bits * samples <= slot.total(samples) < row.bits * samples + 1
        assert slot.uniform() == math.ceil(row.bits)
    given = assignment.slot(("0", 0), 2.5, True)
    assert (given.total(1), given.uniform()) == (2, 2)


def test_an_exact_copy_is_the_tensor_itself():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    controller = bounded(model, e2=1e-12, layers={"activation_bits": 8})
    x = normal((16, 64), scale=1.0)
    steps(model, x)
    assert [row.kept for row in saved_rows(controller)] == ["exact", "exact"]
    kept = fewbit.saved_bytes(model, x).total
    assert kept == 2 * 4 * 16 * 64 + 16 * 64  # x, tanh's result, and 8 bits an element for tanh


class Activated(nn.Module):
    """A model with an activation as a module, one as a function, and one with two slopes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(64, 64), nn.Linear(64, 64), nn.GELU()

    def forward(self, x):
        return F.silu(self.b(self.act(self.a(x)))) + F.relu(x)


@pytest.mark.parametrize(("e2", "most"), [(1e-4, 8), (0.02, 4), (2.0, 2)])
def test_tables_follow_from_the_bound(e2, most):
    torch.manual_seed(0)
    model, x = Activated(), normal((16, 64), scale=1.0)
    controller = bounded(model, e2=e2)
    steps(model, x)
    found = activation_rows(controller)
    for name, function in (("act", "gelu"), (":silu", "silu")):
        row = found[name]
        assert row.bits <= most and row.kind == "worst case"
        errors = [largest_error(function, number) for number in range(1, 9)]
        assert row.bits == next((b for b, error in enumerate(errors, 1) if error <= row.dx), 8)
        assert row.is_met == (errors[int(row.bits) - 1] <= row.dx)
    saved = fewbit.saved_bytes(model, x)
    codes = [entry for entry in saved.kept if "Activation" in (entry.node or "")]
    expected = sum(found[name].bits for name in ("act", ":silu")) * 16 * 64 / 8
    assert sum(code.bytes for code in codes) == expected


def test_activations_that_were_few_bit_before_keep_their_bits():
    """The report says that they are left alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), fewbit.nn.GELU(bits=4), nn.Linear(64, 64), nn.GELU())
    controller = bounded(model)
    steps(model, normal((16, 64), scale=1.0))
    assert activation_rows(controller).keys() == {"3"}
    assert {row.path for row in controller.report.left_alone} == {"1"}
    fewbit.restore_(model)
    assert model[1].bits == 4 and not any(name.startswith("_fewbit") for name in vars(model[1]))


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"layers": {"activation_bits": 3}}, {"act", ":silu"}),
        ({"overrides": {"act": {"activation_bits": 3}}}, {"act"}),
    ],
)
def test_activation_bits_that_are_given_stay(options, given):
    model, x = Activated(), normal((16, 64), scale=1.0)
    controller = bounded(model, **options)
    steps(model, x)
    rows = activation_rows(controller)
    assert {name for name, row in rows.items() if row.is_fixed} == given
    assert model.act.bits == 3
    assert re.search(r"act f' +input +worst case +\S+ +3 given", str(controller.bounds))
    assert controller.context.policy.activations.keys() == {"act", ":silu"} - given
    for name, function in (("act", "gelu"), (":silu", "silu")):
        row = rows[name]
        if row.is_fixed:
            assert (row.bits, row.kept, row.kind, row.demand) == (3, "bits", "worst case", "input")
            assert row.is_met == (largest_error(function, 3) <= row.dx) and 0 < row.dx < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("codec", ["quant", "quant+zvc", "error-bounded", "jpeg"])
def test_codecs(codec, by_channel):
    if codec == "error-bounded":
        pytest.importorskip("imagecodecs")
    model, controller, x = build(codec=codec, by_channel=by_channel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoundWarning)
        steps(model, x, 3)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    rows = saved_rows(controller)
    if codec == "quant":
        assert all(row.kept in ("bits", "exact") for row in rows)
    else:
        left = {"quant+zvc": {"quant"}, "jpeg": {"quant"}}.get(codec, set())
        assert {row.kept for row in rows} <= {codec, "exact", "bits", *left}
        assert sum(row.kept in (codec, *left) for row in rows) >= len(rows) - 1
        assert any(row.kept == codec for row in rows)
    found = controller.gradient_ratio(x, lambda model, x: loss_of(model(x)), draws=2)
    assert 0.5 < found.ratio < 4
    kept = fewbit.saved_bytes(model, x).total
    fewbit.restore_(model)
    assert kept < 0.6 * fewbit.saved_bytes(model, x).total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("e2", [0.5, 1e-12])
def test_other_dtypes(dtype, e2):
    make, shape = MODELS["convnet"]
    torch.manual_seed(0)
    model, x = make().to(dtype), normal(shape, scale=1.0).to(dtype)
    bounded(model, e2=e2)
    steps(model, x, 3)
    assert all(
        parameter.grad.isfinite().all() and parameter.grad.dtype == dtype
        for parameter in model.parameters()
    )
    if e2 == 1e-12:
        # Normalized tensors are saved in the model's own precision.
        kept = fewbit.saved_bytes(model, x).total
        fewbit.restore_(model)
        assert kept < 1.3 * fewbit.saved_bytes(model, x).total


def test_a_warning_when_gradients_exceed_it(monkeypatch):
    """Layers get fewer bits than the bound asks for. Steps 2, 4 and 8 are the three measurements that the docs promise."""
    make, shape = SINGLE["linear"]
    torch.manual_seed(0)
    model, x = make(), normal(shape, scale=1.0)
    controller = bounded(model, e2=0.05)
    monkeypatch.setattr("fewbit.policies.error_bound.choices.choose_bits", _one_bit)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BoundWarning)
        steps(model, x, 8)
    assert controller.bounds.ratio > 1.05
    assert "more than 1.05" in " ".join(controller.bounds.title.split())
    assert "!" in str(controller.bounds)
    with pytest.warns(
        BoundWarning, match=r"E\|g\^\|\^2 / E\|g\|\^2 is .*, above 1 \+ e2 = 1\.05; most in 0 "
    ) as found:
        steps(model, x, 8)
    assert len(found) == 1
    with pytest.warns(
        BoundWarning,
        match=r"their bound, 1 \+ e2, allows: .* \+- .*, more than 1\.05; .* most in 0 \(",
    ) as found:
        ratio = controller.gradient_ratio(x, lambda model, x: loss_of(model(x)))
    assert len(found) == 1 and found[0].filename == __file__
    assert ratio.is_exceeded and ratio.ratio > 1.05 + 3 * ratio.error


def _one_bit(slot, bound):
    return BitChoice(1.0, *slot.deciding(bound.e2, bound.window))


def test_the_report_says_so():
    report = str(build(e2=0.25, window="max", codec="quant+zvc", interval=50)[1].report)
    text = " ".join(report.split())
    assert (
        "fewbit.ErrorBound(0.25, window='max', codec='quant+zvc', interval=50): the codec quant+zvc, from the max of the last ten "
        "observations, one every 50 steps; 8 bits before the first, as this report shows"
    ) in text
    assert "controller.bounds shows later ones" in text
    fixed = fewbit.compress_(MODELS["convnet"][0](), 8, verbose=False).report
    assert "before the first" not in str(fixed)


def test_a_codec_whose_package_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    missing = r"^the codec error-bounded needs imagecodecs: pip install 'fewbit\[codecs\]'$"
    with pytest.raises(MissingPackageError, match=missing):
        bounded(MODELS["convnet"][0](), codec="error-bounded")
