"""Every layer of fewbit.nn against torch.nn: values, gradients, saved bytes, modes, transforms and refusals."""

import math

import pytest
import torch
from expectation import covariance, drawn, pooled_z, signed_z
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import (
    DROPOUTS,
    EVERY,
    GATES,
    LAST,
    LAST_3D,
    LINEAR,
    NORMS,
    POOLINGS,
    ROUNDED,
    Layer,
    bytes_by,
    first,
    fresh,
    gradients,
    ids,
    relative,
    saved_by,
)
from samples import DTYPES, name_of, normal, same, same_sums

import fewbit.functional as F
import fewbit.nn
from fewbit.errors import InputError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel",
    "ignore:Mismatch dtype between input and weight",
    "ignore:input's size at dim=0",
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*isinstance.*treespec",
)
BITS = (1, 2, 3, 4, 8)
SAMPLES = [*LINEAR, *NORMS, *ROUNDED, *DROPOUTS, *POOLINGS]
every_layer = pytest.mark.parametrize("layer", **ids(EVERY))


def seeded(function, *arguments):
    """Call the function from a fixed random state, so that dropouts draw the same mask."""
    torch.manual_seed(3)
    return function(*arguments)


def outcome(function, *arguments):
    """Return the seeded function's result, or the type of the error that it raises."""
    try:
        return seeded(function, *arguments)
    except (RuntimeError, ValueError, IndexError) as refusal:
        return type(refusal)


def check(layer, ours, theirs, inputs, limits=None):
    """Compare output to the bit, gradients within the layer's limits, and buffers."""
    found, expected = outcome(gradients, ours, *inputs), outcome(gradients, theirs, *inputs)
    if isinstance(expected, type):
        assert found == expected
        return
    (y, grads), (their_y, exact) = found, expected
    assert same_sums(y, their_y) and y.stride() == their_y.stride()
    limits = limits or layer.limits(theirs, y.dtype)
    for grad, wanted, limit in zip(grads, exact, limits, strict=True):
        assert grad.dtype == wanted.dtype and grad.shape == wanted.shape
        assert relative(grad, wanted) <= limit if limit else same_sums(grad, wanted), limit
    assert grads[0].stride() == exact[0].stride() or not grads[0].numel()
    assert all(map(torch.equal, ours.buffers(), theirs.buffers()))


