"""ErrorBound in training: gradients within their bounds, whatever the loop, codec and precision."""

import copy
import dataclasses
import json
import math
import warnings

import pytest
import torch
from probed_models import MODELS, loss_of
from samples import normal
from test_docs import run_blocks
from torch import nn
from torch.nn import functional as F

import fewbit
from fewbit.errors import BoundWarning, InputError


def build(name="convnet", **options):
    """(model, controller, one batch)"""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    return model, bounded(model, **options), normal(shape, scale=1.0)


BOUND = {field.name for field in dataclasses.fields(fewbit.ErrorBound)}


def bounded(model, **options):
    """Compress a model. options: fields of ErrorBound, and keywords of `compress_`."""
    bound = {name: options.pop(name) for name in BOUND & options.keys()}
    return fewbit.compress_(model, fewbit.ErrorBound(**bound), **{"verbose": False, **options})


def step(model, x, scale=1.0):
    model.zero_grad()
    (scale * loss_of(model(x))).backward()


def bits(controller):
    """{(name, input): bits, None for what is kept otherwise}"""
    return {(row.name, row.input): row.bits for row in controller.bounds}


# -- the truth ---------------------------------------------------------------------------------------------


class Called(nn.Module):
    """A layer as a function."""

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
    """By sampling, against the exact model: E|g^|^2 / E|g|^2 between 1 + e2 / 8 and 1 + e2."""
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


def test_the_ratio_is_that_of_gradients():
    """`gradient_ratio` agrees with a loop over draws of a copy."""
    model, controller, x = build(e2=2.0)
    step(model, x), step(model, x)
    before = [each.clone() for each in model.state_dict().values()]
    state, random = controller.state_dict(), torch.get_rng_state()
    loss = lambda model, batch: loss_of(model(batch))  # noqa: E731
    found = controller.gradient_ratio(x, loss, draws=16)
    assert controller.state_dict() == state and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(*pair) for pair in zip(before, model.state_dict().values(), strict=True))
    exact = copy.deepcopy(model)
    fewbit.restore_(exact)
    squares = []
    for each, draws in ((exact, 1), (model, 16)):
        squares.append(0.0)
        for seed in range(draws):
            torch.manual_seed(seed)
            each.zero_grad()
            loss_of(each(x)).backward()
            squares[-1] += sum(float(p.grad.square().sum()) for p in each.parameters()) / draws
    assert found.ratio == pytest.approx(squares[1] / squares[0], rel=6 * found.error + 0.02)
    assert float(found) == found.ratio and found.draws == 16
    assert set(found.by_module) >= {"0", "9"}


@pytest.mark.fast(1)
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
        layers=fewbit.LayerSettings(activation_bits=8, attention_bits=8),
        verbose=False,
    )
    kept = [fewbit.saved_bytes(each, x).total for each in (model, plain)]
    assert kept[0] == pytest.approx(kept[1], rel=0.01)
    assert not controller.bounds and controller.bounds.ratio is None
    assert str(controller.bounds).startswith("no bounds found yet")
    assert str(fewbit.compress_(plain, 2, verbose=False).bounds) == (
        "bounds are found with fewbit.ErrorBound"
    )


