"""Gated units against torch's own act(gate) * up."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import normal
from torch.nn import functional as torch_f

from fewbit.errors import GradientError, InputError
from fewbit.functional.gated import geglu, reglu, swiglu
from fewbit.nn.gated import GEGLU, ReGLU, SwiGLU
from fewbit.runtime.encoding import packed_words
from fewbit.runtime.groups import quantised_bytes
from fewbit.runtime.quantiser import Quantiser

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:Dynamo detected a call to a `functools",
)


def gelu_tanh(gate, up, **options):
    return geglu(gate, up, "tanh", **options)


SAMPLES = {
    "swiglu": (swiglu, torch_f.silu, SwiGLU),
    "geglu": (geglu, torch_f.gelu, GEGLU),
    "geglu tanh": (
        gelu_tanh,
        lambda x: torch_f.gelu(x, approximate="tanh"),
        lambda **options: GEGLU("tanh", **options),
    ),
    "reglu": (reglu, torch_f.relu, ReGLU),
}


@pytest.fixture(params=SAMPLES)
def sample(request):
    return SAMPLES[request.param]


def inputs(device="cpu", dtype=torch.float32, gate=(6, 9, 50), up=None):
    gate = normal(gate, dtype, device, scale=1.0, seed=1)
    up = normal(up or gate.shape, dtype, device, scale=1.0, seed=2)
    return gate.requires_grad_(), up.requires_grad_()


def off(ours, theirs):
    return float((ours - theirs).norm().detach() / theirs.norm().detach())


def check(ours, theirs, tensors, within=0.02):
    """Equal values, and gradients of all that need one within a fraction of their norm."""
    y, expected = ours(), theirs()
    assert y.dtype == expected.dtype and y.stride() == expected.stride()
    assert torch.equal(y, expected)
    grad = normal(y.shape, y.dtype, y.device, scale=1.0, seed=3)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    for a, b, x in zip(
        torch.autograd.grad(y, wanted, grad),
        torch.autograd.grad(expected, wanted, grad),
        wanted,
        strict=True,
    ):
        assert a.dtype == x.dtype and a.shape == x.shape
        assert off(a.double(), b.double()) < within


def kept_by(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = function()
    return y, saved


# -- values and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_against_torch(device, sample, dtype):
    function, act, _ = sample
    gate, up = inputs(device, dtype)
    check(lambda: function(gate, up, bits=8), lambda: act(gate) * up, (gate, up))


@pytest.mark.parametrize(
    "gate, up", [((), ()), ((0, 5), (0, 5)), ((3, 400), (400,)), ((7, 1), (7, 60)), ((1,), (4, 1))]
)
def test_shapes(sample, gate, up):
    function, act, _ = sample
    gate, up = inputs(gate=gate, up=up)
    ours, theirs = function(gate, up, bits=8), act(gate) * up
    assert torch.equal(ours, theirs)
    grads = torch.autograd.grad(ours.sum(), (gate, up))
    expected = torch.autograd.grad(theirs.sum(), (gate, up))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_strides(device, sample):
    """Channels-last, and the halves of one tensor."""
    function, act, _ = sample
    gate, up = inputs(device, gate=(4, 6, 5, 7))
    gate = gate.detach().to(memory_format=torch.channels_last).requires_grad_()
    check(lambda: function(gate, up, bits=8), lambda: act(gate) * up, (gate, up))
    both, _ = inputs(device, gate=(9, 80))
    halves = both.chunk(2, dim=-1)
    check(lambda: function(*halves, bits=8), lambda: act(halves[0]) * halves[1], (both,))


def test_mixed_dtypes_and_autocast(device, sample):
    function, act, _ = sample
    gate, _ = inputs(device, torch.bfloat16)
    _, up = inputs(device)
    check(lambda: function(gate, up, bits=8), lambda: act(gate) * up, (gate, up))
    gate, up = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        check(lambda: function(gate, up, bits=8), lambda: act(gate) * up, (gate, up))


def test_one_tensor_for_both(sample):
    function, act, _ = sample
    x, _ = inputs()
    check(lambda: function(x, x, bits=8), lambda: act(x) * x, (x,))


def test_the_kink_of_relu_is_exact():
    """All elements within a step of 0, where gate's restored sign would be a matter of chance."""
    gate, up = inputs(gate=(300,))
    gate = (gate.detach() * 1e-3).requires_grad_()
    gate.data[0], gate.data[1], gate.data[2] = 100.0, -100.0, 0.0
    (ours,) = torch.autograd.grad(reglu(gate, up, bits=2).sum(), gate)
    assert ((ours != 0) <= (gate > 0)).all()
    up.data.fill_(0.75)
    (ours,) = torch.autograd.grad(reglu(gate, up, bits=2).sum(), gate)
    assert torch.equal(ours, torch.where(gate > 0, 0.75, 0.0))


