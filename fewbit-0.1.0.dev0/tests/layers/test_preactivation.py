"""The pre-activation block: its one fixed-point tensor, its exact gradients, and its conversion in models."""

import copy
import pickle
from functools import partial

import pytest
import torch
from layers import LAST, LAST_3D, gradients, relative, saved_by
from samples import normal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.errors import GradientError, InputError
from fewbit.models.preactivation import DEPTHS, Block, PreActivationResNet
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


def placed(norm, x):
    """Weight and bias in a shape that broadcasts to x, the dimensions of a mean, and how many numbers are kept."""
    if isinstance(norm, nn.LayerNorm):
        dims = tuple(range(-len(norm.normalized_shape), 0))
        weight, bias = norm.weight, norm.bias
        rows = x[0, ...].numel() // norm.weight.numel() * len(x)
    else:
        dims = tuple(dim for dim in range(x.dim()) if dim != 1)
        shape = 1, -1, *[1] * (x.dim() - 2)
        weight, bias = (
            None if vector is None else vector.view(shape) for vector in (norm.weight, norm.bias)
        )
        rows = x.shape[1]
    weight = torch.ones(1) if weight is None else weight.detach()
    bias = torch.zeros(1) if bias is None else bias.detach()
    return weight.double(), bias.double(), dims, rows


def restored(x, y, weight, bias, bits):
    """x~ from its code, in float64, by the definition in `fewbit.runtime.ops.fixed_point`."""
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
    """Gradients are compared with exact backpropagation of the same forward, with x~^ in the terms made from it."""
    ours, theirs, x = make(name, bits, device)
    y, (grad_x, *grads) = gradients(ours, x)
    expected_y, (exact_x, *exact) = gradients(theirs, x)
    torch.testing.assert_close(y, expected_y, rtol=0, atol=0)
    names = [name for name, _ in ours.named_parameters()]
    ours, exact = dict(zip(names, grads, strict=True)), dict(zip(names, exact, strict=True))
    norm, activation, linear = copy.deepcopy(theirs).double().cpu()
    x = x.double().cpu()
    weight, bias, dims, _ = placed(norm, x)
    mean, var = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
    normalized = (x - mean) / (var + norm.eps).sqrt()
    pre = normalized * weight + bias
    copied = restored(normalized, pre, weight, bias, bits)
    # What flows through the linear layer and the activation does not know of the copy.
    grad = torch.empty_like(y).copy_(normal(y.shape, y.dtype, device, 1.0, 7)).double().cpu()
    leaf = pre.clone().requires_grad_()
    out = linear(activation(leaf * 1.0))
    (of_pre,) = torch.autograd.grad(out, leaf, grad)
    if norm.bias is not None:
        torch.testing.assert_close(ours["norm.bias"], exact["norm.bias"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["linear.bias"], exact["linear.bias"], rtol=1e-5, atol=1e-5)
    (of_linear,) = torch.autograd.grad(
        linear(activation(copied * weight + bias)), linear.weight, grad
    )
    assert relative(ours["linear.weight"].cpu(), of_linear) < 1e-4
    if norm.weight is not None:
        of_weight = (copied * of_pre).sum(
            [d for d in range(x.dim()) if weight.shape[d - x.dim()] == 1]
            if not isinstance(norm, nn.LayerNorm)
            else list(range(x.dim() - len(dims)))
        )
        assert relative(ours["norm.weight"].cpu().view(-1), of_weight.reshape(-1)) < 1e-4
    # All of the input's gradient is exact but for the term of the variance.
    g = of_pre * weight
    rstd = (var + norm.eps).rsqrt()
    with_copy = (
        g - g.mean(dims, keepdim=True) - copied * (copied * g).mean(dims, keepdim=True)
    ) * rstd
    as_exact = (
        g - g.mean(dims, keepdim=True) - normalized * (normalized * g).mean(dims, keepdim=True)
    ) * rstd
    assert relative(exact_x.cpu(), as_exact) < 1e-4
    assert relative(grad_x.cpu(), with_copy) < 1e-4
    off = (
        normalized * (normalized * g).mean(dims, keepdim=True)
        - copied * (copied * g).mean(dims, keepdim=True)
    ) * rstd
    assert relative(grad_x.cpu() - exact_x.cpu(), off) < 2e-2


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_k_an_element_and_vectors(name, bits, device):
    block, _, x = make(name, bits, device)
    rows = placed(block.norm, x)[3]
    kept = 4 * packed_words(x.numel(), bits) + 4 * rows
    assert fewbit.saved_bytes(block, x.clone().requires_grad_()).total == kept
    if block.norm.weight is not None:  # of which a gradient is asked for
        assert fewbit.saved_bytes(block, x).total == kept


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


def test_evaluation_is_torchs_own():
    block, theirs, x = make("BatchNorm2d Conv2d")
    block.eval(), theirs.eval()
    check(block, theirs, x, 0)
    with torch.no_grad():
        torch.testing.assert_close(block.train()(x), theirs.train()(x), rtol=0, atol=0)
    for ours, exact in zip(block.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(ours, exact)


def test_a_frozen_norm_leaves_each_layer_to_itself():
    block, theirs, x = make("BatchNorm2d Conv2d", 8)
    block.norm.eval(), theirs[0].eval()
    check(block, theirs, x, 0.01)


def test_frozen_parameters():
    block, theirs, x = make("BatchNorm2d Conv2d", 8)
    for parameter in (block.linear.weight, theirs[2].weight, block.norm.bias, theirs[0].bias):
        parameter.requires_grad_(False)
    check(block, theirs, x, 0.05)
    assert fewbit.saved_bytes(block, x).total == 4 * packed_words(x.numel(), 8) + 4 * 6


def test_second_derivatives_are_refused():
    block, _, x = make("BatchNorm2d Conv2d")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(GradientError):
        grad.sum().backward()


def test_batches_of_gradients():
    block, _, x = make("LayerNorm ReLU", 8)
    x.requires_grad_()
    y = block.activation(block.norm(x))  # outside of the block nothing is shared
    y = block(x)
    grads = normal((3, *y.shape), seed=1)
    (batched,) = torch.autograd.grad(y, x, grads, retain_graph=True, is_grads_batched=True)
    for grad, ours in zip(grads, batched, strict=True):
        (one,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))))
