"""Weights, biases and statistics of norms: any strides, missing ones, other dtypes, empty batches, refusals."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from layers import relative
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


def call(functions, name, x, weight, bias, **ours):
    """The norm of that name, with statistics of the batch."""
    if name == "layer_norm":
        return functions.layer_norm(x, (CHANNELS,), weight, bias, **ours)
    if name == "rms_norm":
        return functions.rms_norm(x, (CHANNELS,), weight, **ours)
    if name == "group_norm":
        return functions.group_norm(x, 2, weight, bias, **ours)
    if name == "batch_norm":
        return functions.batch_norm(x, None, None, weight, bias, True, **ours)
    return functions.instance_norm(x, None, None, weight, bias, **ours)


def written_out(name, x, weight, bias):
    """The same in plain operations, of which torch knows the derivatives whatever the strides."""
    if name in ("layer_norm", "rms_norm"):
        grouped, dims, channels = x, (-1,), (CHANNELS,)
    else:
        channels = (1, CHANNELS, *[1] * (x.dim() - 2))
        groups = {"group_norm": 2, "instance_norm": CHANNELS, "batch_norm": CHANNELS}[name]
        grouped = x.reshape(len(x), groups, -1)
        dims = (0, 2) if name == "batch_norm" else (2,)
    mean = 0.0 if name == "rms_norm" else grouped.mean(dims, keepdim=True)
    eps = torch.finfo(torch.float32).eps if name == "rms_norm" else 1e-5
    square = (grouped - mean).square().mean(dims, keepdim=True)
    y = ((grouped - mean) / (square + eps).sqrt()).reshape(x.shape)
    y = y if weight is None else y * weight.view(channels)
    return y if bias is None or name == "rms_norm" else y + bias.view(channels)


def as_leaf(tensor, needs=True):
    """A leaf with the same strides, storage and all: expanded ones stay expanded."""
    return None if tensor is None else tensor.detach().requires_grad_(needs)


def results(function, name, x, weight, bias, grad, **ours):
    """(y, gradients of those of x, weight and bias that need one), in float64."""
    y = function(name, x, weight, bias, **ours)
    leaves = [tensor for tensor in (x, weight, bias) if tensor is not None and tensor.requires_grad]
    used = leaves[:-1] if name == "rms_norm" and bias is not None and bias.requires_grad else leaves
    return [y.detach().double(), *map(torch.Tensor.double, torch.autograd.grad(y, used, grad))]


def of(functions):
    return lambda name, *tensors, **ours: call(functions, name, *tensors, **ours)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("name, shape", NORMS, **BY_NAME)
def test_vectors_of_any_strides(name, shape, layout, copies):
    x = as_leaf(INPUTS[layout](normal(shape, scale=1.0)))
    grad = normal(shape, scale=1.0, seed=3)
    for weight, bias in itertools.product(VECTORS, VECTORS):
        vectors = [as_leaf(VECTORS[kind](CHANNELS)) for kind in (weight, bias)]
        torch.manual_seed(1)
        ours = results(of(F), name, x, *vectors, grad, bits=8, copies=copies)
        exact = [tensor if tensor is None else as_leaf(tensor.double()) for tensor in (x, *vectors)]
        theirs = results(written_out, name, *exact, grad.double())
        assert relative(ours[0], theirs[0]) < 1e-6, (weight, bias)
        for number, (a, b) in enumerate(zip(ours[1:], theirs[1:], strict=True)):
            # The expanded vector itself is the leaf, so its gradient has one entry for each channel.
            assert relative(a, b) < 0.05, (weight, bias, number)


@pytest.mark.parametrize("name, shape", NORMS, **BY_NAME)
def test_each_of_input_weight_and_bias_may_need_a_gradient(name, shape):
    grad = normal(shape, scale=1.0, seed=3)
    for needs in itertools.product((False, True), repeat=3):
        if not any(needs[: 2 if name == "rms_norm" else 3]):
            continue
        vectors = VECTORS["column"](CHANNELS), VECTORS["every third"](CHANNELS)
        tensors = [
            as_leaf(tensor, need)
            for tensor, need in zip((normal(shape, scale=1.0), *vectors), needs, strict=True)
        ]
        ours = results(of(F), name, *tensors, grad, bits=8)
        exact = [
            as_leaf(tensor.double(), need) for tensor, need in zip(tensors, needs, strict=True)
        ]
        theirs = results(written_out, name, *exact, grad.double())
        assert len(ours) == len(theirs) > 1
        for a, b in zip(ours, theirs, strict=True):
            assert relative(a, b) < 0.05, needs


class Pair(nn.Module):
    """A norm whose weight and bias are the columns of one parameter, and a layer behind it."""

    as_contiguous = True

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.vectors = nn.Parameter(normal((CHANNELS, 2), scale=0.3) + 1.0)
        self.last = nn.Linear(CHANNELS, 4)

    def forward(self, x):
        weight, bias = self.vectors[:, 0], self.vectors[:, 1]
        if self.as_contiguous:  # torch's own 2-D batch norm is wrong with others
            weight, bias = weight.contiguous(), bias.contiguous()
        y = call(torch_f, self.name, x, weight, bias)
        return self.last(y if y.shape[-1] == CHANNELS else y.movedim(1, -1))


@pytest.mark.parametrize("bits", [8, fewbit.PreActivationBits(8)], ids=repr)
@pytest.mark.parametrize("name, shape", NORMS, **BY_NAME)
def test_columns_of_a_parameter_in_a_compressed_model(name, shape, bits):
    torch.manual_seed(0)
    model, x = Pair(name), normal(shape, scale=1.0).requires_grad_()
    exact = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    fewbit.compress_(model, bits)
    model.as_contiguous = False
    ours = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    for a, b in zip(ours, exact, strict=True):
        assert relative(a, b) < 0.05


@pytest.mark.parametrize("bits", [8, fewbit.PreActivationBits(8)], ids=repr)
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.BatchNorm1d, nn.GroupNorm, nn.RMSNorm])
def test_vectors_of_modules_of_any_strides(kind, bits):
    torch.manual_seed(0)
    arguments = (2, CHANNELS) if kind is nn.GroupNorm else (CHANNELS,)
    model = nn.Sequential(kind(*arguments), nn.ReLU(), nn.Linear(CHANNELS, 4))
    for name, parameter in list(model[0].named_parameters()):
        strided = (normal((CHANNELS, 2), scale=0.3) + 1.0)[:, 1]
        assert not strided.is_contiguous() and strided.shape == parameter.shape
        setattr(model[0], name, nn.Parameter(strided))
    x = normal((7, CHANNELS), scale=1.0).t().contiguous().t().requires_grad_()
    expected = [model[0].weight.detach().double(), getattr(model[0], "bias", None)]
    name = {nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm", nn.GroupNorm: "group_norm"}
    leaf = as_leaf(x.double())
    weight = as_leaf(expected[0])
    bias = None if expected[1] is None else as_leaf(expected[1].double())
    y = written_out(name.get(kind, "batch_norm"), leaf, weight, bias).relu()
    y = torch_f.linear(y, model[2].weight.detach().double(), model[2].bias.detach().double())
    vectors = [vector for vector in (weight, bias) if vector is not None]
    exact = torch.autograd.grad(y.square().sum(), [leaf, *vectors])
    fewbit.compress_(model, bits)
    ours = torch.autograd.grad(model(x).square().sum(), [x, *model[0].parameters()])
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


EMPTY = [(0, CHANNELS), (0, CHANNELS, 4), (0, CHANNELS, 3, 3), (2, CHANNELS, 0), (0, CHANNELS, 0)]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("name", SHAPES)
def test_empty_batches_as_torch(name, shape, affine):
    if name in ("layer_norm", "rms_norm"):
        shape = (*shape[:1], *shape[2:], CHANNELS)

    def run(functions):
        x = torch.zeros(shape, requires_grad=True)
        weight, bias = (torch.ones(CHANNELS, requires_grad=True) for _ in "ab")
        vectors = (weight, bias) if affine else (None, None)
        try:
            y = call(functions, name, x, *vectors)
            y.sum().backward()
        except (RuntimeError, ValueError, IndexError) as refusal:
            return str(refusal)
        grads = [tensor.grad for tensor in (x, weight, bias)]
        return y.shape, y.stride(), [None if g is None else (g.shape, g.stride()) for g in grads]

    assert run(F) == run(torch_f)


def test_no_channels_in_one_dimension():
    x = torch.zeros(0, requires_grad=True)
    F.batch_norm(x, torch.zeros(0), torch.ones(0), training=True).sum().backward()
    assert x.grad.shape == (0,)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", [8, fewbit.PreActivationBits(8)], ids=repr)
def test_empty_batches_of_modules(affine, bits):
    x = torch.zeros(0, 3, requires_grad=True)
    fewbit.nn.BatchNorm1d(3, affine=affine)(x).sum().backward()
    assert x.grad.shape == (0, 3)
    model = nn.Sequential(nn.BatchNorm1d(3, affine=affine), nn.ReLU(), nn.Linear(3, 2))
    fewbit.compress_(model, bits)
    model(x).sum().backward()
    assert not model[2].weight.grad.any() and model[0].num_batches_tracked == 1


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


# torch's own rms_norm warns once in a process, in whichever test comes first.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name, shape", NORMS, **BY_NAME)
def test_vectors_of_other_dtypes_under_autocast_as_torch(name, shape, dtype):
    def run(functions, **ours):
        x = normal(shape, dtype, scale=1.0).requires_grad_()
        vectors = [as_leaf(VECTORS[kind](CHANNELS)) for kind in ("column", "every third")]
        with torch.autocast("cpu", torch.bfloat16):
            try:
                return results(
                    of(functions), name, x, *vectors, normal(shape, dtype, seed=3), **ours
                )
            except RuntimeError as refusal:
                return str(refusal)

    ours, theirs = run(F, bits=8), run(_Contiguous)
    if isinstance(theirs, str):
        assert ours == theirs
        return
    assert torch.equal(ours[0], theirs[0])
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert relative(a, b) < 0.05


class _Contiguous:
    """torch's functions with contiguous vectors: with others its 2-D batch norm is wrong as well."""

    def __getattr__(self, name):
        def function(x, *arguments):
            arguments = [
                argument.contiguous() if isinstance(argument, torch.Tensor) else argument
                for argument in arguments
            ]
            return getattr(torch_f, name)(x, *arguments)

        return function


