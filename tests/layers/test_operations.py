"""Operations that `compress_` replaces in a model's forward: results and gradients against torch's, and saved bytes."""

import copy
import math
from functools import partial

import pytest
import torch
from composed import Composed
from quantized import quantized_bytes
from torch import nn
from torch.nn import functional as TF

import fewbit
from fewbit.functional.operations import contractions, elementwise, vector_norm
from fewbit.functional.products import is_in_memory
from fewbit.runtime.quantizers.quantizer import Quantizer

SHAPE = 4, 16, 24


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """A model that computes x and y from its input and parameters, and then `function(x, y, weight)`.

    The weight is a parameter of 24 x 24 numbers, which the function may use.
    """

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.b = (
            nn.Parameter(numbers(*SHAPE[1:])),
            nn.Parameter(numbers(*SHAPE[1:], seed=1)),
        )
        self.weight = nn.Parameter(numbers(24, 24, seed=2) / 5)
        self.scale = nn.Parameter(numbers(24, seed=3))

    def forward(self, x):
        return self.function(x + self.a, x.flip(1) - self.b, self)


OFFSETS = torch.tensor([20, 20, 64], dtype=torch.int32)
EXPERTS = numbers(3, 24, 32, seed=6)


def experts(x, y, model):
    """Return the product of experts: rows in three groups, one of which is empty."""
    matrices = model.weight[None] * EXPERTS[:, :, :24]
    return TF.grouped_mm(x.flatten(0, 1), matrices, offs=OFFSETS)


def index(x):
    return torch.arange(x.numel()).view(x.shape) * 7 % x.shape[1]


