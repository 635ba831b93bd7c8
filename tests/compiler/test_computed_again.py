"""`fewbit.compile`: which tensors get copies, and which are computed again from copies of other tensors."""

import pytest
import torch
from compiled_models import MARKS, gradient
from composed import Composed
from layers import relative
from torch import nn
from torch.nn import functional as F

import fewbit

pytestmark = [*MARKS, pytest.mark.inductor]


def with_loss(*layers):
    """Return the layers with a loss that is linear in their result, so that the loss saves nothing."""

    def forward(model, x):
        y = model.layers(x)
        return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()

    return Composed(forward, layers=nn.Sequential(*layers))


def mlp(activation):
    """A layer norm before the first layer, so that its input has a copy of its own."""
    layers = nn.LayerNorm(64), nn.Linear(64, 128), activation, nn.Linear(128, 64)
    return with_loss(*layers), torch.randn(32, 16, 64)


def gated_by(gate):
    def forward(model, x):
        x = model.norm(x)
        return model.down(gate(model.gate(x)) * model.up(x))

    layers = {"gate": nn.Linear(64, 128), "up": nn.Linear(64, 128), "down": nn.Linear(128, 64)}
    return with_loss(Composed(forward, norm=nn.RMSNorm(64), **layers)), torch.randn(32, 16, 64)


def convolutions(*activations):
    layers = [nn.Conv2d(4, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), *activations]
    return with_loss(*layers, nn.Conv2d(16, 8, 3, bias=False)), torch.randn(8, 4, 16, 16)


NORM, INNER = (512, 64), (512, 128)
CASES = {  # {name: (model and input, layers=, {shape of a copied tensor: bits of its copies}) with bits=2}
    "GELU": (lambda: mlp(nn.GELU()), {}, {NORM: {3}, INNER: {4}}),
    "GELU by tanh": (lambda: mlp(nn.GELU("tanh")), {}, {NORM: {3}, INNER: {4}}),
    "SiLU": (lambda: mlp(nn.SiLU()), {}, {NORM: {3}, INNER: {4}}),
    "Mish": (lambda: mlp(nn.Mish()), {}, {NORM: {3}, INNER: {4}}),
    "tanh": (lambda: mlp(nn.Tanh()), {}, {NORM: {3}, INNER: {2, 3}}),
    "codes": (lambda: mlp(nn.GELU()), {"activation_bits": 3}, {NORM: {3}, INNER: {2, 3}}),
    "SwiGLU": (lambda: gated_by(F.silu), {}, {NORM: {3}, INNER: {3}}),
    "GEGLU": (lambda: gated_by(F.gelu), {"gate_bits": 5}, {NORM: {3}, INNER: {5}}),
    "an unbounded slope": (lambda: gated_by(torch.square), {}, {NORM: {3}, INNER: {2}}),
    "GELU, recompute_linear": (
        lambda: mlp(nn.GELU()),
        {"recompute_linear": True},
        {NORM: {4}},
    ),
    "SwiGLU, recompute_linear": (
        lambda: gated_by(F.silu),
        {"recompute_linear": True},
        {NORM: {4}},
    ),
    "layers without norms, recompute_linear": (
        lambda: (
            with_loss(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU()))),
            torch.randn(32, 16, 64),
        ),
        {"recompute_linear": True},
        {NORM: {3, 4}},  # of the last activation, only the derivative is used
    ),
    "batch norm and ReLU": (
        lambda: convolutions(nn.ReLU()),
        {},
        {(8, 16, 16, 16): {1, 3}},
    ),
    "batch norm, ReLU6 and padding": (
        lambda: convolutions(nn.ReLU6(), nn.ZeroPad2d(1)),
        {},
        {(8, 16, 16, 16): {1, 3}},
    ),
}


def copies_of(model, x, **settings):
    """Return {number of elements: bits of its copies} of the compiled model, and the gradient's error."""
    exact = gradient(model, model, x)
    compiled = fewbit.compile(model, backend="aot_eager", **settings)
    error = relative(gradient(model, compiled, x), exact)
    found = {}
    for row in compiled.partitioner.report.rows:
        if row.bits:
            found.setdefault(torch.Size(row.shape).numel(), set()).add(row.bits)
    return found, error


@pytest.mark.parametrize("name", CASES)
def test_copies(name):
    torch.manual_seed(0)
    make, layers, expected = CASES[name]
    model, x = make()
    found, _ = copies_of(model, x, bits=2, layers=layers)
    assert found == {_count(shape): bits for shape, bits in expected.items()}
    torch._dynamo.reset()
    layers = {key: 8 if key.endswith("bits") else value for key, value in layers.items()}
    _, error = copies_of(model, x, bits=8, layers=layers)
    assert 0 < error < 0.02


def _count(shape):
    return torch.Size(shape).numel()


def test_statistics_of_many_channels_stay_exact():
    """Copies of the deviations of 1,152 channels made gradients of pretrained networks useless."""
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 1152, 1, bias=False), nn.BatchNorm2d(1152), nn.ReLU()
    model, x = with_loss(*layers, nn.Conv2d(1152, 8, 1)), torch.randn(8, 8, 4, 4)
    with torch.no_grad():
        model.layers[0].weight.mul_(10 ** (-4 * torch.rand(1152, 1, 1, 1)))
    _, error = copies_of(model, x, bits=8)
    assert 0 < error < 0.02


INNERS = {
    "sine": lambda x: torch.sin(20 * x),
    "tanh": lambda x: torch.tanh(20 * x),
    "gate": lambda x: torch.sigmoid(20 * x) * torch.tanh(20 * x.flip(-1)),
    "integers": lambda x: (4 * x).to(torch.int32).float() / 4 + x,
    "learned factor": None,
}


@pytest.mark.parametrize("name", INNERS)
def test_bounded_functions_of_large_tensors_have_copies_of_their_own(name):
    def forward(model, x):
        x = model.first(x)
        x = torch.sin(x * model.factor) if name == "learned factor" else INNERS[name](x)
        return model.last(x)

    torch.manual_seed(0)
    factor = nn.Parameter(torch.full((64,), 20.0))
    layers = {"first": nn.Linear(64, 64), "last": nn.Linear(64, 64)}
    model = with_loss(Composed(forward, **layers, factor=factor))
    _, error = copies_of(model, torch.randn(32, 16, 64), bits=8)
    assert 0 < error < 0.02


def test_pooled_embeddings_have_copies():
    model = with_loss(
        Composed(lambda m, i: m.b(m.e(i).sum(1)), e=nn.Embedding(100, 64), b=nn.Linear(64, 64))
    )
    found, _ = copies_of(model, torch.randint(100, (64, 16)), bits=2)
    assert found == {64 * 64: {2}}