class Unrelated(torch.autograd.Function):
    """Returns a number that is said not to depend on x: the gradient of x is None."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().sum()

    @staticmethod
    def backward(ctx, grad):
        return None


@every_layer
def test_later_layers_may_return_no_gradient(layer):
    """The layer then adds nothing to the gradients of its inputs and parameters, as torch's layer does."""
    ours, _ = layer.pair(2)
    inputs = [x.requires_grad_() for x in layer.inputs()]
    y = seeded(ours, *inputs)
    y = y[0] if isinstance(y, tuple) else y
    (Unrelated.apply(y) + sum(x.sum() for x in inputs)).backward()
    assert all(torch.equal(x.grad, torch.ones_like(x)) for x in inputs)
    assert all(weight.grad is None or not weight.grad.any() for weight in ours.parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@every_layer
def test_values_and_gradients_are_torchs(device, layer, dtype):
    """At 8 bits gradients are within 2 %. Gradients that need no quantized tensor are exact."""
    check(layer, *layer.pair(8, device, dtype), layer.inputs(device, dtype))


@pytest.mark.parametrize("layer", **ids(SAMPLES))
@pytest.mark.parametrize("bits", BITS)
def test_saved_bytes(device, layer, bits):
    module, _ = layer.pair(bits, device)
    y, saved = saved_by(module, *(x.requires_grad_() for x in layer.inputs(device)))
    y = y[0] if isinstance(y, tuple) else y
    assert sum(tensor.nbytes for tensor in saved) == layer.expected_bytes(bits, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@every_layer
def test_autocast(device, layer, dtype):
    """Outputs and gradients have torch's dtypes; no cast weight is saved."""
    ours, theirs = layer.pair(8, device)
    inputs = layer.inputs(device, dtype)

    def cast(function, *arguments):
        with torch.autocast(device, torch.bfloat16):
            return function(*arguments)

    found = outcome(cast, gradients, ours, *inputs)
    expected = outcome(cast, gradients, theirs, *inputs)
    if isinstance(expected, type):  # the CPU's autocast leaves two dtypes to bilinear
        assert found == expected
        return
    (y, grads), (their_y, exact) = found, expected
    assert y.dtype == their_y.dtype
    torch.testing.assert_close(y, their_y, rtol=1e-2, atol=1e-2)
    for grad, wanted in zip(grads, exact, strict=True):
        assert grad.dtype == wanted.dtype and relative(grad, wanted) < 0.06
    kept = cast(bytes_by, fresh(ours), *(x.clone().requires_grad_() for x in inputs))
    if dtype == torch.float32:
        assert kept <= layer.expected_bytes(8, y)


@every_layer
def test_nothing_is_saved_that_no_gradient_needs(device, layer):
    module, theirs = layer.pair(2, device)
    inputs = layer.inputs(device)
    with torch.no_grad():
        assert not bytes_by(fresh(module), *(x.clone().requires_grad_() for x in inputs))
    module.requires_grad_(False)
    if layer.is_linear:  # the input's gradient needs the weight alone
        y, saved = saved_by(module, inputs[0].clone().requires_grad_())
        assert not saved and y.requires_grad
    y, saved = seeded(saved_by, fresh(module), *inputs)
    assert not saved and same(y, seeded(fresh(theirs), *inputs))
    if getattr(module, "bias", None) is not None:
        module.bias.requires_grad_()
        y, saved = saved_by(module, *inputs)
        assert not saved
        # torch's own crashes for some layouts if the input's gradient is not asked for.
        x = inputs[0].requires_grad_()
        expected = torch.autograd.grad(theirs(*inputs).sum(), (theirs.bias, x))[0]
        torch.testing.assert_close(torch.autograd.grad(y.sum(), module.bias)[0], expected)


@every_layer
def test_evaluation_mode_is_torchs_own(device, layer):
    ours, theirs = layer.pair(1, device)
    inputs = [x.requires_grad_() for x in layer.inputs(device)]
    y, grads = gradients(ours.eval(), *inputs)
    expected, exact = gradients(theirs.eval(), *inputs)
    assert bytes_by(ours, *inputs) <= bytes_by(theirs, *inputs)
    assert same(y, expected)
    for grad, wanted in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad, wanted)


def test_a_frozen_batch_norm_in_evaluation_mode_keeps_nothing(device):
    module = fewbit.nn.BatchNorm2d(3).to(device).eval().requires_grad_(False)
    _, saved = saved_by(module, normal((2, 3, 4, 5), device=device).requires_grad_())
    assert {x.data_ptr() for x in saved} <= {x.data_ptr() for x in module.buffers()}


@every_layer
def test_modules_are_torchs(layer):
    ours, theirs = layer.ours(**{"bits": 2} if layer.has_bits else {}), layer.theirs()
    assert layer.name in GATES or isinstance(ours, type(theirs))
    assert "bits=2" in repr(ours) if layer.has_bits else repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.fast(5)
@pytest.mark.parametrize(
    "layer",
    **ids(
        [
            layer
            for layer in EVERY
            # Compiled code draws masks of its own, and takes no average over all batches.
            if "Dropout" not in layer.name and layer.options.get("momentum", 0.1) is not None
        ]
    ),
)
def test_compiled(device, layer):
    """The whole layer is one graph. Its forward saves the same as in eager mode, and vectors that these are made from."""
    torch.compiler.reset()
    module, theirs = layer.pair(8, device)
    inputs = layer.inputs(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")
    y, grads = gradients(compiled, *inputs)
    expected, exact = gradients(theirs, *inputs)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for grad, wanted in zip(grads, exact, strict=True):
        assert relative(grad, wanted) < 0.02
    kept = bytes_by(compiled, *(x.requires_grad_() for x in inputs))
    assert kept <= layer.expected_bytes(8, y) + 4 * layer.vectors + 16 * bool(layer.vectors)


@every_layer
def test_empty_batches(device, layer):
    inputs = [x[:0] for x in layer.inputs(device)]
    check(layer, *layer.pair(2, device), inputs)


@every_layer
def test_a_result_may_be_written_to(layer):
    module, _ = layer.pair(8)
    y = module(*(x.requires_grad_() for x in layer.inputs()))
    expected = y.detach() + 1
    assert same(y.add_(1).detach(), expected)
    y.sum().backward()


@pytest.mark.parametrize("options, message", [
    ({"bits": 0}, "expected a whole number from 1 to 8 for bits, got 0"),
    ({"bits": 9}, "expected a whole number from 1 to 8 for bits, got 9"),
    ({"group_size": 100}, "expected a multiple of 32 from 32 to 65536 for group_size, got 100"),
])  # fmt: skip
def test_bad_settings(options, message):
    x = normal((3, 4))
    calls = [
        lambda: F.linear(x, normal((4, 4)), **options),
        lambda: F.prelu(x, x[0, :1], **options),
        lambda: F.softmax(x, 1, **options),
        lambda: F.log_softmax(x, 1, **options),
        lambda: F.bilinear(x, x, normal((2, 4, 4)), **options),
        lambda: F.swiglu(x, x, **options),
        lambda: F.geglu(x, x, **options),
        lambda: F.reglu(x, x, **options),
        lambda: F.scaled_dot_product_attention(x, x, x, **options),
        lambda: fewbit.nn.MultiheadAttention(32, 4, **options),
        *(lambda layer=layer: layer.ours(**options) for layer in EVERY if layer.has_bits),
    ]
    for call in calls:
        with pytest.raises(InputError, match=message):
            call()


def test_bad_copies():
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
    last = {2: LAST, 3: LAST_3D}.get(dims) if batch and draw(st.booleans()) else None
    return Layer(name, (*channels, kernel), (*batch, channels[0], *size), options, format=last)


@settings(max_examples=60)
@given(convolutions())
def test_any_convolution(layer):
    ours, theirs = layer.pair(8)
    x = layer.input()
    y, grads = gradients(ours, x)
    expected, exact = gradients(theirs, x)
    assert torch.equal(y, expected) and strides(y) == strides(expected)
    assert strides(grads[0]) == strides(exact[0])
    for grad, wanted in zip(grads, exact, strict=True):
        assert (grad.double() - wanted.double()).norm() <= 0.02 * wanted.double().norm() + 0.02


@st.composite
def orders(draw, dims):
    """Draw an order of dimensions in storage: contiguous, channels last, or any permutation."""
    last = (0, *range(2, dims), 1)[:dims]
    either = st.sampled_from((tuple(range(dims)), last)), st.permutations(range(dims)).map(tuple)
    return draw(st.one_of(*either))


@st.composite
def linears(draw):
    sizes = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    shape = (*draw(st.lists(st.integers(1, 5), max_size=4)), sizes[0])
    options = {"bias": draw(st.booleans())}
    return Layer("Linear", sizes, shape, options, order=draw(orders(len(shape))))


@settings(max_examples=100)
@given(linears(), st.sampled_from((0.0, 10.0)))
def test_any_linear(layer, offset):
    """Only the weight's gradient has errors: at most a step in every element of x, with random signs over rows."""
    ours, theirs = layer.pair(8)
    x = layer.input(offset=offset)
    y, (grad_x, grad_weight, *grad_bias) = gradients(ours, x)
    expected, (exact_x, exact_weight, *exact_bias) = gradients(theirs, x)
    assert torch.equal(y, expected) and strides(y) == strides(expected)
    # Torch's is transposed where the rows of x are columns.
    assert grad_x.is_contiguous() or strides(grad_x) == strides(exact_x)
    torch.testing.assert_close([grad_x, *grad_bias], [exact_x, *exact_bias])
    limit = largest_step(x) * output_gradient(y).norm() * math.sqrt(x.shape[-1])
    assert (grad_weight - exact_weight).norm() <= limit + 1e-6 * exact_weight.norm()


@st.composite
def norms(draw):
    """Draw a norm with 4 elements or more for each statistic, also with one sample, one group or one channel."""
    kind = draw(st.sampled_from(("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm")))
    n, c = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    name, affine = kind, "affine"
    sides = st.integers(1, 7)
    if kind in ("LayerNorm", "RMSNorm"):
        normalized = tuple(draw(st.lists(sides, min_size=1, max_size=3)))
        shape = (*draw(st.lists(st.integers(1, 4), max_size=3)), *normalized)
        arguments, count, affine = (normalized,), math.prod(normalized), "elementwise_affine"
    elif kind == "GroupNorm":
        groups = draw(st.sampled_from([number for number in range(1, c + 1) if c % number == 0]))
        size = draw(st.lists(sides, max_size=3))
        arguments, shape, count = (groups, c), (n, c, *size), c // groups * math.prod(size)
    else:
        dims = draw(st.integers(1, 3))
        size = draw(st.lists(sides, min_size=dims, max_size=dims))
        name, arguments, shape, count = f"{kind}{dims}d", (c,), (n, c, *size), math.prod(size)
        if kind == "BatchNorm":
            count *= n
            if dims == 1 and draw(st.booleans()):
                shape, count = (size[0], c), size[0]
        elif draw(st.booleans()):
            shape = shape[1:]
    assume(count >= 4)
    options = {affine: draw(st.booleans())}
    if kind in ("BatchNorm", "InstanceNorm"):
        options["track_running_stats"] = draw(st.booleans())
    if kind == "LayerNorm":
        options["bias"] = draw(st.booleans())
    return Layer(name, arguments, shape, options, order=draw(orders(len(shape))))


@settings(max_examples=200)
@given(norms(), st.sampled_from((1, 2)), st.sampled_from((0.0, 10.0)))
def test_any_norm(layer, copies, offset):
    """Gradients are off by what steps of x~ make of them, in the norm over a statistic's N elements.

    An element of x~^ is off by a step at most. The input's gradient, (g - mean(g) - x~ mean(x~ g)) / s, has it
    twice, times a projection of g, which is |g| / sqrt(N) for a random one; the weight's is the sum of
    independent g (x~^ - x~). Measured: 1.9 steps and 0.9.
    """
    ours, theirs = layer.pair(8, copies=copies)
    x = layer.input(offset=offset)
    y, (grad_x, *grads) = gradients(ours, x)
    expected, (exact_x, *exact) = gradients(theirs, x)
    assert torch.equal(y, expected) and strides(y) == strides(expected)
    if copies == 1:  # with two the formula is written out, and its layout follows its operands'
        assert strides(grad_x) == strides(exact_x)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, other)
    g = output_gradient(y)
    normalized, deviation = normalized_by(layer, theirs.eps, x)
    step = largest_step(normalized)
    weighted = by_statistic(layer, g if theirs.weight is None else g * over_channels(layer, theirs))
    off = by_statistic(layer, grad_x.double() - exact_x.double()).norm(dim=1)
    limit = 3 * step * weighted.norm(dim=1) / deviation / math.sqrt(weighted.shape[1])
    assert (off <= limit + 1e-6 * exact_x.norm()).all()
    for (name, _), grad, wanted in zip(theirs.named_parameters(), grads, exact, strict=True):
        limit = 1e-6 * g.abs().sum() if name == "bias" else 2 * step * g.norm()
        assert (grad - wanted).norm() <= limit, name


def strides(x) -> list[int]:
    """Return the strides of dimensions that have more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def output_gradient(y):
    """Return the gradient of y that `gradients` uses."""
    return normal(y.shape, y.dtype, y.device, 1.0, seed=7)


def largest_step(x) -> float:
    """Return the largest step of groups of x at 8 bits. bfloat16 extends a range by an eighth at most (docs/concepts/quantizer.md)."""
    return 1.14 * float(x.max() - x.min()) / 255


def by_statistic(layer, x):
    """Return x in float64, with a row for each mean of the norm."""
    if layer.name in ("LayerNorm", "RMSNorm"):
        rows = math.prod(x.shape) // math.prod(layer.arguments[0])
    elif layer.name == "GroupNorm":
        rows = x.shape[0] * layer.arguments[0]
    elif layer.name.startswith("BatchNorm"):
        x, rows = x.transpose(0, 1), x.shape[1]
    else:
        rows = math.prod(x.shape[: -int(layer.name[-2])])
    return x.double().reshape(rows, -1)


def normalized_by(layer, eps, x):
    """Return (x~, deviation of each row) in float64."""
    x = by_statistic(layer, x)
    if layer.name != "RMSNorm":
        x = x - x.mean(1, keepdim=True)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    deviation = (x.square().mean(1) + eps).sqrt()
    return x / deviation[:, None], deviation


def over_channels(layer, module):
    """Return the weight in a shape that broadcasts to the input."""
    weight = module.weight.detach()
    if layer.name in ("LayerNorm", "RMSNorm"):
        return weight
    batched = not layer.name.startswith("Instance") or len(layer.shape) == int(layer.name[-2]) + 2
    return weight.view(-1, *[1] * (len(layer.shape) - 1 - batched))


# -- exact in expectation -------------------------------------------------------------------------------------


def check_expectation(layer, offset, draws, independent=None, **options):
    """Check all gradients at 2 bits: the squared errors of their entries, and the signed sums of these errors."""
    ours, theirs = layer.pair(2, dtype=torch.float64, **options)
    # Numbers that float32 holds, which the quantizer starts from.
    inputs = [x.double() for x in layer.inputs(offset=offset)]
    torch.manual_seed(int(offset))
    samples = drawn(lambda: gradients(ours, *inputs)[1], draws)
    exact = gradients(theirs, *inputs)[1]
    for grads, wanted in zip(samples, exact, strict=True):
        # With draws of 16 bits the smallest fractions of a step are never rounded up.
        least = (1e-6 if layer.is_linear else 1e-5) * float(wanted.abs().max())
        assert abs(pooled_z(grads, wanted, least, independent, not layer.is_linear)) < 5
        assert max(abs(z) for z in signed_z(grads, wanted, least)) < 4


LINEAR_IN_COPIES = [
    *LINEAR[:4:3],  # many features, and few, whose groups run across samples
    LINEAR[1],  # three dimensions
    *first("Conv1d", "Conv2d", "Conv3d"),
    *first("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
    *first("PReLU", "LogSoftmax", "Bilinear"),
]


@pytest.mark.parametrize("kind", ["rotated", "unbiased"])
@pytest.mark.parametrize("offset", [0.0, -10.0, -1000.0])
@pytest.mark.parametrize("layer", **ids(LINEAR_IN_COPIES))
def test_layers_that_are_linear_in_their_copies_are_exact_in_expectation(layer, offset, kind):
    # The weight's gradient has as many independent errors as the input has elements, if it has more entries.
    count = math.prod(layer.shape) if layer.is_linear else 60
    check_expectation(layer, offset, 150, count, quantizer=kind)


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
@pytest.mark.parametrize(
    "layer", **ids(first("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm2d", "InstanceNorm2d"))
)
@pytest.mark.parametrize("kind", ["rotated", "unbiased"])
def test_norms_with_two_copies_are_exact_in_expectation(layer, offset, kind):
    check_expectation(layer, offset, 200, layer.vectors, copies=2, quantizer=kind)


@pytest.mark.parametrize(
    ("kind", "draws"), [("uniform", 600), ("rotated", 4000), ("unbiased", 4000)]
)
def test_the_bias_of_a_norm_with_one_copy(kind, draws):
    """The bias is -Cov g / (N s), and nothing else (long version of ActNN, appendix B.2).

    In a uniform copy, elements are rounded independently, and this is -g Var / (N s) elementwise. The bias of other
    copies is smaller, so more draws are needed to see it.
    """
    (layer,) = first("LayerNorm")
    ours, theirs = layer.pair(2, dtype=torch.float64, quantizer=kind)
    x = layer.input().double()
    torch.manual_seed(0)
    samples = drawn(lambda: gradients(ours, x)[1], draws)[0]
    exact = gradients(theirs, x)[1]
    g = normal(x.shape, torch.float64, scale=1.0, seed=7) * theirs.weight.detach().double()
    deviation = (x.var(-1, unbiased=False, keepdim=True) + theirs.eps).sqrt()
    normalized = (x - x.mean(-1, keepdim=True)) / deviation
    rounded = [covariance(row, 2, kind) @ of_row for row, of_row in zip(normalized, g, strict=True)]
    bias = -torch.stack(rounded) / (96 * deviation)
    assert abs(pooled_z(samples, exact[0] + bias, 1e-9)) < 5
    assert max(abs(z) for z in signed_z(samples, exact[0] + bias, 1e-9)) < 4
    assert abs(pooled_z(samples, exact[0], 1e-9)) > 5  # it is seen
    assert signed_z(samples, exact[0], 1e-9)[1] < -15  # along the gradient still better
    assert (
        bias.norm() / exact[0].norm() < {"uniform": 0.02, "rotated": 0.005, "unbiased": 0.01}[kind]
    )  # and small
