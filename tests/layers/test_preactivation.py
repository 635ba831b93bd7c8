"""The pre-activation block: its one fixed-point tensor, its exact gradients, and its conversion in models."""

import copy
from functools import partial
from math import prod

import pytest
import torch
from composed import Composed
from layers import LAST, LAST_3D, gradients, output_gradient, relative, saved_by
from samples import normal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.errors import InputError
from fewbit.models.preactivation_resnet import DEPTHS, PreActivationBlock, PreActivationResNet
from fewbit.nn import PreActivation
from fewbit.runtime.format.encoding import packed_words


def batch_norm(linear=lambda: nn.Conv2d(6, 4, 3, padding=1), activation=nn.ReLU, layout=None):
    return lambda: nn.BatchNorm2d(6), activation, linear, (3, 6, 7, 5), layout


def linear():
    return nn.Linear(40, 9)


CASES = {  # {name: (norm, activation, linear layer, shape of an input, its memory format)}
    "BatchNorm2d Conv2d": batch_norm(),
    "channels last": batch_norm(layout=LAST),
    "LeakyReLU": batch_norm(activation=lambda: nn.LeakyReLU(0.2)),
    "in place": batch_norm(activation=lambda: nn.ReLU(inplace=True)),
    "LeakyReLU in place, channels last": batch_norm(
        activation=lambda: nn.LeakyReLU(0.1, True), layout=LAST
    ),
    "no activation": batch_norm(activation=nn.Identity),
    "no weight": (lambda: nn.BatchNorm2d(6, affine=False), *batch_norm()[1:]),
    "BatchNorm1d Linear": (lambda: nn.BatchNorm1d(40), nn.ReLU, linear, (11, 40), None),
    "BatchNorm1d Conv1d": (
        lambda: nn.BatchNorm1d(7), nn.ReLU, lambda: nn.Conv1d(7, 5, 3), (5, 7, 20), None,
    ),
    "BatchNorm3d Conv3d": (
        lambda: nn.BatchNorm3d(3), nn.ReLU, lambda: nn.Conv3d(3, 4, 2), (2, 3, 4, 5, 6), LAST_3D,
    ),
    "ConvTranspose2d": batch_norm(lambda: nn.ConvTranspose2d(6, 4, 3)),
    "LayerNorm Linear": (lambda: nn.LayerNorm(40), nn.Identity, linear, (3, 5, 40), None),
    "LayerNorm ReLU": (lambda: nn.LayerNorm(40), nn.ReLU, linear, (3, 5, 40), None),
    "LayerNorm of two dimensions, no bias": (
        lambda: nn.LayerNorm((4, 10), bias=False), nn.ReLU, lambda: nn.Linear(10, 9), (5, 4, 10), None,
    ),
}  # fmt: skip
WEIGHTS = (1.0, -0.7, 0.0, 0.5, 0.1, -2.0, 1.5)
BIASES = (0.1, 0.4, 0.3, -1.9, 2.0, 0.0, -1.0)


def make(name, bits=4, device="cpu", dtype=torch.float32):
    """Return (a block, torch's own with the same parameters, an input)."""
    *makers, shape, layout = CASES[name]
    torch.manual_seed(0)
    parts = [make() for make in makers]
    with torch.no_grad():
        if parts[0].weight is not None:
            flat = parts[0].weight.view(-1)
            flat.copy_(torch.tensor(WEIGHTS * 20)[: len(flat)])
            if parts[0].bias is not None:
                parts[0].bias.view(-1).copy_(torch.tensor(BIASES * 20)[: len(flat)])
    theirs = nn.Sequential(*parts).to(device, dtype)
    norm, activation, linear = copy.deepcopy(theirs)
    x = normal(shape, dtype, device, 1.5, seed=3) + 0.5
    x = x.contiguous(memory_format=layout) if layout else x
    return PreActivation(norm, linear, activation, bits), theirs, x


