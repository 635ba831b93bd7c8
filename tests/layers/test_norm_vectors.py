"""Weights, biases and statistics of norms: any strides, missing ones, other dtypes, empty batches, refusals."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from composed import Composed
from expectation import covariance, pooled_z, signed_z
from layers import first, gradients, relative
from samples import normal
from torch import nn

import fewbit
import fewbit.functional as F

torch_f = torch.nn.functional

CHANNELS = 12
SHAPES = {
    "layer_norm": [(5, CHANNELS), (4, 3, CHANNELS)],
    "rms_norm": [(5, CHANNELS), (4, 3, CHANNELS)],
    "group_norm": [(5, CHANNELS), (4, CHANNELS, 7), (4, CHANNELS, 3, 5)],
    "batch_norm": [(7, CHANNELS), (4, CHANNELS, 7), (4, CHANNELS, 3, 5)],
    "instance_norm": [(4, CHANNELS, 9), (4, CHANNELS, 3, 5)],
}
INPUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "sliced": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
VECTORS = {
    "whole": lambda c: normal((c,), scale=1.0, seed=c),
    "column": lambda c: normal((c, 2), scale=1.0, seed=c)[:, 1],
    "every third": lambda c: normal((3 * c,), scale=1.0, seed=c)[::3],
    "expanded": lambda c: normal((1,), scale=1.0, seed=c + 1).expand(c),
    "none": lambda c: None,
}
NORMS = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]
BY_NAME = {"ids": [f"{name} {shape}" for name, shape in NORMS]}


def call(functions, name, x, weight, bias, channels=CHANNELS, groups=2, **ours):
    """Return the result of the norm of that name, with statistics of the batch."""
    if name == "layer_norm":
        return functions.layer_norm(x, (channels,), weight, bias, **ours)
    if name == "rms_norm":
        return functions.rms_norm(x, (channels,), weight, **ours)
    if name == "group_norm":
        return functions.group_norm(x, groups, weight, bias, **ours)
    if name == "batch_norm":
        return functions.batch_norm(x, None, None, weight, bias, True, **ours)
    return functions.instance_norm(x, None, None, weight, bias, **ours)


def as_leaf(tensor):
    """Return a leaf with the same strides and storage: an expanded one stays expanded."""
    return None if tensor is None else tensor.detach().requires_grad_()


def results(function, name, x, weight, bias, grad, **ours):
    """Return y, and the gradients of x and of the vectors, in float64."""
    y = function(name, x, weight, bias, **ours)
    leaves = [x, weight] if name == "rms_norm" else [x, weight, bias]
    leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [y.detach().double(), *map(torch.Tensor.double, torch.autograd.grad(y, leaves, grad))]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("name, shape", NORMS, **BY_NAME)
def test_vectors_of_any_strides(name, shape, layout, copies):
    x = as_leaf(INPUTS[layout](normal(shape, scale=1.0)))
    grad = normal(shape, scale=1.0, seed=3)
    for weight, bias in zip(VECTORS, [*VECTORS][1:] + [*VECTORS][:1], strict=True):
        vectors = [as_leaf(VECTORS[kind](CHANNELS)) for kind in (weight, bias)]
        torch.manual_seed(1)
        ours = results(partial(call, F), name, x, *vectors, grad, bits=8, copies=copies)
        # torch's own batch norm of two dimensions is wrong with strides, and its group norm needs a weight.
        plain = [
            other if tensor is None else as_leaf(tensor.contiguous())
            for tensor, other in zip(
                vectors, (torch.ones(CHANNELS), torch.zeros(CHANNELS)), strict=True
            )
        ]
        theirs = results(partial(call, torch_f), name, as_leaf(x.contiguous()), *plain, grad)
        assert relative(ours[0], theirs[0]) < 1e-6, (weight, bias)
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            assert relative(a, b) < 0.05, (weight, bias)


def with_columns(model, x):
    """Return the result of a norm whose weight and bias are columns of one parameter, and of a layer behind it."""
    weight, bias = model.vectors[:, 0], model.vectors[:, 1]
    if model.as_contiguous:  # torch's own batch norm of two dimensions is wrong with others
        weight, bias = weight.contiguous(), bias.contiguous()
    y = call(torch_f, model.name, x, weight, bias)
    return model.last(y if y.shape[-1] == CHANNELS else y.movedim(1, -1))


@pytest.mark.parametrize("bits", [8, fewbit.PreActivationBits(8)], ids=repr)
@pytest.mark.parametrize("name, shape", NORMS, **BY_NAME)
def test_columns_of_a_parameter_in_a_compressed_model(name, shape, bits):
    torch.manual_seed(0)
    vectors = nn.Parameter(normal((CHANNELS, 2), scale=0.3) + 1.0)
    parts = {"name": name, "as_contiguous": True, "vectors": vectors}
    model = Composed(with_columns, last=nn.Linear(CHANNELS, 4), **parts)
    x = normal(shape, scale=1.0).requires_grad_()
    exact = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    fewbit.compress_(model, bits)
    model.as_contiguous = False
    ours = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    for a, b in zip(ours, exact, strict=True):
        assert relative(a, b) < 0.05


@pytest.mark.parametrize("statistics", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_running_statistics_as_torch(name, training, strided, statistics):
    def run(functions, **ours):
        x = normal((4, CHANNELS, 9), scale=1.0).requires_grad_()
        both = (normal((2, CHANNELS), scale=0.2) + 1.0).to(statistics)
        mean, var = both.t().contiguous().t() if strided else both
        weight = VECTORS["whole"](CHANNELS)
        try:
            y = getattr(functions, name)(x, mean, var, weight, None, training, **ours)
        except RuntimeError as refusal:
            return refusal, None, None
        return y, both, torch.autograd.grad(y, x, normal(x.shape, seed=3))[0]

    (y, both, grad), (expected, updated, gradient) = run(F, bits=8), run(torch_f)
    if isinstance(expected, RuntimeError):
        assert str(y) == str(expected)
        return
    assert torch.equal(y, expected) and torch.equal(both, updated)
    assert relative(grad, gradient) < 0.05


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_running_statistics_take_no_gradient(name, training):
    x = normal((4, CHANNELS, 9)).requires_grad_()
    mean, var = torch.zeros(CHANNELS, requires_grad=True), torch.ones(CHANNELS)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument"):
        getattr(F, name)(x, mean, var, None, None, training).sum().backward()


REFUSED = {
    "a value a group": lambda: torch.ones(2),
    "one value": lambda: torch.ones(1),
    "a number": lambda: torch.ones(()),
    "a row": lambda: torch.ones(1, CHANNELS),
    "a column": lambda: torch.ones(CHANNELS, 1),
    "float64": lambda: torch.ones(CHANNELS, dtype=torch.float64),
    "float16": lambda: torch.ones(CHANNELS, dtype=torch.float16),
    "integers": lambda: torch.ones(CHANNELS, dtype=torch.int64),
}


@pytest.mark.parametrize("last", [False, True], ids=["", "channels last"])
@pytest.mark.parametrize("vector", REFUSED)
@pytest.mark.parametrize("name", SHAPES)
def test_vectors_are_refused_as_torch_refuses_them(name, vector, last):
    shape = (4, 3, 5, CHANNELS) if name in ("layer_norm", "rms_norm") else (4, CHANNELS, 3, 5)

    def outcome(functions, weight, bias):
        x = normal(shape, scale=1.0)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        try:
            with warnings.catch_warnings():  # torch says which of its kernels it cannot use
                warnings.simplefilter("ignore")
                y = call(functions, name, x.requires_grad_(), weight, bias)
        except (RuntimeError, TypeError, ValueError, IndexError) as refusal:
            return type(refusal)
        return y.shape, y.dtype

    other, whole = REFUSED[vector](), torch.ones(CHANNELS)
    for vectors in ((other, other), (other, None), (None, other), (other, whole), (whole, other)):
        assert outcome(F, *vectors) == outcome(torch_f, *vectors)


ADDING = {
    "in place": lambda bias: bias.detach().add_(3.0),
    "to the data": lambda bias: bias.data.add_(3.0),
    "other data": lambda bias: setattr(bias, "data", bias.data + 3.0),
}


@pytest.mark.parametrize("add", ADDING.values(), ids=ADDING)
@pytest.mark.parametrize("is_early", [False, True], ids=["after", "before the layer"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_bias_of_batch_norm_may_change_before_backward(dims, is_early, add):
    """The layer after the norm uses the norm's copy and bias, unless the bias has changed before the layer runs."""
    torch.manual_seed(0)
    norm, layer = getattr(nn, f"BatchNorm{dims}d"), getattr(nn, f"Conv{dims}d")
    model = nn.Sequential(norm(4), nn.Identity(), layer(4, 5, 2))
    x = normal((3, 4, *[5] * dims), scale=1.0).requires_grad_()

    def gradients():
        def change(module, inputs, y):
            add(model[0].bias)

        handle = model[1].register_forward_hook(change) if is_early else None
        y = model(x)
        if handle is None:
            add(model[0].bias)
        else:
            handle.remove()
        grads = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        with torch.no_grad():
            model[0].bias.sub_(3.0)
        return grads

    exact = gradients()
    fewbit.compress_(model, bits=8)
    for a, b in zip(gradients(), exact, strict=True):
        assert relative(a, b) < 0.05


