"""Compiled models that once had wrong gradients, against torch in eager mode."""

import pytest
import torch
from compiled_gradients import MARKS, error, gradient
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


class Probabilities(nn.Module):
    """Sigmoid and binary cross-entropy, whose derivatives have large factors that cancel each other."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x):
        p = torch.sigmoid(8 * self.a(x))
        return nn.functional.binary_cross_entropy(p, (x > 0).float())


class Rows(nn.Module):
    """A norm of 4,096 rows, some of which are much larger than the others. A row is a group of elements."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(64, 256), nn.RMSNorm(256), nn.Linear(256, 16)

    def forward(self, x):
        scale = torch.ones(x.shape[1], 1)
        scale[0] = 1000
        return self.b(self.norm(self.a(x.repeat(4, 4, 1)) * scale.repeat(4, 1))).square().mean()


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


class Truncated(nn.Module):
    """A cast to integers and back, whose result another layer uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x):
        h = 3 * self.a(x)
        return (self.b(h.to(torch.int32).float()) + self.c(h)).square().mean()


class MaskedMean(nn.Module):
    """A mean whose divisor is a tensor of integers, in bfloat16."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x):
        mask = (x[..., 0] > -1).long()
        y = self.a(x.bfloat16()) * mask[..., None]
        return (y.sum(1) / mask.sum(1, keepdim=True)).float().square().mean()


class Ranks(nn.Module):
    """A difference of integers and their minimum, which multiplies a gradient."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x):
        ranks = (4 * x).long()
        return (self.a(x) * (ranks - ranks.amin(-1, keepdim=True))).square().mean()


class LargeRow(nn.Module):
    """A norm with a row whose mean square is infinite."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        scale = torch.ones_like(x[..., :1])
        scale[0, 0] = 1e25
        x = self.a(x) * scale
        return self.b(x * torch.rsqrt(mean_square(x))).square().mean()


def mean_square(x):
    return x.square().mean(-1, keepdim=True) + 1e-6


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "cls", [RunningMean, Probabilities, Rows, Channels, Truncated, MaskedMean, Ranks, LargeRow]
)
def test_gradients_against_eager_torch(cls, backend):
    torch.manual_seed(0)
    model, x = cls(), torch.randn(8, 64, 64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    exact = gradient(model, model, x)
    model.load_state_dict(state)
    found = gradient(model, fewbit.compile(model, 8, backend=backend), x)
    assert error(found, exact) < 0.02


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
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["module", *FORMS])
def test_small_rows_of_a_norm_have_small_errors(form, backend):
    torch.manual_seed(0)
    model, x = ShortRows(form), torch.randn(32, 16, 96, requires_grad=True)
    (exact,) = torch.autograd.grad(model(x), x)
    compiled = fewbit.compile(model, 8, backend=backend)
    (found,) = torch.autograd.grad(compiled(x), x)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert 0 < error(found[:, rows], exact[:, rows]) < 0.02
    # Copies of the normalized input and of the input of the first layer. The gradient of a vector's length has one more.
    copies = [row for row in compiled.partitioner.report.rows if row.bits and row.shape[-1] == 96]
    assert len(copies) <= 2 + (form == "unit vector")
