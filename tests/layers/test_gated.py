"""Gated units against torch's own act(gate) * up."""

import math

import pytest
import torch
from expectation import mean_square, variance
from layers import Called, bytes_by, gradients, relative
from quantized import quantized_bytes
from samples import normal
from torch import nn
from torch.nn import functional as torch_f
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import fewbit
from fewbit.functional.products import geglu, reglu, swiglu
from fewbit.runtime.format.encoding import packed_words

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
)


def gelu_tanh(gate, up, **options):
    return geglu(gate, up, "tanh", **options)


SAMPLES = {
    "swiglu": (swiglu, torch_f.silu),
    "geglu": (geglu, torch_f.gelu),
    "geglu tanh": (gelu_tanh, lambda x: torch_f.gelu(x, approximate="tanh")),
    "reglu": (reglu, torch_f.relu),
}


@pytest.fixture(params=SAMPLES)
def sample(request):
    return SAMPLES[request.param]


def draws(function, gate, up, grad, bits, count, kind=None):
    """Return `count` independent gradients of gate and up, whose samples of 64 features have groups of their own."""
    tensors = [x.expand(count, -1).clone().requires_grad_() for x in (gate, up)]
    y = function(*tensors, bits=bits, quantizer=kind)
    return [x.double() for x in torch.autograd.grad(y, tensors, grad.expand_as(y))]


def inputs(device="cpu", dtype=torch.float32, gate=(6, 9, 50), up=None):
    gate = normal(gate, dtype, device, scale=1.0, seed=1)
    up = normal(up or gate.shape, dtype, device, scale=1.0, seed=2)
    return gate.requires_grad_(), up.requires_grad_()


# -- values and gradients --------------------------------------------------------------------------


def test_mixed_dtypes(device, sample):
    function, act = sample
    gate, up = inputs(device, torch.bfloat16)[0], inputs(device)[1]
    (y, grads), (expected, exact) = (
        gradients(Called(call), gate, up)
        for call in (lambda *x: function(*x, bits=8), lambda gate, up: act(gate) * up)
    )
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    for grad, wanted in zip(grads, exact, strict=True):
        assert grad.dtype == wanted.dtype and relative(grad, wanted) < 0.02


def test_the_kink_of_relu_is_exact():
    """All elements are within a step of 0, so the dequantized gate would have a random sign."""
    gate, up = inputs(gate=(300,))
    gate = (gate.detach() * 1e-3).requires_grad_()
    gate.data[0], gate.data[1], gate.data[2] = 100.0, -100.0, 0.0
    (ours,) = torch.autograd.grad(reglu(gate, up, bits=2).sum(), gate)
    assert ((ours != 0) <= (gate > 0)).all()
    up.data.fill_(0.75)
    (ours,) = torch.autograd.grad(reglu(gate, up, bits=2).sum(), gate)
    assert torch.equal(ours, torch.where(gate > 0, 0.75, 0.0))


# -- saved tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("needs_gate, needs_up", [(True, True), (True, False), (False, True)])
def test_kept_bytes(device, sample, needs_gate, needs_up):
    function, _ = sample
    gate, up = inputs(device)
    gate.requires_grad_(needs_gate)
    up.requires_grad_(needs_up)
    found = bytes_by(lambda: function(gate, up, bits=3, group_size=64))
    one = quantized_bytes(gate.shape, 3, 64)
    if function is reglu:
        sign = 4 * packed_words(gate.numel(), 1)
        expected = needs_up * one + needs_gate * (one + sign)
    else:
        expected = one + needs_gate * one
    assert found == expected


# -- bias ------------------------------------------------------------------------------------------