def test_a_part_that_is_kept_exactly_does_not_hold_the_whole():
    """One that a layer takes, where nobody else keeps the rest."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(32, 96), nn.Linear(24, 8)

        def forward(self, x):
            return self.b(self.a(x)[:, :24])

    model, x = Part(), normal((64, 32), scale=1.0)
    bounded(model, e2=1e-12)
    step(model, x), step(model, x)
    kept = fewbit.saved_bytes(model, x)
    assert {each.module: each.bytes for each in kept.kept} == {"a": x.nbytes, "b": 4 * 64 * 24}


def test_what_would_need_more_than_eight_bits_is_kept_exactly():
    """Then gradients are those of the exact model."""
    model, controller, x = build("convnet", e2=1e-12)
    step(model, x), step(model, x)
    layers = [row for row in controller.bounds if row.input is not None]
    assert layers and all(row.kept == "exact" and row.bits is None for row in layers)
    exact = copy.deepcopy(model)
    fewbit.restore_(exact)
    for each in (model, exact):
        torch.manual_seed(0)
        step(each, x)
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_smaller_batches_do_not_lose_bits_to_rounding():
    """A fraction of a bit less than the bound asks for would be an error above it, up to four times."""
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
    controller = bounded(model, e2=1e-12, layers=fewbit.LayerSettings(activation_bits=8))
    x = normal((16, 64), scale=1.0)
    step(model, x), step(model, x)
    layers = [row for row in controller.bounds if row.input is not None]
    assert [row.kept for row in layers] == ["exact", "exact"]
    kept = fewbit.saved_bytes(model, x).total
    assert kept == 2 * 4 * 16 * 64 + 16 * 64  # x, tanh's result, and 8 bits an element for tanh


def test_given_bits_stay():
    model, controller, x = build(overrides={"0": 5.5, "9": {"bits": 3}})
    step(model, x), step(model, x)
    rows = {row.name: row for row in controller.bounds if row.input is not None}
    assert rows["0"].bits == 5.5 and rows["0"].is_fixed and rows["9"].bits == 3
    assert not rows["3.body.0"].is_fixed


# -- activations -------------------------------------------------------------------------------------------


class Activated(nn.Module):
    """An activation as a module, one as a function, one with two slopes."""

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
        errors = [_largest_error(function, each) for each in range(1, 9)]
        assert row.bits == next((b for b, each in enumerate(errors, 1) if each <= row.dx), 8)
        assert row.is_met == (errors[int(row.bits) - 1] <= row.dx)
    table = fewbit.load_table("gelu", int(found["act"].bits))
    saved = fewbit.saved_bytes(model, x)
    codes = [each for each in saved.kept if "Activation" in (each.node or "")]
    expected = sum(found[name].bits for name in ("act", ":silu")) * 16 * 64 / 8
    assert table.bits == found["act"].bits
    assert sum(each.bytes for each in codes) == expected


def _largest_error(function, bits):
    """On a fine grid, from both sides of everything."""
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
    controller = bounded(model, layers=fewbit.LayerSettings(activation_bits=3))
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
    model = Activated()
    controller = bounded(model, overrides={"act": {"activation_bits": 3}})
    step(model, x), step(model, x)
    given = {row.name: row.is_fixed for row in controller.bounds if row.input is None}
    assert given == {"act": True, ":silu": False}


# -- codecs and channels -----------------------------------------------------------------------------------


@pytest.mark.fast(2)
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
    assert all(each.grad.isfinite().all() for each in model.parameters())
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


def test_channels_with_small_gradients_get_fewer_bits():
    """A convolution with groups, the second of which counts for almost nothing."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3, groups=2)

        def forward(self, x):
            return self.conv(x) * torch.tensor([1.0, 0.02]).repeat_interleave(4).view(8, 1, 1)

    torch.manual_seed(0)
    model, x = Model(), normal((6, 4, 12, 12), scale=1.0)
    kept, found = {}, {}
    for by_channel in (False, True):
        controller = bounded(model, e2=1e-3, by_channel=by_channel, interval=1)
        for _ in range(4):
            step(model, x)
        kept[by_channel] = fewbit.saved_bytes(model, x).total
        loss = lambda model, x: loss_of(model(x))  # noqa: E731
        found[by_channel] = controller.gradient_ratio(x, loss, draws=16)
    assert kept[True] < 0.8 * kept[False]
    assert all(each.ratio < 1.001 + 2 * each.error for each in found.values())


