"""ErrorBound in training: gradients stay within their bounds with any loop, codec and precision."""

import copy
import math
import warnings

import pytest
import torch
from composed import Composed
from probed_models import MODELS, loss_of
from samples import normal
from torch import nn
from torch.nn import functional as F
from training import bounded, step

import fewbit
from fewbit.errors import BoundWarning, MissingPackageError


def build(name="convnet", **options):
    """Return a model with an error bound, its controller and a batch. options: those of `bounded`."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    return model, bounded(model, **options), normal(shape, scale=1.0)


def bits(controller):
    """Return {(name, input): bits, or None for tensors that are saved in another form}."""
    return {(row.name, row.input): row.bits for row in controller.bounds}


# -- the truth ---------------------------------------------------------------------------------------------


class Called(nn.Module):
    """A model that calls a layer as a function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 96) / 10)

    def forward(self, x):
        return F.linear(x, self.weight)


SINGLE = {
    "linear": (lambda: nn.Sequential(nn.Linear(96, 24)), (32, 96)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3)), (12, 6, 9, 9)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, groups=2)), (12, 6, 13, 13)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 1)), (12, 4, 8, 8)),
    "function": (Called, (32, 96)),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_larger_bound_takes_fewer_bytes(name):
    found = []
    for e2 in (1e-3, 0.03, 0.5, 4.0):
        model, controller, x = build(name, e2=e2)
        step(model, x), step(model, x)
        step(model, x)
        found.append(fewbit.saved_bytes(model, x).total)
        rows = controller.bounds
        assert rows.e2 == e2 and len(rows) > 8
        assert all(row.kept == "exact" or 1 <= row.bits <= 8 for row in rows)
    assert found == sorted(found, reverse=True) and found[-1] < 0.6 * found[0]
    fewbit.restore_(model)
    assert found[0] < 0.6 * fewbit.saved_bytes(model, x).total


def test_bits_before_the_first_measurement():
    model, controller, x = build()
    plain = MODELS["convnet"][0]()
    fewbit.compress_(
        plain,
        fewbit.SampleBits(8),
        layers={"activation_bits": 8, "attention_bits": 8},
        verbose=False,
    )
    kept = [fewbit.saved_bytes(either, x).total for either in (model, plain)]
    assert kept[0] == pytest.approx(kept[1], rel=0.01)
    assert not controller.bounds and controller.bounds.ratio is None
    assert str(controller.bounds).startswith("no bounds found yet")
    assert str(fewbit.compress_(plain, 2, verbose=False).bounds) == (
        "bounds are found with fewbit.ErrorBound"
    )


def test_a_part_that_is_kept_exactly_does_not_hold_the_whole():
    """A layer saves a part of a tensor that nothing else saves."""

    torch.manual_seed(0)

    model, x = (
        Composed(
            lambda model, x: model.b(model.a(x)[:, :24]), a=nn.Linear(32, 96), b=nn.Linear(24, 8)
        ),
        normal((64, 32), scale=1.0),
    )
    bounded(model, e2=1e-12)
    step(model, x), step(model, x)
    kept = fewbit.saved_bytes(model, x)
    assert {entry.module: entry.bytes for entry in kept.kept} == {"a": x.nbytes, "b": 4 * 64 * 24}


def test_what_would_need_more_than_eight_bits_is_kept_exactly():
    """Gradients are then those of the exact model."""
    model, controller, x = build("convnet", e2=1e-12)
    step(model, x), step(model, x)
    layers = [row for row in controller.bounds if row.input is not None]
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
    step(model, x), step(model, x)
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
    step(model, x), step(model, x)
    layers = [row for row in controller.bounds if row.input is not None]
    assert [row.kept for row in layers] == ["exact", "exact"]
    kept = fewbit.saved_bytes(model, x).total
    assert kept == 2 * 4 * 16 * 64 + 16 * 64  # x, tanh's result, and 8 bits an element for tanh