@pytest.mark.parametrize("vector", ["weight", "bias"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_vectors_that_change_through_data_before_the_next_layer(norm, vector):
    """The next layer then saves a copy of the norm's result, which torch saves, too."""
    torch.manual_seed(0)
    model, x = nn.Sequential(norm(64), nn.Identity(), nn.Linear(64, 8)), normal((32, 64), scale=1.0)

    def change(*_):
        getattr(model[0], vector).data.add_(1.0)

    def gradient():
        nn.init.ones_(model[0].weight), nn.init.zeros_(model[0].bias)
        return torch.autograd.grad(model(x).square().sum(), model[2].weight)[0]

    model[1].register_forward_hook(change)
    exact = gradient()
    fewbit.compress_(model, 8, verbose=False)
    assert relative(gradient(), exact) < 0.02


# torch's own rms_norm warns once in a process, in whichever test comes first.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name, shape", NORMS, **BY_NAME)
def test_vectors_of_other_dtypes_under_autocast_as_torch(name, shape, dtype):
    vectors = [VECTORS[kind](CHANNELS) for kind in ("column", "every third")]

    def run(functions, vectors, **ours):
        x, grad = (normal(shape, dtype, scale=1.0, seed=seed) for seed in (1, 3))
        leaves = as_leaf(x), *map(as_leaf, vectors)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                return results(partial(call, functions), name, *leaves, grad, **ours)
        except RuntimeError as refusal:
            return str(refusal)

    # With strided vectors, torch's own batch norm of two dimensions is wrong.
    ours, theirs = run(F, vectors, bits=8), run(torch_f, [v.contiguous() for v in vectors])
    if isinstance(theirs, str):
        assert ours == theirs
        return
    assert torch.equal(ours[0], theirs[0])
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert relative(a, b) < 0.05


@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 4)])
@pytest.mark.parametrize("name", SHAPES)
def test_sizes_of_one_as_torch(name, shape):
    channels = shape[-1] if name in ("layer_norm", "rms_norm") else shape[1]

    def run(functions):
        x = normal(shape, scale=1.0).requires_grad_()
        weight = torch.ones(channels, requires_grad=True)
        try:
            y = call(functions, name, x, weight, None, channels, channels)
        except ValueError as refusal:
            return str(refusal)
        grads = torch.autograd.grad(y.sum(), [x, weight])
        assert all(grad.isfinite().all() for grad in grads)
        return y.tolist(), y.stride(), [grad.shape for grad in grads]

    assert run(F) == run(torch_f)