def check(ours, theirs, x, limit):
    """Compare values to the bit, and gradients within a fraction of their norm; limit 0: to the bit as well."""
    (y, grads), (expected, exact) = gradients(ours, x), gradients(theirs, x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    for grad, wanted in zip(grads, exact, strict=True):
        assert grad.dtype == wanted.dtype
        assert relative(grad, wanted) < limit if limit else torch.equal(grad, wanted)


def restored(x, y, weight, bias, bits):
    """Return the dequantized x, by the definition in `fewbit.runtime.ops.fixed_point`."""
    levels, step = 2**bits, 6 / 2**bits
    sign = torch.where(weight < 0, -1.0, 1.0)
    zero = torch.where(weight == 0, torch.nan, -bias / weight.abs())
    first = (levels // 2 + (zero / step).floor()).clamp(1, levels - 1)
    first = torch.where(weight == 0, torch.where(bias > 0, 0.0, float(levels)), first)
    start = torch.where(zero.abs() <= 3, zero - first * step, -3.0)
    code = (((sign * x - start) / step).ceil() - 1).clamp(0, levels - 1)
    code = torch.where(y > 0, code.maximum(first), code.minimum(first - 1))
    z = start + (code + 0.5) * step
    limited = torch.where(y > 0, z.maximum(zero + step / 2), z.minimum(zero - step / 2))
    return sign * torch.where(zero.abs() > 3, limited, z)


@pytest.mark.parametrize("bits", (1, 4, 8))
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, bits, device):
    """Gradients are those of exact backpropagation, in which the norm's result is made from the dequantized copy."""
    ours, theirs, x = make(name, bits, device)
    y, (of_input, *grads) = gradients(ours, x)
    torch.testing.assert_close(y, theirs(x), rtol=0, atol=0)
    norm, activation, linear = copy.deepcopy(theirs).double().cpu()
    x64, is_layer_norm = x.double().cpu(), isinstance(norm, nn.LayerNorm)
    if is_layer_norm:
        dims, shape = tuple(range(-len(norm.normalized_shape), 0)), norm.normalized_shape
    else:
        dims = tuple(dim for dim in range(x.dim()) if dim != 1)
        shape = 1, -1, *[1] * (x.dim() - 2)
    ones = torch.ones(1, dtype=torch.float64)
    weight, bias = (
        number * ones if vector is None else vector.view(shape)
        for number, vector in ((1, norm.weight), (0, norm.bias))
    )
    rstd = (x64.var(dims, unbiased=False, keepdim=True) + norm.eps).rsqrt()
    normalized = (x64 - x64.mean(dims, keepdim=True)) * rstd
    with torch.no_grad():
        copied = restored(normalized, normalized * weight + bias, weight, bias, bits)
    grad = output_gradient(y).double().cpu()
    result = linear(activation(copied.requires_grad_() * weight + bias))
    parameters = *norm.parameters(), *linear.parameters()
    of_copy, *expected = torch.autograd.grad(result, (copied, *parameters), grad)
    along = (copied * of_copy).mean(dims, keepdim=True)
    expected = [(of_copy - of_copy.mean(dims, keepdim=True) - copied * along) * rstd, *expected]
    for found, wanted in zip((of_input, *grads), expected, strict=True):
        assert relative(found.cpu(), wanted) < 1e-4
    kept = 4 * packed_words(x.numel(), bits) + 4 * rstd.numel()
    assert fewbit.saved_bytes(ours, x.clone().requires_grad_()).total == kept
    if norm.weight is not None:  # of which a gradient is asked for
        assert fewbit.saved_bytes(ours, x).total == kept


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("name", ("BatchNorm2d Conv2d", "LayerNorm Linear", "LeakyReLU"))
def test_other_dtypes(name, dtype, device):
    if name == "LayerNorm Linear" and dtype.itemsize == 2 and device == "cuda":
        pytest.skip("torch's layer norm needs a weight of the input's dtype on CUDA")
    block, theirs, x = make(name, 8, device, dtype)
    if dtype.itemsize == 2:  # with 16 bits of statistics a norm keeps what it keeps without
        block.norm.float(), theirs[0].float()
    check(block, theirs, x, 0.06)


def test_statistics_of_16_bits_are_left_to_the_group_quantizer():
    block, _, x = make("BatchNorm2d Conv2d", 4, dtype=torch.bfloat16)
    _, saved = saved_by(block, x)
    assert sum(tensor.dtype == torch.int32 for tensor in saved) == 3
    block(x).sum().backward()


def test_a_frozen_norm_leaves_each_layer_to_itself():
    block, theirs, x = make("BatchNorm2d Conv2d", 8)
    block.norm.eval(), theirs[0].eval()
    check(block, theirs, x, 0.01)


def test_refusals():
    norm, linear = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
    for arguments, text in (
        ((nn.GroupNorm(2, 4), linear), "norm: expected one of .*BatchNorm1d.*, got GroupNorm"),
        ((norm, nn.ReLU()), "linear: expected one of .*Linear.*, got ReLU"),
        ((norm, linear, nn.GELU()), "activation: expected one of .*ReLU.*, got GELU"),
        ((norm, linear, None, 9), "bits"),
        ((norm, linear, None, 2.5), "bits"),
    ):
        with pytest.raises(InputError, match=text):
            PreActivation(*arguments)
    assert type(norm) is nn.BatchNorm2d and type(linear) is nn.Conv2d
    copies = "expected copies=1 with PreActivationBits"
    for options, text in (
        ({"layers": {"copies": 2}}, f"layers: {copies}, got 2"),
        ({"overrides": {"0": {"copies": 2}}}, f"overrides.*: {copies}"),
        (
            {"layers": {"attention_bits": 1.5}},
            "layers: attention_bits: expected a whole number from 1 to 8",
        ),
    ):
        model = nn.Sequential(norm, linear)
        with pytest.raises(InputError, match=text):
            fewbit.compress_(model, fewbit.PreActivationBits(), **options, verbose=False)
        assert type(norm) is nn.BatchNorm2d


@pytest.mark.parametrize("is_inside", (False, True), ids=("alone", "in a converted model"))
@pytest.mark.parametrize("shared", ("norm", "linear", "norm and activation"))
def test_layers_that_two_blocks_share(shared, is_inside):
    """Each block saves one tensor of its own, with the bits of its norm."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(6) for _ in range(2)]
    linears = [nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(2)]
    activations = [nn.ReLU(), nn.ReLU()]
    for name, layers in (("norm", norms), ("linear", linears), ("activation", activations)):
        if name in shared:
            layers[1] = layers[0]
    exact = nn.Sequential(*map(nn.Sequential, norms, activations, linears))
    exact = copy.deepcopy(exact)
    model = nn.Sequential(*map(PreActivation, norms, linears, activations, (8, 8)))
    x = normal((3, 6, 7, 5))
    if is_inside:
        fewbit.compress_(model, bits=2, verbose=False)
    assert fewbit.saved_bytes(model, x).total == 2 * (4 * packed_words(x.numel(), 8) + 4 * 6)
    check(model, exact, x, 0.03)


# -- wiring ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A unit whose short cut and branch both take the same pre-activation, as functions or as modules."""

    def __init__(self, functions=False, inplace=False):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.branch = nn.Conv2d(6, 8, 3, padding=1)
        self.short_cut = nn.Conv2d(6, 8, 1)
        self.activation = (
            partial(nn.functional.relu, inplace=inplace) if functions else nn.ReLU(inplace)
        )

    def forward(self, x):
        y = self.activation(self.norm(x))
        return self.branch(y) + self.short_cut(y)


def projected(model, x):
    """Return the sum of three linear layers' results, which use a layer norm's result."""
    y = model.norm(x)
    return model.q(y) + model.k(y) * 2 + model.v(y) * 3


def attended(model, x):
    """Return the sum of two linear layers' results, which use an input that no norm made."""
    y = model.norm(x)
    z = nn.functional.scaled_dot_product_attention(model.q(y), model.k(y), model.v(y))
    return model.a(z) + model.b(z)


def projections(forward, names):
    layers = {name: nn.Linear(96, 96) for name in names}
    return Composed(forward, norm=nn.LayerNorm(96), **layers)


def called(model, x):
    """Call everything as functions."""
    y = nn.functional.batch_norm(x, None, None, model.weight, model.bias, True)
    z = nn.functional.conv2d(nn.functional.leaky_relu(y, 0.1), model.convolution.weight)
    z = nn.functional.layer_norm(z.flatten(2), (15,))
    return nn.functional.linear(z, model.linear.weight)


def functions():
    return Composed(
        called,
        convolution=nn.Conv2d(6, 6, 3, bias=False),
        linear=nn.Linear(15, 8, bias=False),
        weight=nn.Parameter(torch.rand(6)),
        bias=nn.Parameter(torch.zeros(6)),
    )


IMAGES = 3, 6, 7, 5
SHARING = {  # {name: (model, shape of an input, shapes of what norms save, their statistics)}
    **{
        f"residual {options}": (partial(Residual, **options), IMAGES, [IMAGES], 6)
        for options in ({}, {"functions": True}, {"inplace": True}, {"functions": True, "inplace": True})
    },
    "projections": (partial(projections, projected, "qkv"), (2, 5, 96), [(2, 5, 96)], 10),
    "functions": (functions, IMAGES, [IMAGES, (18, 15)], 24),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARING)
def test_layers_after_a_norm_share_its_copy(name, device):
    """They share it whatever their bits are."""
    make, shape, saved, statistics = SHARING[name]
    torch.manual_seed(0)
    model, x = make().to(device), normal(shape, device=device, scale=1.0)
    exact, overrides = copy.deepcopy(model), {"q": 2} if name == "projections" else None
    fewbit.compress_(model, fewbit.PreActivationBits(8), overrides=overrides, verbose=False)
    kept = sum(4 * packed_words(prod(of_norm), 8) for of_norm in saved) + 4 * statistics
    assert fewbit.saved_bytes(model, x).total == kept
    check(model, exact, x, 0.05)


def chain(depth=3):
    torch.manual_seed(0)
    units = [
        PreActivationBlock(nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1, bias=False))
        for _ in range(depth)
    ]
    return nn.Sequential(*units)