# -- loops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_an_observed_step_is_the_same_step(name):
    """With a measurement at each step, and at none of the last."""
    found = []
    for interval in (1, 10**6):
        model, controller, x = build(name, interval=interval)
        for seed in range(3):
            torch.manual_seed(seed)
            step(model, x)
        found.append(
            (
                controller.context.policy.knowledge,
                [each.grad.clone() for each in model.parameters()],
            )
        )
    # The third step has a measurement with interval=1 only; both go by those of the first two.
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


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
        each.grad.isfinite().all() and each.grad.dtype == dtype for each in model.parameters()
    )
    if e2 == 1e-12:
        # What is normalized is kept in the model's own precision.
        kept = fewbit.saved_bytes(model, x).total
        fewbit.restore_(model)
        assert kept < 1.3 * fewbit.saved_bytes(model, x).total


def test_steps_without_a_finite_gradient_say_nothing():
    model, controller, x = build()
    step(model, x), step(model, x), step(model, x)
    before = controller.bounds
    for _ in range(6):
        step(model, x, scale=float("inf"))
    assert controller.context.policy.step == 9 and controller.bounds == before


def test_a_scale_of_the_loss_changes_no_bits():
    found = []
    for scale in (1.0, 2.0**14):
        model, controller, x = build("transformer")
        torch.manual_seed(5)
        for _ in range(5):
            step(model, x, scale)
        found.append(bits(controller))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_compiled_parts_keep_eight_bits():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.b(self.a(x).tanh())

    torch.manual_seed(0)
    model, x = Model(), normal((16, 64), scale=1.0)
    controller = bounded(model, e2=2.0)
    model.a.compile(backend="aot_eager")
    for _ in range(3):
        step(model, x)
    assert {row.name for row in controller.bounds if row.input is not None} == {"b"}
    (row,) = [row for row in controller.bounds if row.input is not None]
    assert row.bits < 8


# -- the monitor -------------------------------------------------------------------------------------------


def test_no_warning_while_gradients_keep_to_the_bound():
    with warnings.catch_warnings():
        warnings.simplefilter("error", BoundWarning)
        model, controller, x = build(interval=1)
        for _ in range(12):
            step(model, x)
    assert 1 < controller.bounds.ratio < 1.5
    assert any(row.ratio is not None for row in controller.bounds)


def chain(*names):
    """Modules with layers of one size, so that the monitor has room for one at a time."""
    torch.manual_seed(0)
    layers = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(2))) for _ in names]
    return nn.ModuleDict(zip(names, layers, strict=True))


@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_each_variable_has_its_turn_where_steps_have_several_forwards(forwards):
    """All forward passes but the last are passed over, because no backward pass has come to them."""
    model, x = nn.Sequential(*chain("a", "b").values()), normal((16, 32), scale=1.0)
    controller = bounded(model, interval=1)
    for _ in range(7):
        sum(loss_of(model(x)) for _ in range(forwards)).backward()
    assert len(controller.bounds) == 4
    assert all(row.ratio is not None for row in controller.bounds)


def test_each_variable_has_its_turn_where_modules_are_called_one_by_one():
    model, x = chain("a", "b"), normal((16, 32), scale=1.0)
    controller = bounded(model, interval=1)
    for _ in range(8):
        for each in model.values():
            loss_of(each(x)).backward()
    assert len(controller.bounds) == 4
    assert all(row.ratio is not None for row in controller.bounds)


def test_a_warning_when_gradients_exceed_it(monkeypatch):
    """With fewer bits than are asked for."""
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


def test_a_ratio_within_the_bound_is_not_exceeded():
    model, controller, x = build(e2=2.0)
    step(model, x), step(model, x)
    found = controller.gradient_ratio(x, lambda model, x: loss_of(model(x)))
    assert not found.is_exceeded and ", within 3; " in found.title


def test_what_is_kept_exactly_counts_in_the_ratio():
    """As it is: all of it, where all is kept exactly."""
    model, controller, x = build("convnet", e2=1e-12)
    step(model, x), step(model, x)
    assert controller.bounds.ratio == 1


def _one_bit(slot, bound):
    from fewbit.policies.error_bound.choices import BitChoice

    return BitChoice(1.0, *slot.deciding(bound.e2, bound.window))