# -- activations -------------------------------------------------------------------------------------------


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
    step(model, x), step(model, x)
    found = {row.name: row for row in controller.bounds if row.input is None}
    assert {"act", ":silu"} <= set(found)
    for name, function in (("act", "gelu"), (":silu", "silu")):
        row = found[name]
        assert row.bits <= most and row.kind == "worst case"
        errors = [_largest_error(function, number) for number in range(1, 9)]
        assert row.bits == next((b for b, error in enumerate(errors, 1) if error <= row.dx), 8)
        assert row.is_met == (errors[int(row.bits) - 1] <= row.dx)
    table = fewbit.load_table("gelu", int(found["act"].bits))
    saved = fewbit.saved_bytes(model, x)
    codes = [entry for entry in saved.kept if "Activation" in (entry.node or "")]
    expected = sum(found[name].bits for name in ("act", ":silu")) * 16 * 64 / 8
    assert table.bits == found["act"].bits
    assert sum(code.bytes for code in codes) == expected


def _largest_error(function, bits):
    """Return the largest error on a fine grid with both sides of each break."""
    import numpy as np

    table = fewbit.load_table(function, bits)
    x = np.unique(
        np.concatenate(
            [np.linspace(-10, 10, 200_001), table.breaks, np.nextafter(table.breaks, 99)]
        )
    )
    from fewbit import functions

    return np.abs(table(x) - functions.get(function).derivative(x)).max()