# Results that save copies. Rows of these operations show that their gradients are exact in expectation.
LINEAR = {
    "einsum": lambda x, y, m: torch.einsum("nij,nkj->nik", x, y),
    "einsum with a list of operands": lambda x, y, m: torch.einsum("nij, nkj -> nik", [x, y]),
    "einsum with a parameter": lambda x, y, m: torch.einsum("nij,jk->kin", x, m.weight),
    "einsum of a constant": lambda x, y, m: torch.einsum("ij,nik->njk", m.weight, x.detach().transpose(1, 2)),
    "einsum of one tensor": lambda x, y, m: torch.einsum("nij,nkj->nik", x, x),
    "baddbmm": lambda x, y, m: torch.baddbmm(x[:, :, :16], x, y.transpose(1, 2), beta=0.5, alpha=2),
    "baddbmm by name": lambda x, y, m: x[:, :, :16].baddbmm(batch1=x, batch2=y.transpose(1, 2)),
    "addcmul": lambda x, y, m: torch.addcmul(m.scale, m.scale, x * y, value=0.5),
    "matmul with a parameter": lambda x, y, m: x @ m.weight,
    "matmul of a parameter": lambda x, y, m: m.weight @ x.transpose(1, 2),
    "layer scale": lambda x, y, m: x * m.scale,
    "a view of a parameter": lambda x, y, m: m.scale.view(1, 1, -1) * x,
    "experts": experts,
    "square": lambda x, y, m: x.square(),
    "power": lambda x, y, m: x**2,
    "exp": lambda x, y, m: (0.3 * x - 3).exp() @ m.weight.t(),
    "exp without out": lambda x, y, m: torch.exp(0.3 * x - 3, out=None) @ m.weight.t(),
    "erf": lambda x, y, m: torch.erf(x),
    "vector norm": lambda x, y, m: torch.linalg.vector_norm(x, dim=(0, 1)) * m.scale,
    "norm": lambda x, y, m: x.norm(p=2, dim=1, keepdim=True) * m.scale,
    "normalize": lambda x, y, m: TF.normalize(x, dim=-1, eps=7.0),
    "square by name": lambda x, y, m: torch.square(input=x),
    "power by name": lambda x, y, m: torch.pow(input=x, exponent=2),
    "erf by name": lambda x, y, m: torch.erf(input=x),
    "mul by name": lambda x, y, m: torch.mul(input=x, other=y),
    "matmul by name": lambda x, y, m: torch.matmul(x, other=y.mT),
    "bmm by name": lambda x, y, m: torch.bmm(x, mat2=y.mT),
    "addcmul by name": lambda x, y, m: torch.addcmul(input=x, tensor1=x, tensor2=y, value=0.5),
    "baddbmm of an input": lambda x, y, m: torch.baddbmm(input=x[:, :, :16], batch1=x, batch2=y.mT, beta=0.5),
    "glu": lambda x, y, m: TF.glu(x, dim=-1),
    "cross_entropy": lambda x, y, m: TF.cross_entropy(4 * x.flatten(0, 1), torch.arange(64) % 24),
    "tanh without out": lambda x, y, m: torch.tanh(x, out=None) @ m.weight.t(),
    "norm of torch": lambda x, y, m: torch.norm(x, dim=1),
    "vector norm of x": lambda x, y, m: torch.linalg.vector_norm(x=x, dim=1),
    "vector norm of the input": lambda x, y, m: torch.linalg.vector_norm(input=x, dim=1),
}  # fmt: skip
EXACT = {
    "clamp": lambda x, y, m: x.clamp(-0.5, 1),
    "clamp from below": lambda x, y, m: torch.clamp(x, min=0.25),
    "clamp from above": lambda x, y, m: x.clamp_max(0.25),
    "clamp with ends in the wrong order": lambda x, y, m: x.clamp(1, -0.5),
    "gather": lambda x, y, m: x.gather(1, index(x)),
    "clamp without out": lambda x, y, m: torch.clamp(x, -1, 1, out=None),
    "clamp by name": lambda x, y, m: torch.clamp(input=x, min=-1, max=1),
    "gather by name": lambda x, y, m: torch.gather(input=x, dim=1, index=index(x)),
    "gather with an expanded index": lambda x, y, m: x.gather(1, index(x)[:1, :, :1].expand(SHAPE)),
}
WITH_TIES = numbers(*SHAPE).round()
EXACT |= {
    "maximum": lambda x, y, m: torch.maximum(x, y),
    "minimum": lambda x, y, m: x.minimum(y),
    "maximum by name": lambda x, y, m: torch.maximum(other=y, input=x),
    "maximum without out": lambda x, y, m: torch.maximum(x, y, out=None),
    "maximum with ties": lambda x, y, m: torch.maximum(x - x.detach() + WITH_TIES, WITH_TIES[:1]),
}
# Calls that fewbit's functions do not support, or that would gain nothing.
TORCHS = {
    "einsum of three": lambda x, y, m: torch.einsum("nij,nkj,n->nik", x, y, x[:, 0, 0]),
    "einsum with a diagonal": lambda x, y, m: torch.einsum("nii,nij->nj", x[:, :, :16], y),
    "einsum with an ellipsis": lambda x, y, m: torch.einsum("...ij,...kj->...ik", x, y),
    "einsum with a lonely index": lambda x, y, m: torch.einsum("nij,nk->nk", x, y[:, 0]),
    "einsum that broadcasts": lambda x, y, m: torch.einsum("nij,nij->ni", x, y[:1]),
    "clamp with tensors": lambda x, y, m: torch.clamp(x, m.scale.detach()),
    "cube": lambda x, y, m: x**3,
    "large exponentials": lambda x, y, m: (5 * x).exp(),
    "sum of absolute values": lambda x, y, m: torch.linalg.vector_norm(x, ord=1, dim=1),
    "product of parameters": lambda x, y, m: x + m.weight[:16] * m.scale,
    "normalize by another norm": lambda x, y, m: TF.normalize(x, p=1.0),
    # NumPy's names of arguments
    "softmax over an axis": lambda x, y, m: torch.softmax(x, axis=-1),
    "vector norm over an axis": lambda x, y, m: torch.linalg.vector_norm(x, axis=1, keepdims=True),
    "gather along an axis": lambda x, y, m: torch.gather(x, axis=1, index=index(x)),
    "maximum with x2": lambda x, y, m: torch.maximum(x, x2=y),
    "norm by another norm": lambda x, y, m: torch.norm(x, p=1, dim=1),
    # Older overloads of torch
    "pow of a number": lambda x, y, m: torch.pow(2.0, exponent=x),
    "addcmul with the number second": lambda x, y, m: torch.addcmul(x, 0.5, tensor1=x, tensor2=y),
    "baddbmm with the number first": lambda x, y, m: torch.baddbmm(
        0.5, x[:, :, :16], batch1=x, batch2=y.mT
    ),
}


def gradients(model, x, seed=0):
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = model(x)
    loss = (y * numbers(*y.shape, seed=5)).sum()
    found = torch.autograd.grad(loss, [*model.parameters(), x], allow_unused=True)
    return torch.cat([grad.flatten() for grad in found if grad is not None])