def test_a_conversion_and_blocks_are_the_same():
    model = chain()
    exact = copy.deepcopy(model)
    blocks = nn.Sequential(
        *(PreActivation(block.norm, block.linear, bits=3) for block in copy.deepcopy(model))
    )
    x = normal((3, 6, 7, 5))
    controller = fewbit.compress_(model, bits=fewbit.PreActivationBits(3), verbose=False)
    assert "3 norms in fixed point" in str(controller.report)
    assert list(model.state_dict()) == list(blocks.state_dict())
    check(model, blocks, x, 0)
    kept = 3 * (4 * packed_words(x.numel(), 3) + 4 * 6)
    assert fewbit.saved_bytes(model, x).total == fewbit.saved_bytes(blocks, x).total == kept
    fewbit.restore_(model)
    assert type(model[0].norm) is nn.BatchNorm2d and type(model[0].activation) is nn.ReLU
    check(model, exact, x, 0)


def test_the_report_says_who_keeps_nothing_of_its_own():
    """With a sample the report has what the meter counts. Without one it says that this may be so."""
    model, x = nn.Sequential(nn.Conv2d(3, 6, 1), *chain(1), nn.GELU()), normal((3, 3, 7, 5))
    model.append(nn.Conv2d(6, 2, 1))
    model.append(nn.Sequential(nn.Conv2d(2, 2, 1)).requires_grad_(False))
    options = {"bits": fewbit.PreActivationBits(4), "verbose": False}
    report = fewbit.compress_(model, sample=x, **options).report
    saves = {row.path: row.saves for row in report.converted}
    assert saves == {
        "0": "4 bits",
        "1.norm": "4 bits",
        "1.activation": "the norm's",
        "1.linear": "the norm's",
        "2": "3 bits",
        "3": "4 bits",
        "4.0": "no input",
    }
    kept = fewbit.saved_bytes(model, x).by_module()
    for path in ("1.activation", "1.linear"):
        assert not kept.get(path)
    assert all(kept[path] for path in ("0", "1.norm", "2", "3"))
    assert "1.linear      Conv2d       fewbit's  the norm's" in str(report)
    unknown = {path: "4 bits or the norm's" for path in ("0", "1.linear", "3")}
    unknown["4.0"] = "no input"
    unknown["1.activation"] = "1 bit or the norm's"
    for changes in ({}, {"sample": x}):  # the sample in evaluation mode
        report = fewbit.compress_(model.eval(), **options, **changes).report
        assert {row.path: row.saves for row in report.converted if row.shared is None} == unknown
    controller = fewbit.compress_(model.train(), bits=4, sample=x, verbose=False)
    assert all(row.shared is False for row in controller.report.converted)


