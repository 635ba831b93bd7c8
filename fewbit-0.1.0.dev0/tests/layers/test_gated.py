"""Gated units against torch's own act(gate) * up."""

import copy
import math

import pytest
import torch
from expectation import bias_of, mean_square, variance
from layers import Called, bytes_by, gradients, relative
from samples import normal
from torch.nn import functional as torch_f

import fewbit.nn
from fewbit.functional.products import geglu, glu, reglu, swiglu
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.format.groups import quantized_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:Dynamo detected a call to a `functools",
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


class Units(torch.nn.Module):
    """GLU as a module, and as a function that the forward calls."""

    def __init__(self, is_module, dim):
        super().__init__()
        self.first, self.unit, self.dim = torch.nn.Conv1d(8, 12, 1), torch.nn.GLU(dim), dim
        self.is_module = is_module

    def forward(self, x):
        x = self.first(x)
        return self.unit(x) if self.is_module else torch_f.glu(x, self.dim)


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("dim", [1, -1])
def test_a_glu_in_a_model(is_module, dim):
    torch.manual_seed(0)
    exact, x = Units(is_module, dim), normal((4, 8, 50), scale=1.0)
    few = copy.deepcopy(exact)
    for bits, most in ((2, 0.4), (4, 0.12), (8, 0.01)):
        report = fewbit.compress_(few, bits, verbose=False).report
        assert ("unit" in [row.path for row in report.converted]) and not report.left_alone[1:]
        (y, ours), (expected, theirs) = gradients(few, x), gradients(exact, x)
        assert torch.equal(y, expected) and 0 < relative(ours[0], theirs[0]) < most
        inputs = quantized_bytes(x.shape, bits) + quantized_bytes((4, 12, 50), bits)
        assert bytes_by(few, x.detach().requires_grad_(False)) == inputs
        fewbit.restore_(few)
    assert type(few.unit) is torch.nn.GLU


@pytest.mark.parametrize(("shape", "dim"), [((4, 5), -1), ((4, 6), 2), ((), 0)])
def test_glu_refuses_what_torch_refuses(shape, dim):
    x = torch.ones(shape, requires_grad=True)
    for function in (torch_f.glu, glu):
        with pytest.raises((RuntimeError, IndexError)):
            function(x, dim)


# -- saved tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, group_size", [(2, 256), (8, 256), (3, 64)])
@pytest.mark.parametrize("needs_gate, needs_up", [(True, True), (True, False), (False, True)])
def test_kept_bytes(device, sample, bits, group_size, needs_gate, needs_up):
    function, _ = sample
    gate, up = inputs(device)
    gate.requires_grad_(needs_gate)
    up.requires_grad_(needs_up)
    found = bytes_by(lambda: function(gate, up, bits=bits, group_size=group_size))
    one = quantized_bytes(gate.shape, bits, group_size)
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
@pytest.mark.parametrize(
    ("kind", "bits"), [("uniform", (5, 6)), ("rotated", (4, 5)), ("unbiased", (4, 5))]
)
@pytest.mark.parametrize("name", SMOOTH)
def test_bias_is_as_the_formula_says(name, kind, bits):
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


SIZES = {  # {kind of copies: {function: sizes of the biases of gate and up at 2, 3 and 4 bits}}
    "uniform": {
        "swiglu": [(0.07, 0.21), (0.02, 0.04), (0.004, 0.008)],
        "geglu": [(0.09, 0.25), (0.043, 0.048), (0.01, 0.01)],
        "geglu tanh": [(0.09, 0.25), (0.043, 0.047), (0.01, 0.01)],
    },
    "rotated": {
        "swiglu": [(0.022, 0.041), (0.0063, 0.011), (0.0017, 0.003)],
        "geglu": [(0.047, 0.05), (0.0135, 0.014), (0.0037, 0.0038)],
        "geglu tanh": [(0.047, 0.05), (0.0135, 0.014), (0.0037, 0.0038)],
    },
    "unbiased": {
        "swiglu": [(0.038, 0.07), (0.0084, 0.0145), (0.0018, 0.0032)],
        "geglu": [(0.076, 0.086), (0.017, 0.018), (0.0038, 0.0041)],
        "geglu tanh": [(0.076, 0.086), (0.017, 0.018), (0.0038, 0.0041)],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"), [("uniform", 1000), ("rotated", 2000), ("unbiased", 2000)]
)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("name", SMOOTH)
def test_size_of_the_bias(name, bits, kind, count):
    """Gate and up are normal with 256 elements. The result is the median over 24 draws of these."""
    torch.manual_seed(4)
    function, act = SAMPLES[name]
    sizes = []
    for seed in range(24):
        gate, up, grad = (normal((256,), scale=1.0, seed=3 * seed + i) for i in range(3))
        tensors = [x.clone().requires_grad_() for x in (gate, up)]
        exact = torch.autograd.grad(act(tensors[0]) * tensors[1], tensors, grad)
        drawn = draws(function, gate, up, grad, bits, count, kind)
        sizes.append([bias_of(a, b) for a, b in zip(drawn, exact, strict=True)])
    found = torch.tensor(sizes).median(0).values / torch.tensor(SIZES[kind][name][bits - 2])
    assert ((found > 0.8) & (found < 1.2)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "count"),
    [("uniform", 64, 20000), ("rotated", 256, 5000), ("unbiased", 256, 5000)],
)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(
    "of_gate, of_up", [(0.0, 0.0), (0.0, 10.0), (0.0, 1000.0), (10.0, 0.0), (1000.0, 1000.0)]
)
def test_reglu_is_exact_in_expectation(of_gate, of_up, bits, kind, size, count):
    """In groups of 64 elements, many draws show the small bias of rotated copies (docs/concepts/quantizer.md)."""
    torch.manual_seed(5)
    gate, up, grad = (normal((size,), scale=1.0, seed=seed) for seed in (1, 2, 3))
    gate, up = gate + of_gate, up + of_up
    drawn_gate, drawn_up = draws(reglu, gate, up, grad, bits, count, kind)
    x, z, g = (tensor.double() for tensor in (gate, up, grad))
    assert mean_square(drawn_gate, g * z * (x > 0)) < 2
    assert mean_square(drawn_up, g * x.relu()) < 2


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_mul_by_a_number_is_torchs(needs_gradient):
    x = torch.randn(8, 64, requires_grad=needs_gradient)
    assert torch.equal(fewbit.functional.mul(x, 2.0), torch.mul(x, 2.0))
    with pytest.raises(fewbit.InputError, match=r"expected a torch\.Tensor, got \[1\.0\]"):
        fewbit.functional.mul(x, [1.0])