def compressed(model, **settings):
    few = copy.deepcopy(model)
    fewbit.compress_(few, verbose=False, **settings)
    return few


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_are_near_torchs(name):
    model, x = Model(LINEAR[name]), numbers(*SHAPE, seed=4)
    few = compressed(model, bits=8, layers={"activation_bits": 8})
    assert torch.equal(few(x), model(x))
    exact = gradients(model, x)
    found = gradients(few, x)
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()
    assert torch.cosine_similarity(found.double(), exact.double(), 0) > 0.9999
    coarse = compressed(model, bits=2, layers={"attention_bits": 2})
    most = 0.5 if name == "experts" else 0.15
    assert fewbit.saved_bytes(coarse, x).total < most * fewbit.saved_bytes(model, x).total


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_torchs(name):
    model, x = Model(EXACT[name]), numbers(*SHAPE, seed=4)
    few = compressed(model, bits=2)
    assert torch.equal(few(x), model(x))
    assert torch.equal(gradients(few, x), gradients(model, x))
    assert fewbit.saved_bytes(few, x).total < 0.1 * fewbit.saved_bytes(model, x).total


@pytest.mark.filterwarnings("ignore:This overload of")
@pytest.mark.parametrize("name", TORCHS)
def test_other_calls_are_torchs(name):
    model, x = Model(TORCHS[name]), numbers(*SHAPE, seed=4)
    few = compressed(model, bits=2)
    assert torch.equal(few(x), model(x))
    assert torch.equal(gradients(few, x), gradients(model, x))


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_numbers_that_are_not_comparable(name):
    x = torch.tensor([1.0, 2.0, 3.0, math.nan, 1.0, math.nan, math.inf, -math.inf])
    other = torch.tensor([2.0, 2.0, 1.0, 1.0, math.nan, math.nan, math.inf, 0.0])
    found = []
    for function in (getattr(torch, name), getattr(elementwise, name)):
        inputs = x.clone().requires_grad_(), other.clone().requires_grad_()
        function(*inputs).backward(torch.arange(1.0, 9))
        found.append([each.grad for each in inputs])
    assert all(map(torch.equal, *found))


def test_short_vectors_have_errors_like_long_ones():
    """The gradient of a length is a unit vector, however short the vector is, and 0 if it has no length."""
    directions = TF.normalize(numbers(64, 24), dim=-1)
    lengths = torch.tensor([1e-4, 1.0]).repeat(32)[:, None]
    x = (directions * lengths).requires_grad_()
    y = vector_norm.vector_norm(x * 1, 2, -1, quantizer=Quantizer(8))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert (grad - directions).norm() < 0.02 * directions.norm()
    x = torch.zeros(3, 40, requires_grad=True)
    vector_norm.vector_norm(x * 1.0, 2, -1, quantizer=Quantizer(2)).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 40))


def test_views_of_parameters_are_not_quantized():
    """They are in memory anyway, as for weight decay or a normalized weight."""
    weight = nn.Parameter(numbers(32, 40))
    torchs = {elementwise.square: torch.square, vector_norm.vector_norm: torch.linalg.vector_norm}
    for function, exact in torchs.items():
        (found,) = torch.autograd.grad(function(weight.t(), quantizer=Quantizer(1)).sum(), weight)
        (wanted,) = torch.autograd.grad(exact(weight).sum(), weight)
        torch.testing.assert_close(found, wanted)


def test_an_empty_tuple_stands_for_all_dimensions():
    x = numbers(*SHAPE).requires_grad_()
    for keepdim in (False, True):
        y = vector_norm.vector_norm(x * 1, 2, (), keepdim, quantizer=Quantizer(8))
        assert torch.equal(y, torch.linalg.vector_norm(x, 2, (), keepdim))
        (grad,) = torch.autograd.grad(y, x)
        assert (grad - x / x.norm()).norm() < 0.02


def test_a_length_that_equals_eps_has_the_gradient_of_torch():
    x, found = torch.zeros(2, 40).index_fill(1, torch.tensor([3]), 2.0), []
    for function in (TF.normalize, partial(vector_norm.normalize, quantizer=Quantizer(8))):
        leaf = x.clone().requires_grad_()
        function(leaf, dim=-1, eps=2.0).backward(numbers(2, 40))
        found.append(leaf.grad)
    torch.testing.assert_close(*found, atol=0.02, rtol=0)


