"""Compiled models that once had wrong gradients, against torch in eager mode."""

import pytest
import torch
from compiled_models import MARKS, gradient
from composed import Composed
from layers import relative
from torch import nn

import fewbit

pytestmark = MARKS


class RunningMean(nn.Module):
    """A model that changes a buffer after it has used it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.register_buffer("mean", torch.full((64,), 2.0))

    def forward(self, x):
        h = self.a(x)
        y = self.b(h - self.mean) + self.c(h)
        with torch.no_grad():
            self.mean.lerp_(h.mean((0, 1)), 0.5)
        return y.square().mean()


class Channels(nn.Module):
    """A batch norm of small images, whose channels have very different sizes."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(8, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.b = nn.Conv2d(64, 8, 3)
        with torch.no_grad():
            self.a.weight *= torch.logspace(-1, 1, 64).view(-1, 1, 1, 1)

    def forward(self, x):
        images = x.flatten()[: 16 * 8 * 16].view(16, 8, 4, 4)
        return self.b(torch.relu(self.norm(self.a(images)))).square().mean()


def probabilities(model, x):
    """Sigmoid and binary cross-entropy, whose derivatives have large factors that cancel each other."""
    p = torch.sigmoid(8 * model.a(x))
    return nn.functional.binary_cross_entropy(p, (x > 0).float())


def rows(model, x):
    """A norm of 4,096 rows, some of which are much larger than the others. A row is a group of elements."""
    scale = torch.ones(x.shape[1], 1)
    scale[0] = 1000
    return model.b(model.norm(model.a(x.repeat(4, 4, 1)) * scale.repeat(4, 1))).square().mean()


def truncated(model, x):
    """A cast to integers and back, whose result another layer uses."""
    h = 3 * model.a(x)
    return (model.b(h.to(torch.int32).float()) + model.c(h)).square().mean()


def masked_mean(model, x):
    """A mean whose divisor is a tensor of integers, in bfloat16."""
    mask = (x[..., 0] > -1).long()
    y = model.a(x.bfloat16()) * mask[..., None]
    return (y.sum(1) / mask.sum(1, keepdim=True)).float().square().mean()


def ranks(model, x):
    """A difference of integers and their minimum, which multiplies a gradient."""
    ranks = (4 * x).long()
    return (model.a(x) * (ranks - ranks.amin(-1, keepdim=True))).square().mean()


def large_row(model, x):
    """A norm with a row whose mean square is infinite."""
    scale = torch.ones_like(x[..., :1])
    scale[0, 0] = 1e25
    x = model.a(x) * scale
    return model.b(x * torch.rsqrt(mean_square(x))).square().mean()


def mean_square(x):
    return x.square().mean(-1, keepdim=True) + 1e-6


def linear(size=64, **options):
    return nn.Linear(64, size, **options)


MODELS = {
    "running mean": RunningMean,
    "channels": Channels,
    "probabilities": lambda: Composed(probabilities, a=linear()),
    "rows": lambda: Composed(rows, a=linear(256), norm=nn.RMSNorm(256), b=nn.Linear(256, 16)),
    "truncated": lambda: Composed(truncated, a=linear(), b=linear(32), c=linear(32)),
    "masked mean": lambda: Composed(masked_mean, a=linear(dtype=torch.bfloat16)),
    "ranks": lambda: Composed(ranks, a=linear()),
    "large row": lambda: Composed(large_row, a=linear(), b=linear()),
}


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_against_eager_torch(name, backend):
    model, x = MODELS[name](), torch.randn(8, 64, 64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    exact = gradient(model, model, x)
    model.load_state_dict(state)
    found = gradient(model, fewbit.compile(model, 8, backend=backend), x)
    assert relative(found, exact) < 0.02


FORMS = {
    "product": lambda x: x * torch.rsqrt(mean_square(x)),
    "quotient": lambda x: x / torch.sqrt(mean_square(x)),
    "unit vector": lambda x: 10 * nn.functional.normalize(x, dim=-1),
    "standard deviation": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
}
"""Norms that are written out."""


class ShortRows(nn.Module):
    """A root-mean-square norm whose rows have fewer elements than a group, every second row 100 times larger."""

    def __init__(self, form):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(96, 96), nn.RMSNorm(96, eps=1e-6), nn.Linear(96, 16)
        self.form = form

    def forward(self, x):
        scale = torch.ones(x.shape[1], 1)
        scale[::2] = 100
        x = self.a(x) * scale
        x = self.norm(x) if self.form == "module" else FORMS[self.form](x)
        return torch.tanh(self.b(x)).square().mean()


@pytest.mark.inductor
@pytest.mark.parametrize("form", ["module", *FORMS])
def test_small_rows_of_a_norm_have_small_errors(form):
    model, x = ShortRows(form), torch.randn(32, 16, 96, requires_grad=True)
    (exact,) = torch.autograd.grad(model(x), x)
    compiled = fewbit.compile(model, 8, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x), x)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert 0 < relative(found[:, rows], exact[:, rows]) < 0.02
    # Copies of the normalized input and of the input of the first layer. The gradient of a vector's length has one more.
    copies = [row for row in compiled.partitioner.report.rows if row.bits and row.shape[-1] == 96]
    assert len(copies) <= 2 + (form == "unit vector")
