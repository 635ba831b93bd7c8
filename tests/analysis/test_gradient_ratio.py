"""`controller.gradient_ratio`: what it says, against loops over draws, and how it shows itself."""

import copy
import csv
import io
import math

import pytest
import torch
from samples import normal
from torch import nn
from training import bounded

import fewbit
from fewbit.analysis.gradient_ratio import GradientRatio
from fewbit.errors import InputError
from fewbit.planning.candidates import Candidate
from fewbit.runtime.saved.context import measuring


def squared(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def batches(count, shape=(16, 48), out=12):
    return [
        (normal(shape, scale=1.0, seed=n), normal((shape[0], out), scale=1.0, seed=9 + n))
        for n in range(count)
    ]


def gradient(model, batch, seed=0):
    """Return the gradient of each module of a sequence."""
    torch.manual_seed(seed)
    model.zero_grad()
    squared(model, batch).backward()
    return [torch.cat([p.grad.flatten() for p in layer.parameters()]) for layer in model]


def by_loops(model, given, draws):
    """Return the sums of |g|^2, |g^|^2 and |g^ - g|^2 over batches and draws, a row for each module."""
    exact, model = copy.deepcopy(model), copy.deepcopy(model)
    fewbit.restore_(exact)
    sums = torch.zeros(len(model), 3)
    for batch in given:
        true = gradient(exact, batch)
        for seed in range(draws):
            with measuring():  # steps would be learned from
                drawn = gradient(model, batch, seed)
            for row, g, hat in zip(sums, true, drawn, strict=True):
                row += torch.stack([part.square().sum() for part in (g, hat, hat - g)])
    return sums


def trained(model, given, **options):
    controller = bounded(model, **options)
    for batch in given[:1] * 3:
        gradient(model, batch)
    return controller


@pytest.mark.slow
def test_the_relative_error_is_that_of_gradients():
    """The relative error is the ratio minus 1 if gradients have no bias."""
    torch.manual_seed(0)
    model, given = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 12)), batches(2)
    controller = trained(model, given, e2=2.0)
    state, random = controller.state_dict(), torch.get_rng_state()
    found = controller.gradient_ratio(given, squared, draws=40)
    assert controller.state_dict() == state and torch.equal(torch.get_rng_state(), random)
    sums = by_loops(model, given, 40)
    g2, hat2, error2 = sums.sum(0).tolist()
    assert found.ratio == pytest.approx(hat2 / g2, rel=0.1)
    assert found.relative_error == pytest.approx(error2 / g2, rel=0.1)
    assert found.relative_error == pytest.approx(found.ratio - 1, abs=3 * found.error)
    assert list(found.by_module) == list(found.relative_by_module) == ["0", "1"]
    for name, (g2, hat2, error2) in zip("01", sums.tolist(), strict=True):
        assert found.by_module[name] == pytest.approx(hat2 / g2, rel=0.15)
        assert found.relative_by_module[name] == pytest.approx(error2 / g2, rel=0.2)


def test_a_ratio_alone_is_no_error():
    """Gradients scaled by c have the ratio c^2, and a squared error of (1 - c)^2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 12))
    controller = bounded(model, e2=1e-9)
    (batch,) = batches(1)
    gradient(model, batch), gradient(model, batch)

    def loss(model, batch):
        scale = 0.25 if hasattr(model[0], "quantizer") else 1.0
        return scale * squared(model, batch)

    found = controller.gradient_ratio(batch, loss)
    assert found.ratio == pytest.approx(1 / 16, rel=1e-5)
    assert found.relative_error == pytest.approx(9 / 16, rel=1e-5)
    assert "errors have a bias" in str(found) and not found.is_exceeded


def _ratio(model, batch, loss, **options):
    return bounded(model).gradient_ratio(batch, loss, **options)


def _plan(model, batch, loss):
    return fewbit.plan(model, [batch, batch], loss, candidates=[Candidate("8", 8)])


def _profile(model, batch, loss):
    return fewbit.variance_profile(model, [batch, batch], loss)


def criterion(output, target):
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize("measure", [_ratio, _plan, _profile])
@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (nn.CrossEntropyLoss(), None),
        (nn.MSELoss(), None),
        (nn.functional.cross_entropy, TypeError),
        (criterion, AttributeError),
    ],
)
def test_a_loss_of_outputs_is_refused_by_name(measure, loss, cause):
    model = nn.Sequential(nn.Linear(48, 12))
    with pytest.raises(
        InputError, match=r"^loss: expected a function \(model, batch\) -> "
    ) as caught:
        measure(model, batches(1)[0], loss)
    assert type(caught.value.__cause__) is (cause or type(None))
    assert "criterion(model(batch[0]), batch[1])" in str(caught.value)


class Fails(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self) if self.training else x


@pytest.mark.parametrize("measure", [_ratio, _plan, _profile])
def test_errors_of_the_model_and_of_the_loss_are_their_own(measure):
    """A TypeError within the model, even of torch's functions, says nothing of how the loss is called."""
    (batch,) = batches(1)
    with pytest.raises(TypeError, match="linear"):
        measure(nn.Sequential(Fails(48, 12)), batch, squared)

    def broken(model, batch):
        return nn.functional.mse_loss(model(batch[0]), None)

    def unpacks(model, batch):
        a, b, c = len(batch)

    for loss in (broken, unpacks):
        with pytest.raises((TypeError, AttributeError)) as caught:
            measure(nn.Sequential(nn.Linear(48, 12)), batch, loss)
        assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize("base", [nn.Module, nn.MSELoss])