def test_the_report_says_if_there_is_no_norm_and_so_no_effect():
    linear, x = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)], normal((16, 64))
    for layers, has_norm in ((linear, False), ([linear[0], nn.LayerNorm(64), *linear[1:]], True)):
        model, saved = nn.Sequential(*layers), []
        for bits in (fewbit.FixedBits(4), fewbit.PreActivationBits(4)):
            report = fewbit.compress_(model, bits, verbose=False).report
            saved.append(fewbit.saved_bytes(model, x).total)
        text = " ".join(str(report).split())
        assert ("no batch or layer norm is converted" in text) is not has_norm
        assert ("1 norm in fixed point" in text) is has_norm
        assert (saved[0] == saved[1]) is not has_norm, "the same as with FixedBits"


@pytest.mark.parametrize("bits", (8, fewbit.PreActivationBits(8)), ids=repr)
def test_blocks_inside_of_a_converted_model_stay_as_they_are(bits):
    x = normal((3, 6, 7, 5))
    block = PreActivation(nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1), bits=5)
    kept = fewbit.saved_bytes(block, x).total
    model = nn.Sequential(chain(1), block, nn.Conv2d(6, 2, 1))
    exact = copy.deepcopy(model)
    controller = fewbit.compress_(model, bits, verbose=False)
    assert "one tensor of 5 bits an element" in str(controller.report)
    of_block = [
        entry for entry in fewbit.saved_bytes(model, x).kept if entry.module.startswith("1.")
    ]
    assert sum(entry.bytes for entry in of_block) == kept
    check(model, exact, x, 0.05)
    fewbit.restore_(model)
    assert fewbit.saved_bytes(block, x).total == kept