def test_copies(copied):
    block, _, x = make("BatchNorm2d Conv2d")
    other = copied(block)
    assert other.norm.quantizer.context is other.linear.quantizer.context
    assert other.norm.quantizer.context is not block.norm.quantizer.context
    assert fewbit.saved_bytes(other, x).total == fewbit.saved_bytes(block, x).total
    check(other, block, x, 0)


def test_what_is_not_taken():
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


@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("functions", (False, True))
def test_branches_share_what_the_norm_keeps(functions, inplace, device):
    torch.manual_seed(0)
    model = Residual(functions, inplace).to(device)
    exact = copy.deepcopy(model)
    x = normal((3, 6, 7, 5), device=device)
    fewbit.compress_(model, bits=fewbit.PreActivationBits(8), verbose=False)
    assert fewbit.saved_bytes(model, x).total == 4 * packed_words(x.numel(), 8) + 4 * 6
    check(model, exact, x, 0.02)


def test_layers_after_a_layer_norm_share_its_copy_whatever_their_bits_are():
    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(96)
            self.q, self.k, self.v = (nn.Linear(96, 32) for _ in range(3))

        def forward(self, x):
            y = self.norm(x)
            return self.q(y) + self.k(y) * 2 + self.v(y) * 3

    torch.manual_seed(0)
    model = Projections()
    exact = copy.deepcopy(model)
    x = normal((2, 5, 96), scale=1.0)
    fewbit.compress_(model, bits=fewbit.PreActivationBits(8), overrides={"q": 2}, verbose=False)
    assert fewbit.saved_bytes(model, x).total == 4 * packed_words(x.numel(), 8) + 4 * 10
    check(model, exact, x, 0.03)


