"""Linear, convolution and normalisation layers that keep quantised inputs, against torch.nn."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import LAYERS, LINEAR, NORMS, Layer, fresh, gradients, ids, relative, saved_by
from samples import normal
from torch import nn

import fewbit.functional as F
import fewbit.nn
from fewbit.errors import GradientError, InputError
from fewbit.runtime.groups import quantised_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel", "ignore::DeprecationWarning:torch.*"
)
BITS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_against_torch(device, layer):
    """The same output and buffers; at 8 bits gradients within 2 %, exact where nothing kept is needed."""
    ours, theirs = layer.pair(8, device)
    x = layer.input(device)
    y, (grad_x, *grads) = gradients(ours, x)
    expected, (exact_x, *exact) = gradients(theirs, x)
    assert torch.equal(y, expected) and y.stride() == expected.stride()
    if layer.linear:
        torch.testing.assert_close(grad_x, exact_x, rtol=1e-5, atol=1e-5)
    assert relative(grad_x, exact_x) < 0.02 and grad_x.stride() == exact_x.stride()
    for (name, _), grad, wanted in zip(theirs.named_parameters(), grads, exact, strict=True):
        assert relative(grad, wanted) < (1e-5 if name == "bias" else 0.02), name
        assert grad.dtype == wanted.dtype and grad.shape == wanted.shape
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("layer", **ids(LAYERS))
@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_what_is_promised(device, layer, bits):
    module, _ = layer.pair(bits, device)
    y, saved = saved_by(module, layer.input(device).requires_grad_())
    # An empty tensor is what torch's own batch norm keeps for a library that is not used.
    assert sum(tensor.nbytes for tensor in saved) == layer.kept_bytes(bits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_dtypes(device, layer, dtype):
    ours, theirs = layer.pair(8, device, dtype)
    x = layer.input(device, dtype)
    y, grads = gradients(ours, x)
    expected, exact = gradients(theirs, x)
    assert torch.equal(y, expected)
    limit = 0.02 if dtype == torch.float64 else 0.06  # 16-bit sums differ by their own rounding
    for grad, wanted in zip(grads, exact, strict=True):
        assert grad.dtype == wanted.dtype and relative(grad, wanted) < limit


@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_autocast(device, layer):
    """Output and gradients in the dtypes of torch's own; no cast weight is kept."""
    ours, theirs = layer.pair(8, device)
    x = layer.input(device)
    with torch.autocast(device, torch.bfloat16):
        _, saved = saved_by(fresh(ours), x.clone().requires_grad_())
        assert sum(tensor.nbytes for tensor in saved) <= layer.kept_bytes(8)
        y, grads = gradients(ours, x)
        expected, exact = gradients(theirs, x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    for grad, wanted in zip(grads, exact, strict=True):
        assert grad.dtype == wanted.dtype and relative(grad, wanted) < 0.06


@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_nothing_is_kept_that_no_gradient_needs(device, layer):
    module, theirs = layer.pair(2, device)
    x = layer.input(device)
    module.requires_grad_(False)
    if layer.linear:  # the input's gradient needs the weight alone
        y, saved = saved_by(module, x.clone().requires_grad_())
        assert not saved and y.requires_grad
    _, saved = saved_by(module, x)
    assert not saved
    with torch.no_grad():
        assert saved_by(fresh(module).requires_grad_(True), x)[1] == []
    if getattr(module, "bias", None) is not None:
        module.bias.requires_grad_()
        y, saved = saved_by(module, x)
        assert not saved
        # (torch's own crashes for some layouts if the input's gradient is not asked for.)
        x.requires_grad_()
        expected = torch.autograd.grad(theirs(x).sum(), (theirs.bias, x))[0]
        torch.testing.assert_close(torch.autograd.grad(y.sum(), module.bias)[0], expected)


@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_evaluation_mode_is_torchs_own(device, layer):
    ours, theirs = layer.pair(1, device)
    ours, theirs = ours.eval(), theirs.eval()
    x = layer.input(device)
    y, grads = gradients(ours, x)
    expected, exact = gradients(theirs, x)
    assert torch.equal(y, expected)
    for grad, wanted in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad, wanted)


def test_a_frozen_batch_norm_in_evaluation_mode_keeps_nothing(device):
    module = fewbit.nn.BatchNorm2d(3).to(device).eval().requires_grad_(False)
    theirs = nn.BatchNorm2d(3).to(device).eval().requires_grad_(False)
    for each in (module, theirs):
        each.running_var.copy_(torch.tensor([0.5, 1.0, 4.0]))
    x = normal((2, 3, 4, 5), device=device)
    (y, (grad,)), (expected, (exact,)) = gradients(module, x), gradients(theirs, x)
    assert torch.equal(y, expected)
    torch.testing.assert_close(grad, exact)
    _, saved = saved_by(module, x.requires_grad_())
    assert {each.data_ptr() for each in saved} <= {each.data_ptr() for each in module.buffers()}