@pytest.mark.parametrize("level", ("L2.5", "L3", "L4"))
def test_blocks_at_levels_that_do_not_fuse(level):
    """Only layers around a block share bits."""
    block = PreActivation(nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1, bias=False), bits=8)
    model = nn.Sequential(block, nn.Conv2d(6, 2, 1))
    exact, x = copy.deepcopy(model), normal((3, 6, 7, 5))
    fewbit.compress_(model, bits=fewbit.Level(level, 8), verbose=False)
    for _ in range(3):  # observed, and not
        check(model, exact, x, 0.03)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("as_function", (False, True))
def test_checkpoints(reentrant, as_function):
    """The recomputation of a region saves the same as the first forward."""

    def region(model, x):
        unit = model.unit[0]
        run = (lambda x: unit.linear(unit.activation(unit.norm(x)))) if as_function else model.unit
        return checkpoint(run, x, use_reentrant=reentrant)

    def gradients(model):
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        return [leaf.grad, *(parameter.grad for parameter in model.parameters())]

    model, x = Composed(region, unit=chain(1)), normal((3, 6, 7, 5))
    plain = copy.deepcopy(model.unit)
    for tested in (model, plain):
        fewbit.compress_(tested, bits=fewbit.PreActivationBits(4), verbose=False)
    ours, theirs = gradients(model), gradients(plain)
    if (
        as_function
    ):  # nothing tells its activations of the region: what they and the layers keep is apart
        assert all(relative(a, b) < 0.3 for a, b in zip(ours, theirs, strict=True))
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_change_in_place_is_not_taken_for_what_the_norm_keeps():
    torch.manual_seed(0)
    model = Composed(
        lambda own, x: own.linear(own.norm(x).mul_(2.0)),
        norm=nn.BatchNorm1d(96),
        linear=nn.Linear(96, 8),
    )
    x = normal((9, 96))
    exact = copy.deepcopy(model)
    fewbit.compress_(model, bits=fewbit.PreActivationBits(8), verbose=False)
    check(model, exact, x, 0.02)