def test_activations_that_were_few_bit_before_keep_their_bits():
    """The report says that they are left alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), fewbit.nn.GELU(bits=4), nn.Linear(64, 64), nn.GELU())
    controller = bounded(model)
    x = normal((16, 64), scale=1.0)
    step(model, x), step(model, x)
    assert [row.name for row in controller.bounds if row.input is None] == ["3"]
    assert {row.path for row in controller.report.left_alone} == {"1"}
    fewbit.restore_(model)
    assert model[1].bits == 4 and not any(name.startswith("_fewbit") for name in vars(model[1]))


def test_activation_bits_that_are_given_stay():
    model, x = Activated(), normal((16, 64), scale=1.0)
    controller = bounded(model, layers={"activation_bits": 3})
    step(model, x), step(model, x)
    rows = {row.name: row for row in controller.bounds if row.input is None}
    assert {name: (row.bits, row.is_fixed) for name, row in rows.items()} == {
        "act": (3, True),
        ":silu": (3, True),
    }
    assert model.act.bits == 3 and "3 given" in str(controller.bounds)
    for name, function in (("act", "gelu"), (":silu", "silu")):
        assert rows[name].is_met == (_largest_error(function, 3) <= rows[name].dx)
        assert 0 < rows[name].dx < math.inf and rows[name].kind == "worst case"


# -- codecs and channels -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("codec", ["quant", "quant+zvc", "error-bounded", "jpeg"])
def test_codecs(codec, by_channel):
    if codec == "error-bounded":
        pytest.importorskip("imagecodecs")
    model, controller, x = build(codec=codec, by_channel=by_channel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoundWarning)
        for _ in range(3):
            step(model, x)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    rows = [row for row in controller.bounds if row.input is not None]
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


# -- loops -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_with_scaled_half_precision_losses():
    model, controller, x = build("transformer")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10**6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scales = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] < 2.0**24  # the first steps overflow
    rows = controller.bounds
    assert rows and all(row.kept == "exact" or 1 <= row.bits <= 8 for row in rows)
    assert sum(row.kept == "exact" for row in rows) < len(rows) / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("e2", [0.5, 1e-12])
def test_other_dtypes(dtype, e2):
    make, shape = MODELS["convnet"]
    torch.manual_seed(0)
    model, x = make().to(dtype), normal(shape, scale=1.0).to(dtype)
    bounded(model, e2=e2)
    for _ in range(3):
        step(model, x)
    assert all(
        parameter.grad.isfinite().all() and parameter.grad.dtype == dtype
        for parameter in model.parameters()
    )
    if e2 == 1e-12:
        # Normalized tensors are saved in the model's own precision.
        kept = fewbit.saved_bytes(model, x).total
        fewbit.restore_(model)
        assert kept < 1.3 * fewbit.saved_bytes(model, x).total


# -- the monitor -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_warning_while_gradients_keep_to_the_bound():
    with warnings.catch_warnings():
        warnings.simplefilter("error", BoundWarning)
        model, controller, x = build(interval=1)
        for _ in range(12):
            step(model, x)
    assert 1 < controller.bounds.ratio < 1.5
    assert any(row.ratio is not None for row in controller.bounds)


def test_a_warning_when_gradients_exceed_it(monkeypatch):
    """Gradients exceed the bound because layers get fewer bits than it asks for."""
    make, shape = SINGLE["linear"]
    torch.manual_seed(0)
    model, x = make(), normal(shape, scale=1.0)
    controller = bounded(model, e2=0.05, interval=1)
    monkeypatch.setattr("fewbit.policies.error_bound.choices.choose_bits", _one_bit)
    with pytest.warns(
        BoundWarning, match=r"E\|g\^\|\^2 / E\|g\|\^2 is .*, above 1 \+ e2 = 1\.05; most in 0 "
    ) as found:
        for _ in range(8):
            step(model, x)
    assert len(found) == 1
    assert controller.bounds.ratio > 1.05
    assert "!" in str(controller.bounds)
    with pytest.warns(
        BoundWarning,
        match=r"their bound, 1 \+ e2, allows: .* \+- .*, more than 1\.05; .* most in 0 \(",
    ) as found:
        ratio = controller.gradient_ratio(x, lambda model, x: loss_of(model(x)))
    assert len(found) == 1 and found[0].filename == __file__
    assert ratio.is_exceeded and ratio.ratio > 1.05 + 3 * ratio.error


def _one_bit(slot, bound):
    from fewbit.policies.error_bound.choices import BitChoice

    return BitChoice(1.0, *slot.deciding(bound.e2, bound.window))


# -- what is shown -----------------------------------------------------------------------------------------


def test_bounds_show_themselves():
    model, controller, x = build("transformer", overrides={"1.body.1": 3.5})
    step(model, x), step(model, x)
    found = controller.bounds
    text, page = str(found), found._repr_html_()
    assert text.startswith(
        f"e2 = 0.5: {sum(row.input is not None for row in found)} tensors that layers save, "
    )
    assert "3.5 given" in text and page.count("<tr>") == len(found) + 1
    records = found.records()
    assert records[0]["name"] == found[0].name and records[0]["dx"] == found[0].dx
    assert len(found.to_csv().splitlines()) == len(found) + 1
    assert found == controller.bounds and found != fewbit.compress_(model, 2, verbose=False).bounds
    assert {row.kind for row in found if row.input is None} <= {"worst case"}
    assert {row.kind for row in found if row.input is not None and row.demand} == {
        "in expectation",
        "measured",
    }


def test_the_report_says_so():
    report = str(build(e2=0.25, window="max", codec="quant+zvc", interval=50)[1].report)
    text = " ".join(report.split())
    assert (
        "fewbit.ErrorBound(0.25, window='max', codec='quant+zvc', interval=50): the codec quant+zvc, from the max of the last ten "
        "observations, one every 50 steps; "
        "8 bits before the first"
    ) in text


def test_a_codec_whose_package_is_not_there(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    missing = r"^the codec error-bounded needs imagecodecs: pip install 'fewbit\[codecs\]'$"
    with pytest.raises(MissingPackageError, match=missing):
        bounded(MODELS["convnet"][0](), codec="error-bounded")


# -- state -------------------------------------------------------------------------------------------------