def test_exponentials_are_recomputed_from_rounded_inputs():
    """Rounding makes some of the zeros in a region's input positive, although exp has arguments of at most 0."""
    torch.manual_seed(0)
    region = Composed(lambda _, x: x.exp().sum(-1))
    model = Composed(
        lambda own, x: fewbit.checkpoint(own.region, -own.layer(x).relu(), bits=4),
        layer=nn.Linear(64, 64),
        region=region,
    )
    x = numbers(64, 64)
    exact = gradients(model, x)
    fewbit.compress_(model, bits=8, verbose=False)
    assert (gradients(model, x) - exact).norm() < 0.1 * exact.norm()


BYTES = {  # {operation at 2 bits: (function, bytes of its activations)}
    # Products of two results have the bits of attention, 4, and those with a parameter 2.
    "einsum": (LINEAR["einsum"], 2 * quantized_bytes(SHAPE, 4)),
    "einsum with a parameter": (LINEAR["einsum with a parameter"], quantized_bytes(SHAPE, 2)),
    # A square is often that of a loss, whose noise would reach all gradients.
    "square": (LINEAR["square"], quantized_bytes(SHAPE, 4)),
    "power": (LINEAR["power"], quantized_bytes(SHAPE, 4)),
    # An error of a small factor that is repeated, such as a temperature, would be an error of all products.
    "a temperature": (
        lambda x, y, m: x * y[:, :1, :1].exp(),
        4 * SHAPE[0] + quantized_bytes(SHAPE, 2),
    ),
    # An expanded index is saved once, as uint8.
    "gather": (
        lambda x, y, m: x.gather(1, index(x)[:1].expand(SHAPE)),
        SHAPE[1] * SHAPE[2],
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_saved_bytes(name):
    function, expected = BYTES[name]
    assert (
        fewbit.saved_bytes(compressed(Model(function), bits=2), numbers(*SHAPE)).total == expected
    )


def test_views_of_parameters_are_in_memory_and_views_of_results_are_not():
    weight = nn.Parameter(numbers(4, 6))
    assert is_in_memory(weight) and is_in_memory(weight.t()) and is_in_memory(weight[1:].view(-1))
    assert not is_in_memory(weight * 2) and not is_in_memory((weight * 2).t())
    result = contractions.einsum(
        "ij,jk->ki", (weight * 2), numbers(6, 40).requires_grad_() * 1, quantizer=Quantizer(2)
    )
    assert not is_in_memory(result)


def test_an_expanded_index_may_be_smaller_than_the_input():
    """torch's scatter_add_ is wrong for such an index on the CPU."""
    x, found = numbers(3, 8, 17).requires_grad_(), []
    index, grad = torch.tensor([0, 2, 1, 1, 0]).view(5, 1, 1).expand(5, 1, 16), numbers(5, 1, 16)
    for function, each in ((elementwise.gather, index), (torch.gather, index.contiguous())):
        found.append(torch.autograd.grad(function(x, 0, each), x, grad)[0])
    assert torch.equal(*found)


def test_policies_name_the_operations():
    """Adaptive bits measure the operations that a forward calls, like layers."""
    torch.manual_seed(0)
    product = Model(lambda x, y, m: torch.einsum("nij,nkj->nik", x, y))
    model, x = nn.Sequential(nn.Linear(24, 24), product), numbers(*SHAPE)
    controller = fewbit.compress_(model, fewbit.AdaptiveBits(3, interval=1), verbose=False)
    for _ in range(3):
        model(x).square().mean().backward()
    assert {row["name"] for row in controller.allocation.records()} == {"0", "1:einsum"}


class Small(nn.Module):
    """A model that calls operations on a few numbers only."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(numbers(3))

    def forward(self, x):
        y = self.layer(x)
        mean = y.mean(0)
        product = torch.einsum("i,j->", mean, y.sum(0)) + torch.einsum("ij,ij->", [y, y + 1])
        norm = torch.linalg.vector_norm(mean) + mean.square().sum() + mean.clamp(max=0.1).sum()
        return product + norm + (self.scale * 1).neg().exp().sum()


def test_operations_on_a_few_numbers_stay_exact():
    model, x = Small(), numbers(4, 8)
    exact, converted = copy.deepcopy(model), model
    fewbit.compress_(converted, 1, exclude="layer", verbose=False)
    exact(x).backward()
    converted(x).backward()
    for theirs, ours in zip(exact.parameters(), converted.parameters(), strict=True):
        assert torch.equal(theirs.grad, ours.grad)