@pytest.mark.parametrize(
    "layer", **ids([layer for layer in LAYERS if layer.options.get("momentum", 0.1) is not None])
)
def test_compiled(layer):
    """Traced whole; the compiled forward keeps the quantised input and what torch's own vectors take."""
    torch.compiler.reset()
    module, _ = layer.pair(3)
    x = layer.input()
    eager = gradients(fresh(module), x)[0]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")
    y, saved = saved_by(compiled, x.clone().requires_grad_())
    torch.testing.assert_close(y, eager, rtol=1e-4, atol=1e-4)
    codes = [tensor for tensor in saved if tensor.dtype == torch.int32]
    ranges = [tensor for tensor in saved if tensor.dtype == torch.bfloat16]
    kept = sum(tensor.nbytes for tensor in codes + ranges)
    assert kept == quantised_bytes(layer.kept_shape or layer.shape, 3)
    others = [t for t in saved if t.dtype not in (torch.int32, torch.bfloat16)]
    # Vectors, at most twice what eager mode keeps: the partitioner may keep what they are made from too.
    assert sum(tensor.nbytes for tensor in others) <= 2 * 4 * layer.vectors + 16
    y.sum().backward()
    assert all(each.grad is not None for each in module.parameters())


@pytest.mark.parametrize("layer", **ids(LAYERS))
def test_a_second_derivative_is_refused(device, layer):
    """Also where the gradient that comes in is a constant, and torch would take it for zero."""
    for loss in (lambda y: y.square().sum(), lambda y: y.sum()):
        module, _ = layer.pair(8, device)
        x = layer.input(device).requires_grad_()
        (grad,) = torch.autograd.grad(loss(module(x)), x, create_graph=True)
        for leaf in (x, *module.parameters()):
            with pytest.raises(GradientError, match="no second derivative"):
                torch.autograd.grad(grad.sum(), leaf, allow_unused=True, retain_graph=True)


@pytest.mark.parametrize("layer", **ids(LINEAR[:1] + NORMS[:1]))
def test_func_transforms_see_torchs_own(layer):
    ours, theirs = layer.pair(1)
    x = layer.input()

    def gradient(module):
        return torch.func.grad(lambda x: torch.func.functional_call(module, {}, (x,)).sin().sum())(
            x
        )

    torch.testing.assert_close(gradient(ours), gradient(theirs))


@pytest.mark.parametrize("options, message", [
    ({"bits": 9}, "expected a whole number from 1 to 8 for bits, got 9"),
    ({"group_size": 100}, "expected a multiple of 32 from 32 to 65536 for group_size, got 100"),
])  # fmt: skip
def test_bad_settings(options, message):
    for name in ("Linear", "LayerNorm", "BatchNorm2d"):
        arguments = (3, 4) if name == "Linear" else (3,)
        with pytest.raises(InputError, match=message):
            getattr(fewbit.nn, name)(*arguments, **options)
    with pytest.raises(InputError, match=message):
        F.linear(torch.ones(2, 3), torch.ones(4, 3), **options)
    with pytest.raises(InputError, match="expected 1 or 2 for copies, got 3"):
        fewbit.nn.LayerNorm(3, copies=3)


def test_what_torch_refuses_torch_refuses():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        fewbit.nn.Linear(3, 4)(torch.ones(2, 5))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fewbit.nn.BatchNorm1d(4)(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="padding='same' is not supported for strided"):
        F.conv1d(torch.ones(1, 1, 9), torch.ones(1, 1, 3, requires_grad=True), None, 2, "same")
    with pytest.raises(ValueError, match="expected 4D input"):
        fewbit.nn.BatchNorm2d(4)(torch.ones(1, 4))


# -- fuzzed -------------------------------------------------------------------------------------------------


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    transposed = draw(st.booleans())
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    stride = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    options = {"stride": stride, "dilation": dilation, "groups": groups}
    options["padding"] = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    options["bias"] = draw(st.booleans())
    channels = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    size = tuple(draw(st.integers(5, 7)) for _ in range(dims))
    batch = (draw(st.integers(1, 3)),) if draw(st.booleans()) else ()
    name = f"Conv{'Transpose' * transposed}{dims}d"
    last = dims == 2 and bool(batch) and draw(st.booleans())
    return Layer(
        name,
        (*channels, kernel),
        (*batch, channels[0], *size),
        options,
        format=LAST if last else None,
    )


LAST = torch.channels_last