@given(
    gate=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    dropped=st.integers(0, 3),
    name=st.sampled_from(list(SAMPLES)),
    group_size=st.sampled_from([32, 64, 256]),
    frozen=st.sampled_from([None, 0, 1]),
)
@settings(max_examples=60)
def test_any_configuration(gate, dropped, name, group_size, frozen):
    function, act, _ = SAMPLES[name]
    tensors = inputs(gate=tuple(gate), up=tuple(gate[min(dropped, len(gate)) :]))
    if frozen is not None:
        tensors[frozen].requires_grad_(False)
    y = function(*tensors, bits=8, group_size=group_size)
    expected = act(tensors[0]) * tensors[1]
    assert torch.equal(y, expected)
    wanted = [x for x in tensors if x.requires_grad]
    for a, b in zip(
        torch.autograd.grad(y.sum(), wanted),
        torch.autograd.grad(expected.sum(), wanted),
        strict=True,
    ):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.2)


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, group_size", [(2, 256), (8, 256), (3, 64)])
@pytest.mark.parametrize("needs_gate, needs_up", [(True, True), (True, False), (False, True)])
def test_kept_bytes(device, sample, bits, group_size, needs_gate, needs_up):
    function, _, _ = sample
    gate, up = inputs(device)
    gate.requires_grad_(needs_gate)
    up.requires_grad_(needs_up)
    _, saved = kept_by(lambda: function(gate, up, bits=bits, group_size=group_size))
    one = quantised_bytes(gate.shape, bits, group_size)
    if function is reglu:
        sign = 4 * packed_words(gate.numel(), 1)
        expected = needs_up * one + needs_gate * (one + sign)
    else:
        expected = one + needs_gate * one
    assert sum(x.nbytes for x in saved) == expected


def test_nothing_is_kept_without_a_gradient(sample):
    function, act, module = sample
    gate, up = inputs()
    for run in (lambda: function(gate.detach(), up.detach()), lambda: no_grad(function, gate, up)):
        y, saved = kept_by(run)
        assert not saved and not y.requires_grad
    evaluated = module(bits=2).eval()
    theirs, expected = kept_by(lambda: act(gate) * up)
    ours, saved = kept_by(lambda: evaluated(gate, up))
    assert torch.equal(ours, theirs)
    assert [x.shape for x in saved] == [x.shape for x in expected]


def no_grad(function, *tensors):
    with torch.no_grad():
        return function(*tensors)


@pytest.mark.fast(1)
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition"])
def test_compiled(device, sample, backend):
    torch.compiler.reset()
    function, act, _ = sample
    gate, up = inputs(device)

    def layer(gate, up):
        return function(gate * 1.0, up + 0.0, bits=8)

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    y, saved = kept_by(lambda: compiled(gate, up))
    torch.testing.assert_close(y, act(gate) * up)
    expected = 2 * quantised_bytes(gate.shape, 8) + (4 * packed_words(gate.numel(), 1)) * (
        function is reglu
    )
    assert sum(x.nbytes for x in saved) == expected
    grad = normal(y.shape, device=device, seed=3)
    grads = torch.autograd.grad(y, (gate, up), grad)
    theirs = torch.autograd.grad(act(gate) * up, (gate, up), grad)
    assert all(off(a, b) < 0.02 for a, b in zip(grads, theirs, strict=True))


# -- bias ------------------------------------------------------------------------------------------

SMOOTH = {
    "swiglu": lambda x: x * torch.sigmoid(x),
    "geglu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "geglu tanh": lambda x: (
        x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    ),
}


def variance(x, bits):
    """Of the rounding of each element of one group."""
    _, ranges = Quantiser(bits).keep(x[None]).tensors
    step = float(ranges[0, 1]) / (2**bits - 1)
    part = (x.double() - float(ranges[0, 0])) / step % 1
    return part * (1 - part) * step**2


def draws(function, gate, up, grad, bits, count):
    """`count` independent gradients: samples of 64 features have groups of their own."""
    tensors = [x.expand(count, -1).clone().requires_grad_() for x in (gate, up)]
    y = function(*tensors, bits=bits)
    return [x.double() for x in torch.autograd.grad(y, tensors, grad.expand_as(y))]


def mean_square(drawn, expected):
    """Of the mean's distance to what is expected, in standard errors: about 1 if that is right."""
    error = drawn.std(0) / math.sqrt(len(drawn))
    return float((((drawn.mean(0) - expected) / error)[error > 0] ** 2).mean())