_Contiguous = _Contiguous()


@pytest.mark.parametrize("shape", [(4, CHANNELS), (4, CHANNELS, 3, 5), (0, CHANNELS, 3)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_of_the_bias_alone_of_group_norm(shape, last, dtype):
    x, grad = (normal(shape, dtype, scale=1.0, seed=seed) for seed in (1, 3))
    bias = as_leaf(VECTORS["column"](CHANNELS).to(dtype))
    y = F.group_norm(INPUTS["channels last"](x) if last else x, 2, None, bias)
    sums = grad.double().sum([dim for dim in range(grad.dim()) if dim != 1])
    assert relative(torch.autograd.grad(y, bias, grad)[0], sums) < 0.02


def add_in_place(bias):
    with torch.no_grad():
        bias.add_(3.0)


def add_to_data(bias):
    bias.data.add_(3.0)


def replace_data(bias):
    bias.data = bias.data + 3.0


@pytest.mark.parametrize("add", [add_in_place, add_to_data, replace_data])
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


@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 4)])
@pytest.mark.parametrize("name", SHAPES)
def test_sizes_of_one_as_torch(name, shape):
    channels = shape[-1] if name in ("layer_norm", "rms_norm") else shape[1]

    def run(functions):
        x = normal(shape, scale=1.0).requires_grad_()
        weight = torch.ones(channels, requires_grad=True)
        calls = {
            "layer_norm": lambda: functions.layer_norm(x, (channels,), weight),
            "rms_norm": lambda: functions.rms_norm(x, (channels,), weight),
            "group_norm": lambda: functions.group_norm(x, channels, weight),
            "batch_norm": lambda: functions.batch_norm(x, None, None, weight, training=True),
            "instance_norm": lambda: functions.instance_norm(x, weight=weight),
        }
        try:
            y = calls[name]()
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