class Called(nn.Module):
    """A model whose forward calls everything as functions."""

    def __init__(self):
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(6, 6, 3, bias=False), nn.Linear(15, 8, bias=False)
        self.weight, self.bias = nn.Parameter(torch.rand(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        y = nn.functional.batch_norm(x, None, None, self.weight, self.bias, True)
        z = nn.functional.conv2d(nn.functional.leaky_relu(y, 0.1), self.convolution.weight)
        z = nn.functional.layer_norm(z.flatten(2), (15,))
        return nn.functional.linear(z, self.linear.weight)


def test_functions_that_a_forward_calls():
    torch.manual_seed(0)
    model, x = Called(), normal((3, 6, 7, 5))
    exact = copy.deepcopy(model)
    fewbit.compress_(model, bits=fewbit.PreActivationBits(8), verbose=False)
    kept = 4 * packed_words(x.numel(), 8) + 4 * 6 + 4 * packed_words(18 * 15, 8) + 4 * 18
    assert fewbit.saved_bytes(model, x).total == kept
    check(model, exact, x, 0.05)


def chain(depth=3):
    torch.manual_seed(0)
    units = [
        Block(nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1, bias=False)) for _ in range(depth)
    ]
    return nn.Sequential(*units)


def test_a_conversion_and_blocks_are_the_same():
    model = chain()
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


def test_restored():
    model = chain()
    exact = copy.deepcopy(model)
    x = normal((3, 6, 7, 5))
    fewbit.compress_(model, bits=fewbit.PreActivationBits(3), verbose=False)
    fewbit.restore_(model)
    assert type(model[0].norm) is nn.BatchNorm2d and type(model[0].activation) is nn.ReLU
    check(model, exact, x, 0)


def test_without_fuse_nothing_changes():
    model, x = chain(), normal((3, 6, 7, 5))
    fewbit.compress_(model, bits=fewbit.PreActivationBits(4), verbose=False)
    controller = fewbit.compress_(model, bits=4, verbose=False)
    assert "fixed point" not in str(controller.report)
    _, saved = saved_by(model, x)
    assert (
        sum(tensor.dtype == torch.int32 for tensor in saved) == 9
    )  # a copy and codes for each layer


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


def test_what_a_conversion_refuses():
    for options, text in (
        ({"layers": {"copies": 2}}, "layers: expected copies=1 with PreActivationBits, got 2"),
        (
            {"overrides": {"0": {"copies": 2}}},
            "overrides.*: expected copies=1 with PreActivationBits",
        ),
        ({"layers": {"attention_bits": 1.5}}, "layers: expected a whole number from 1 to 8"),
    ):
        model = chain()
        with pytest.raises(InputError, match=text):
            fewbit.compress_(model, fewbit.PreActivationBits(), **options, verbose=False)
        assert type(model[0].norm) is nn.BatchNorm2d


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("as_function", (False, True))
def test_checkpoints(reentrant, as_function):
    """The recomputation of a region saves the same as the first forward."""

    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.unit = chain(1)

        def forward(self, x):
            def run(x):
                unit = self.unit[0]
                return unit.linear(unit.activation(unit.norm(x)))

            return checkpoint(run if as_function else self.unit, x, use_reentrant=reentrant)

    def gradients(model):
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        return [leaf.grad, *(parameter.grad for parameter in model.parameters())]

    model, x = Region(), normal((3, 6, 7, 5))
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


def test_a_block_in_a_checkpoint():
    block, _, x = make("BatchNorm2d Conv2d")

    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    check(Region(), block, x, 0)


def test_autocast():
    model = chain()
    exact = copy.deepcopy(model)
    x = normal((3, 6, 7, 5))
    fewbit.compress_(model, bits=fewbit.PreActivationBits(8), verbose=False)
    with torch.autocast("cpu", torch.bfloat16):
        check(model, exact, x, 0.1)
        _, saved = saved_by(model, x)
    assert sum(tensor.dtype == torch.int32 for tensor in saved) == 3


def test_a_change_in_place_is_not_taken_for_what_the_norm_keeps():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(96), nn.Linear(96, 8)

        def forward(self, x):
            return self.linear(self.norm(x).mul_(2.0))

    torch.manual_seed(0)
    model, x = Scaled(), normal((9, 96))
    exact = copy.deepcopy(model)
    fewbit.compress_(model, bits=fewbit.PreActivationBits(8), verbose=False)
    check(model, exact, x, 0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec")
def test_a_compiled_block_is_right():
    torch.compiler.reset()
    block, theirs, x = make("BatchNorm2d Conv2d", 8)
    compiled = torch.compile(block, backend="aot_eager")
    y, ours = gradients(compiled, x)
    expected, exact = gradients(theirs, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert all(relative(a, b) < 0.05 for a, b in zip(ours, exact, strict=True))


# -- models ------------------------------------------------------------------------------------------------


@pytest.mark.fast(1)
@pytest.mark.parametrize("depth", DEPTHS)
def test_depths_count_layers(depth):
    with torch.device("meta"):
        model = PreActivationResNet(depth)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


def test_other_depths_are_refused():
    for depth in (2, 100, 1000):
        with pytest.raises(InputError, match="expected 9 n \\+ 2 for depth"):
            PreActivationResNet(depth)


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


class Attentive(nn.Module):
    """A model in which three layers use a layer norm's result, and two an input that no norm made."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(96)
        self.q, self.k, self.v = (nn.Linear(96, 96) for _ in range(3))
        self.a, self.b = nn.Linear(96, 32), nn.Linear(96, 32)

    def forward(self, x):
        y = self.norm(x)
        z = nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))
        return self.a(z) + self.b(z)


ABSTRACT = {
    "blocks": (
        lambda: PreActivationResNet(11, block=partial(PreActivation, bits=3)),
        (2, 3, 32, 32),
    ),
    "network": (lambda: PreActivationResNet(11), (2, 3, 32, 32)),
    "in place": (lambda: nn.Sequential(Residual(inplace=True)), (3, 6, 7, 5)),
    "functions": (Called, (3, 6, 7, 5)),
    "attention": (Attentive, (2, 16, 96)),
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