def test_exact_values_are_let_go_of():
    """The values that are kept for the monitor are freed when the backward pass has ended."""
    model, controller, x = build(interval=1)
    step(model, x), step(model, x)
    loss = loss_of(model(x))
    probe = controller.context.policy._run.probe
    assert any(each.exact is not None for each in probe._exact)
    loss.backward(retain_graph=True)  # so that the graph holds them on
    assert probe.monitored and probe.has_run() and len(probe._exact)
    assert all(each.exact is None for each in probe._exact)


# -- what is shown -----------------------------------------------------------------------------------------


def test_bounds_show_themselves():
    model, controller, x = build("transformer", overrides={"1.body.1": 3.5})
    step(model, x), step(model, x)
    found = controller.bounds
    text, page = str(found), found._repr_html_()
    assert text.startswith(
        f"e2 = 0.5: {sum(row.input is not None for row in found)} tensors that layers keep, "
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"e2": 0}, "expected a finite number above 0 for e2, got 0"),
        ({"e2": float("nan")}, "expected a finite number above 0 for e2, got nan"),
        ({"e2": float("inf")}, "expected a finite number above 0 for e2, got inf"),
        ({"e2": True}, "expected a finite number above 0 for e2, got True"),
        ({"e2": "0.5"}, "expected a finite number above 0 for e2, got '0.5'"),
        ({"window": "median"}, "expected mean or max for window, got 'median'"),
        ({"codec": "zip"}, "expected quant, quant+zvc, error-bounded, jpeg for a codec, got 'zip'"),
        ({"codec": ["quant"]}, "expected quant, quant+zvc, error-bounded, jpeg for a codec, got ['quant']"),
        ({"by_channel": 2}, "expected True or False for by_channel, got 2"),
        ({"interval": 0}, "expected a positive whole number for interval, got 0"),
    ],
)  # fmt: skip
def test_refused(options, message):
    model = MODELS["convnet"][0]()
    with pytest.raises(InputError) as caught:
        bounded(model, **options)
    assert str(caught.value) == message
    assert not any("fewbit" in type(each).__module__ for each in model.modules())


def test_a_codec_whose_package_is_not_there(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(InputError, match=r"pip install 'fewbit\[codecs\]'"):
        bounded(MODELS["convnet"][0](), codec="error-bounded")


# -- state -------------------------------------------------------------------------------------------------


def test_states_of_other_policies():
    model, controller, x = build()
    step(model, x), step(model, x)
    state = controller.state_dict()
    json.dumps(state)
    for options, kind, origin in (
        ({"bits": 2}, r"fewbit.FixedBits\(2\)", "configuration that learns nothing"),
        ({"bits": 2.5}, "AdaptiveBits", "AdaptiveBits"),
    ):
        other = fewbit.compress_(model, **options, verbose=False)
        with pytest.raises(InputError, match=f"controller of {kind}, got one of ErrorBound"):
            other.load_state_dict(state)
        step(model, x)
        other_state = other.state_dict()
        again = bounded(model)
        with pytest.raises(InputError, match=f"controller of ErrorBound, got one of (a )?{origin}"):
            again.load_state_dict(other_state)
    with pytest.raises(InputError, match="numbers of samples"):
        again.number_samples(torch.arange(8))


def test_another_bound_goes_on_with_what_was_seen():
    model, controller, x = build(e2=0.5)
    for _ in range(3):
        step(model, x)
    state, wide = controller.state_dict(), bits(controller)
    controller = bounded(model, e2=0.01)
    controller.load_state_dict(state)
    narrow = bits(controller)
    assert narrow.keys() == wide.keys()
    assert all((narrow[name] or 32) >= (wide[name] or 32) for name in wide) and narrow != wide


def test_python_of_the_page_runs(capsys):
    names = run_blocks("docs/error_bound.md", {})
    assert "tensors that layers keep" in capsys.readouterr().out
    controller = names["controller"]
    assert controller.bounds.e2 == 0.1 and len(controller.bounds) == 4