@pytest.mark.parametrize("name", SMOOTH)
def test_bias_is_as_the_formula_says(name):
    torch.manual_seed(3)
    act = SMOOTH[name]
    gate, up, grad = (normal((64,), scale=1.0, seed=seed) for seed in (1, 2, 3))
    x, z, g = (each.double() for each in (gate, up, grad))

    def derivative(function):
        return lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]

    first = derivative(act)
    second = derivative(first)
    third = derivative(second)
    # So many bits that the next order is below the sampling error, and so few that the bias is not.
    of_gate, _ = draws(SAMPLES[name][0], gate, up, grad, 5, 20000)
    exact, bias = g * z * first(x), g * z * third(x) * variance(gate, 5) / 2
    assert mean_square(of_gate, exact + bias) < 2 < 15 < mean_square(of_gate, exact)
    _, of_up = draws(SAMPLES[name][0], gate, up, grad, 6, 20000)
    exact, bias = g * act(x), g * second(x) * variance(gate, 6) / 2
    assert mean_square(of_up, exact + bias) < 2 < 100 < mean_square(of_up, exact)


def bias_of(drawn, exact):
    """||E[grad^] - grad|| / ||grad||; what sampling adds to the square of the distance is taken off."""
    exact = exact.double()
    sampling = drawn.var(0).sum() / len(drawn)
    distance = (drawn.mean(0) - exact).square().sum()
    return float((distance - sampling).clamp(min=0).sqrt() / exact.norm())


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "name, bits, of_gate, of_up",
    [
        ("swiglu", 2, 0.07, 0.21),
        ("swiglu", 3, 0.02, 0.04),
        ("swiglu", 4, 0.004, 0.008),
        ("geglu", 2, 0.09, 0.25),
        ("geglu", 3, 0.043, 0.048),
        ("geglu", 4, 0.01, 0.01),
        ("geglu tanh", 2, 0.09, 0.25),
        ("geglu tanh", 3, 0.043, 0.047),
        ("geglu tanh", 4, 0.01, 0.01),
    ],
)
def test_size_of_the_bias(name, bits, of_gate, of_up):
    """Of normal gate and up, 256 elements, the median over 24 of those."""
    torch.manual_seed(4)
    function, act, _ = SAMPLES[name]
    sizes = []
    for seed in range(24):
        gate, up, grad = (normal((256,), scale=1.0, seed=3 * seed + i) for i in range(3))
        tensors = [x.clone().requires_grad_() for x in (gate, up)]
        exact = torch.autograd.grad(act(tensors[0]) * tensors[1], tensors, grad)
        drawn = draws(function, gate, up, grad, bits, 1000)
        sizes.append([bias_of(a, b) for a, b in zip(drawn, exact, strict=True)])
    found = torch.tensor(sizes).median(0).values / torch.tensor([of_gate, of_up])
    assert ((found > 0.6) & (found < 1.4)).all()


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(
    "of_gate, of_up", [(0.0, 0.0), (0.0, 10.0), (0.0, 1000.0), (10.0, 0.0), (1000.0, 1000.0)]
)
def test_reglu_is_exact_in_expectation(bits, of_gate, of_up):
    torch.manual_seed(5)
    gate, up, grad = (normal((64,), scale=1.0, seed=seed) for seed in (1, 2, 3))
    gate, up = gate + of_gate, up + of_up
    drawn_gate, drawn_up = draws(reglu, gate, up, grad, bits, 20000)
    x, z, g = (each.double() for each in (gate, up, grad))
    assert mean_square(drawn_gate, g * z * (x > 0)) < 2
    assert mean_square(drawn_up, g * x.relu()) < 2


# -- errors and modules ----------------------------------------------------------------------------


def test_errors(sample):
    function, _, module = sample
    gate, up = inputs()
    for options in ({"bits": 9}, {"bits": 0}, {"group_size": 100}):
        with pytest.raises(InputError):
            function(gate, up, **options)
        with pytest.raises(InputError):
            module(**options)
    for make in (lambda: geglu(gate, up, "sigmoid"), lambda: GEGLU("sigmoid")):
        with pytest.raises(InputError, match="none or tanh"):
            make()
    with pytest.raises(RuntimeError):
        function(gate, up[:5])


def test_second_derivatives_are_refused(sample):
    gate, up = inputs()
    (grad,) = torch.autograd.grad(sample[0](gate, up).square().sum(), gate, create_graph=True)
    with pytest.raises((RuntimeError, GradientError)):
        grad.sum().backward()


def test_transforms_see_torchs_own(sample):
    function, act, _ = sample
    gate, up = (x.detach() for x in inputs(gate=(3, 5)))
    ours = torch.func.grad(lambda x: function(x, up).sum())(gate)
    theirs = torch.func.grad(lambda x: (act(x) * up).sum())(gate)
    assert torch.equal(ours, theirs)


def test_modules(device, sample):
    _, act, module = sample
    gate, up = inputs(device)
    layer = module(bits=8, group_size=64).to(device)
    check(lambda: layer(gate, up), lambda: act(gate) * up, (gate, up))
    assert not list(layer.parameters()) and not layer.state_dict()
    assert "bits=8, group_size=64" in repr(layer)