# -- models ------------------------------------------------------------------------------------------------


@pytest.mark.fast(1)
@pytest.mark.parametrize("depth", DEPTHS)
def test_depths_count_layers(depth):
    with torch.device("meta"):
        model = PreActivationResNet(depth)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth
    with pytest.raises(InputError, match="depth: expected 9 n \\+ 2, got"):
        PreActivationResNet(depth - 1)


@pytest.mark.slow
@pytest.mark.parametrize("width", (1, 4))
def test_networks_are_alike_whatever_their_blocks(width):
    torch.manual_seed(0)
    plain = PreActivationResNet(11, classes=7, width=width)
    blocks = PreActivationResNet(11, 7, width, block=partial(PreActivation, bits=4))
    blocks.load_state_dict(plain.state_dict())
    x = normal((2, 3, 32, 32), scale=1.0)
    assert plain(x).shape == (2, 7)
    torch.testing.assert_close(plain(x), blocks(x), rtol=0, atol=0)
    fewbit.compress_(plain, bits=fewbit.PreActivationBits(4), verbose=False)
    assert fewbit.saved_bytes(plain, x).total < fewbit.saved_bytes(blocks, x).total
    plain(x).sum().backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())


# -- tensors without memory --------------------------------------------------------------------------------


ABSTRACT = {
    "blocks": (
        lambda: PreActivationResNet(11, block=partial(PreActivation, bits=3)),
        (2, 3, 32, 32),
    ),
    "network": (lambda: PreActivationResNet(11), (2, 3, 32, 32)),
    "in place": (lambda: nn.Sequential(Residual(inplace=True)), (3, 6, 7, 5)),
    "functions": (functions, (3, 6, 7, 5)),
    "attention": (partial(projections, attended, "qkvab"), (2, 16, 96)),
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("fuse", ("blocks", None, "preactivation"))
@pytest.mark.parametrize("name", ABSTRACT)
@pytest.mark.parametrize("mode", ("meta", "fake"))
def test_models_without_memory_keep_as_much(mode, name, fuse):
    """Bytes of each module are those of the real model, and backward returns gradients of the right sizes."""
    make, shape = ABSTRACT[name]

    def build():
        torch.manual_seed(0)
        model, x = make(), torch.randn(shape)
        if fuse != "blocks":
            bits = fewbit.PreActivationBits(4) if fuse == "preactivation" else 4
            fewbit.compress_(model, bits, verbose=False)
        return model, x

    model, x = build()
    real = fewbit.saved_bytes(model, x)
    with torch.device("meta") if mode == "meta" else FakeTensorMode():
        model, x = build()
        found = fewbit.saved_bytes(model, x)
        assert found.by_module() == real.by_module()
        assert found.by_kind() == real.by_kind()
        model(x.requires_grad_()).sum().backward()
    for tensor in (x, *model.parameters()):
        assert tensor.grad.shape == tensor.shape and tensor.grad.stride() == tensor.stride()