def test_rms_norm_of_another_shape():
    for shape in [(3,), (2, 6), (), (1, 4, 6)]:
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            torch_f.rms_norm(normal((4, 6)).requires_grad_(), shape)
        with pytest.raises((RuntimeError, ValueError)) as ours:
            F.rms_norm(normal((4, 6)).requires_grad_(), shape)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fewbit.nn.RMSNorm(3, elementwise_affine=False)(normal((2, 6)).requires_grad_())


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_two_dtypes(device, dtype, weight_dtype):
    """Small inputs show which epsilon is the default."""
    x = normal((6, 70), dtype, device, scale=1e-4)
    weight = normal((70,), weight_dtype, device, seed=2).requires_grad_()
    ours = F.rms_norm(x, (70,), weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype")
        theirs = torch_f.rms_norm(x, (70,), weight)
    torch.testing.assert_close(ours, theirs)


# -- bias -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "draws"),
    [
        ("uniform", 600),
        pytest.param("rotated", 4000, marks=pytest.mark.slow),
    ],
)
def test_the_bias_of_a_norm_with_one_copy(kind, draws, monkeypatch):
    """The bias is -Cov g / (N s), and nothing else (long version of ActNN, appendix B.2).

    In a uniform copy, elements are rounded independently, and this is -g Var / (N s) elementwise. The bias of rotated
    copies is smaller, so more draws are needed to see it.
    """
    (layer,) = first("LayerNorm")
    _, theirs = layer.pair(2, dtype=torch.float64)
    x = layer.input().double()
    torch.manual_seed(0)
    # Equal rows are restored exactly from the means of channels.
    monkeypatch.setattr("fewbit.runtime.format.channels.LEAST_ROWS", 10**9)
    many = x.repeat(draws, 1).requires_grad_()  # each row has groups of its own
    weights = theirs.weight.detach(), theirs.bias.detach()
    y = F.layer_norm(many, (96,), *weights, bits=2, quantizer=kind)
    grad = normal(x.shape, torch.float64, scale=1.0, seed=7)
    samples = torch.autograd.grad(y, many, grad.repeat(draws, 1))[0].view(draws, *x.shape)
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
    assert bias.norm() / exact[0].norm() < {"uniform": 0.02, "rotated": 0.005}[kind]  # and small