def test_a_module_of_model_and_batch_is_a_loss(base):
    class Loss(base):
        def forward(self, model, batch):
            return squared(model, batch)

    model, (batch,) = nn.Sequential(nn.Linear(48, 12)), batches(1)
    assert _ratio(model, batch, Loss()).title == _ratio(model, batch, squared).title


@pytest.mark.parametrize("draws", [1, 0, 2.0, True])
def test_draws_are_two_at_least(draws):
    model, (batch,) = nn.Sequential(nn.Linear(48, 12)), batches(1)
    with pytest.raises(InputError, match="draws: expected an integer of at least 2"):
        _ratio(model, batch, squared, draws=draws)


@pytest.mark.parametrize(("draws", "factor"), [(2, 235.8), (8, 4.53), (10_000, 3.0)])
def test_the_chance_of_few_draws(draws, factor):
    """The chance is Student's t at the probability of three standard deviations; the values are from a table."""
    for ratio in (1.5 + 0.01 * factor * 1.01, 1.5 + 0.01 * factor * 0.99):
        found = GradientRatio(ratio, 0.01, 1.5, {"": ratio}, draws, 0.5, {"": 0.5})
        assert found.chance == pytest.approx(0.01 * factor, rel=1e-3)
        assert found.is_exceeded == (ratio > 1.5 + 0.01 * factor)


def test_it_shows_itself():
    found = GradientRatio(
        1.3214, 0.0512, 1.5, {"": 1.6, "a.b": math.nan}, 8, 0.3312, {"": 0.7, "a.b": math.nan}
    )
    assert float(found) == found.ratio == 1.3214 and not found.is_exceeded
    line = "E|g^|^2 / E|g|^2 = 1.321 +- 0.051, within 1.5; E|g^ - g|^2 / |g|^2 = 0.331"
    assert found.title == line
    text, page = str(found), found._repr_html_()
    assert text.splitlines()[0] == line
    assert "1.6!" in text and "!: more than 1 + e2" in text and "draws" in text
    assert page.count("<tr>") == 3 and "E|g^ - g|^2 / |g|^2 = 0.331" in page
    assert found.records()[0] == {"module": "", "ratio": 1.6, "relative_error": 0.7}
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["module"] for row in rows] == ["", "a.b"] and float(rows[0]["ratio"]) == 1.6


@pytest.mark.parametrize(
    ("ratio", "limit", "text", "is_exceeded"),
    [
        (1.5, None, "= 1.5 +- 0.05; E", False),
        (1.5, 1.5, ", within 1.5;", False),
        (1.6, 1.5, ", perhaps by chance above 1.5;", False),
        (1.75, 1.5, ", more than 1.5;", True),
        (1.0, 1 + 1e-6, ", within 1 + 1e-06;", False),
    ],
)
def test_the_verdict(ratio, limit, text, is_exceeded):
    found = GradientRatio(ratio, 0.05, limit, {"a": ratio}, 8, 0.1, {"a": 0.1})
    assert text in found.title and found.is_exceeded == is_exceeded