@settings(max_examples=60)
@given(convolutions())
def test_any_convolution(layer):
    ours, theirs = layer.pair(8)
    x = layer.input()
    y, grads = gradients(ours, x)
    expected, exact = gradients(theirs, x)
    assert torch.equal(y, expected)
    for grad, wanted in zip(grads, exact, strict=True):
        assert (grad.double() - wanted.double()).norm() <= 0.02 * wanted.double().norm() + 0.02


# -- exact in expectation -------------------------------------------------------------------------------------


def means(module, x, draws):
    """(mean, standard error) over draws of every gradient, in float64."""
    sums, squares = None, None
    for _ in range(draws):
        _, grads = gradients(module, x)
        grads = [grad.double() for grad in grads]
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
        more = [grad.square() for grad in grads]
        squares = more if squares is None else [a + b for a, b in zip(squares, more, strict=True)]
    mean = [each / draws for each in sums]
    variance = [(s / draws - m.square()).clamp_min(0) for s, m in zip(squares, mean, strict=True)]
    return mean, [(each / (draws - 1)).sqrt() for each in variance]


def pooled_z(mean, error, exact, least, independent=None) -> float:
    """Sum of squared z over entries, itself as a z score: entries of no variance must agree.

    independent: how many of them are, if not all: entries that share a sum move together.
    """
    known = error > least
    off = (mean - exact.double()).abs()
    assert (off[~known] <= 50 * least).all()
    z = (off[known] / error[known]).square()
    # A t statistic's square has mean v / (v - 2); with the draws below that is within 2 % of 1.
    count = len(z) if independent is None else min(independent, len(z))
    return float((z.mean() - 1) / math.sqrt(2 / count)) if len(z) else 0.0


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
@pytest.mark.parametrize("layer", **ids([LINEAR[0], LINEAR[3], LINEAR[6], LINEAR[14]]))
def test_linear_layers_are_exact_in_expectation(layer, offset):
    ours, theirs = layer.pair(2)
    x = layer.input(offset=offset)
    mean, error = means(ours.double(), x.double(), 150)
    exact = gradients(theirs.double(), x.double())[1]
    scale = max(float(grad.abs().max()) for grad in exact)
    for a, b, c in zip(mean, error, exact, strict=True):
        assert abs(pooled_z(a, b, c, 1e-6 * scale)) < 5


@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize("layer", **ids([NORMS[0], NORMS[4], NORMS[6], NORMS[11]]))
def test_norms_with_two_copies_are_exact_in_expectation(layer, offset):
    ours, theirs = layer.pair(2, copies=2)
    x = layer.input(offset=offset)
    mean, error = means(ours.double(), x.double(), 200)
    exact = gradients(theirs.double(), x.double())[1]
    for a, b, c in zip(mean, error, exact, strict=True):
        assert abs(pooled_z(a, b, c, 1e-6 * float(c.abs().max()), layer.vectors)) < 5


def test_the_bias_of_a_norm_with_one_copy():
    """-g Var / (N s), elementwise, and nothing else (long version of ActNN, appendix B.2)."""
    layer = Layer("LayerNorm", (96,), (5, 96), linear=False)
    ours, theirs = layer.pair(2)
    x = layer.input()
    mean, error = means(ours.double(), x.double(), 600)
    exact = gradients(theirs.double(), x.double())[1]
    g = normal(x.shape, torch.float64, scale=1.0, seed=7) * theirs.weight.detach().double()
    x = x.double()
    deviation = (x.var(-1, unbiased=False, keepdim=True) + theirs.eps).sqrt()
    normalised = (x - x.mean(-1, keepdim=True)) / deviation
    bias = -g * rounding_variance(normalised, 2) / (96 * deviation)
    assert abs(pooled_z(mean[0], error[0], exact[0] + bias, 1e-9)) < 5
    assert abs(pooled_z(mean[0], error[0], exact[0], 1e-9)) > 5  # it is seen
    assert bias.norm() / exact[0].norm() < 0.02  # and small


def rounding_variance(x, bits):
    """Var[x^] of each element, for rows that are one group: f (1 - f) step^2."""
    top = 2**bits - 1
    low = x.amin(-1, keepdim=True).float()
    minimum = toward_bfloat16(low, -1)
    extent = toward_bfloat16(x.amax(-1, keepdim=True).float() - minimum, 1)
    step = extent.double() / top
    fraction = ((x - minimum.double()) / step).frac()
    return fraction * (1 - fraction) * step**2


def toward_bfloat16(x, direction):
    near = x.bfloat16()
    wrong = (near.float() - x) * direction < 0
    limit = torch.tensor(direction * math.inf, dtype=torch.bfloat16)
    return torch.where(wrong, near.nextafter(limit), near).float()