SMOOTH = {
    "swiglu": lambda x: x * torch.sigmoid(x),
    "geglu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "geglu tanh": lambda x: (
        x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bits"), [("uniform", (5, 6)), ("rotated", (4, 5))])
@pytest.mark.parametrize("name", SMOOTH)
def test_bias_is_as_the_formula_says(name, kind, bits, monkeypatch):
    # Equal rows would be restored exactly from the means of channels.
    monkeypatch.setattr("fewbit.runtime.format.channels.LEAST_ROWS", 10**9)
    torch.manual_seed(3)
    act = SMOOTH[name]
    gate, up, grad = (normal((64,), scale=1.0, seed=seed) for seed in (1, 2, 3))
    x, z, g = (tensor.double() for tensor in (gate, up, grad))

    def derivative(function):
        return lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]

    first = derivative(act)
    second = derivative(first)
    third = derivative(second)
    # So many bits that the next order is below the sampling error, and so few that the bias is not.
    of_gate, _ = draws(SAMPLES[name][0], gate, up, grad, bits[0], 20000, kind)
    exact, bias = g * z * first(x), g * z * third(x) * variance(gate, bits[0], kind) / 2
    assert mean_square(of_gate, exact + bias) < 2 < 15 < mean_square(of_gate, exact)
    _, of_up = draws(SAMPLES[name][0], gate, up, grad, bits[1], 20000, kind)
    exact, bias = g * act(x), g * second(x) * variance(gate, bits[1], kind) / 2
    assert mean_square(of_up, exact + bias) < 2 < 100 < mean_square(of_up, exact)


# -- the layer after a gated unit ------------------------------------------------------------------


def unit(activation, after=None):
    """Return a gated unit of transformers: three linear layers, and perhaps a module before the last one."""
    config = LlamaConfig(hidden_size=32, intermediate_size=96, hidden_act=activation)
    torch.manual_seed(0)
    mlp = LlamaMLP(config)
    if after is not None:
        mlp.down_proj = nn.Sequential(after, mlp.down_proj)
    return mlp


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("bits", [2, 8])
def test_the_next_layer_computes_the_product_from_the_copies(activation, bits):
    """It saves nothing of its own, and its weight's gradient is near torch's."""
    model, x = unit(activation), normal((3, 70, 32), scale=1.0).requires_grad_()
    x = x * 4
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    fewbit.compress_(model, bits, verbose=False)
    copies = quantized_bytes((3, 70, 32), bits)
    copies += 2 * quantized_bytes((3, 70, 96), min(bits + 1, 8))
    masks = 4 * packed_words(3 * 70 * 96, 1) if activation == "relu" else 0
    assert fewbit.saved_bytes(model, x).total == copies + masks
    loss = model(x).square().sum()
    found = torch.autograd.grad(loss, list(model.parameters()))
    limit = {2: 0.7, 8: 0.02}[bits]
    assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) < limit


def test_the_product_is_exact_in_expectation_with_relu():
    """With SiLU it is not, because the mean of silu(gate^) is not silu(gate)."""
    biases = {}
    for activation in ("relu", "silu"):
        model, x = unit(activation), normal((1, 64, 32), scale=8.0)
        weight = model.down_proj.weight
        (exact,) = torch.autograd.grad(model(x).sum(), weight)
        fewbit.compress_(model, 1, verbose=False)
        draws = [torch.autograd.grad(model(x).sum(), weight)[0] - exact for _ in range(120)]
        mean = sum(draws) / len(draws)
        sampling = sum(d.square().sum() for d in draws) / len(draws) ** 2
        biases[activation] = ((mean.square().sum() - sampling) / exact.square().sum()).item()
    assert abs(biases["relu"]) < 2e-3 < biases["silu"]


@pytest.mark.parametrize("after", [nn.Dropout(0.5), nn.LayerNorm(96), nn.ReLU()], ids=str)
def test_what_follows_a_product_saves_a_mask_at_most_or_its_own_copy(after):
    model, x = unit("silu", after), normal((3, 70, 32), scale=1.0)
    fewbit.compress_(model, 2, verbose=False)
    saved = fewbit.saved_bytes(model, x).by_kind()["packed"]
    # A norm saves its own copy with 1 bit more; dropout and ReLU save a mask, with which the product is computed again.
    of_product = 96 * 3 if isinstance(after, nn.LayerNorm) else 96
    assert saved == 4 * 3 * 70 * (32 * 3 + 96 * 3 + 96 * 3 + of_product) // 32


def test_a_product_that_is_written_to_is_not_computed_again():
    model, x = unit("silu"), normal((3, 70, 32), scale=1.0)
    fewbit.compress_(model, 8, verbose=False)
    handle = model.down_proj.register_forward_pre_hook(lambda module, given: (given[0].mul_(3.0),))
    (found,) = torch.autograd.grad(model(x).sum(), model.down_proj.weight)
    handle.remove()
    (expected,) = torch.autograd.grad(model(x).sum(), model.down_proj.weight)
    assert relative(found, 3 * expected) < 0.02
