"""Every layer under every way to differentiate: `torch.autograd`, `torch.func`, batches of gradients, and forward mode.

A first derivative is that of a plain backward pass. Within the transforms of `torch.func` activations save codes, and all
other layers are torch's own. A second derivative, and one in forward mode, raises GradientError if fewbit saves anything.
"""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch
from layers import EVERY, Called
from samples import ACTIVATIONS, normal
from torch import nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as torch_f

import fewbit
import fewbit.functional as F
from fewbit.errors import GradientError
from fewbit.functional.operations import contractions, elementwise, vector_norm
from fewbit.runtime.quantizers.quantizer import Quantizer

# -- layers ------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A layer and inputs for it.

    Args:
        ours: a module of fewbit.
        theirs: torch's module, with equal parameters.
        inputs: the inputs of both.
        is_coded: whether the layer saves codes within the transforms of torch.func.
    """

    ours: nn.Module
    theirs: nn.Module
    inputs: list
    is_coded: bool = False


def _layer(layer, **options):
    return lambda: Case(*layer.pair(8, **options), layer.inputs())


def _function(ours, theirs, *shapes, coded=False, **inputs):
    """Return a maker of a case of two functions. A shape stands for random numbers; `inputs` are passed to both by name."""

    def make():
        numbers = [normal(shape, scale=1.0, seed=seed) for seed, shape in enumerate(shapes)]
        return Case(*(Called(partial(run, **inputs)) for run in (ours, theirs)), numbers, coded)

    return make


def _operation(ours, theirs, *shapes, **inputs):
    """Return a maker of a case of two functions whose tensors are computed. fewbit saves no quantized copy of a leaf."""

    def of_computed(run):
        return lambda *tensors, **inputs: run(*(x * 1 for x in tensors), **inputs)

    return _function(of_computed(ours), of_computed(theirs), *shapes, **inputs)


def _activation(sample):
    return _function(sample, sample.torch, (5, 9), coded=True)


QKV = [(1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)]


def _attended(**options):
    ours = partial(F.scaled_dot_product_attention, bits=8)
    return _function(ours, torch_f.scaled_dot_product_attention, *QKV, **options)


def _self_attention(need_weights):
    def make():
        ours, theirs = (
            of.MultiheadAttention(16, 4, batch_first=True, **bits)
            for of, bits in ((fewbit.nn, {"bits": 8}), (nn, {}))
        )
        theirs.load_state_dict(ours.state_dict())

        def on_itself(module):
            wrapped = Called(lambda x: module(x, x, x, need_weights=need_weights)[0])
            wrapped.module = module
            return wrapped

        return Case(on_itself(ours), on_itself(theirs), [normal((2, 5, 16), scale=1.0)])

    return make


def _embedding():
    ours, theirs = fewbit.nn.Embedding(7, 4), nn.Embedding(7, 4)
    theirs.load_state_dict(ours.state_dict())
    return Case(ours, theirs, [torch.tensor([[1, 2, 6], [1, 0, 3]])])


EIGHT = {"quantizer": Quantizer(8)}
TARGET = torch.tensor([2, 0, 1, 4])
CASES = {
    **{layer.id: _layer(layer) for layer in EVERY},
    **{f"{layer.id}, two copies": _layer(layer, copies=2) for layer in EVERY if "Norm" in layer.name},
    **{sample.id: _activation(sample) for sample in ACTIVATIONS},
    "RReLU in training": _function(
        partial(F.rrelu, training=True), partial(torch_f.rrelu, training=True), (5, 9)
    ),
    "unbiased GELU": _function(
        partial(F.gelu, table=fewbit.load_table("gelu", 2, objective="unbiased")),
        lambda x: torch_f.gelu(x) + 0 * torch.rand(1),  # torch's own refuse random numbers in vmap, too
        (5, 9),
        coded=True,
    ),
    "Pointwise": _function(partial(F.pointwise, function=torch.sin), torch.sin, (5, 9), coded=True),
    "attention": _attended(),
    "causal attention": _attended(is_causal=True),
    "masked attention": _attended(attn_mask=torch.ones(5, 6, dtype=torch.bool).tril(1)),
    "attention with dropout": _attended(dropout_p=0.3),
    "MultiheadAttention": _self_attention(False),
    "MultiheadAttention with weights": _self_attention(True),
    "matmul": _function(partial(F.matmul, bits=8), torch.matmul, (3, 5, 7), (3, 7, 4)),
    "mul": _function(partial(F.mul, bits=8), torch.mul, (5, 7), (5, 7)),
    "pad": _function(F.pad, torch_f.pad, (2, 3, 5, 6), pad=(1, 2, 1, 1), mode="reflect"),
    "interpolate": _function(
        F.interpolate, torch_f.interpolate, (2, 3, 8, 6), size=(4, 3), mode="area"
    ),
    "Embedding": _embedding,
    "cross entropy": _function(
        partial(F.cross_entropy, bits=8), torch_f.cross_entropy, (4, 6), target=TARGET
    ),
    "square": _operation(partial(elementwise.square, **EIGHT), torch.square, (5, 9)),
    "exp": _operation(lambda x: elementwise.exp(x - 4, **EIGHT), lambda x: (x - 4).exp(), (5, 9)),
    "erf": _operation(partial(elementwise.erf, **EIGHT), torch.erf, (5, 9)),
    "clamp": _operation(elementwise.clamp, torch.clamp, (5, 9), min=-0.5, max=1),
    "maximum": _operation(elementwise.maximum, torch.maximum, (5, 9), (5, 9)),
    "gather": _operation(
        elementwise.gather, torch.gather, (5, 9), dim=1, index=torch.arange(10).view(5, 2) % 9
    ),
    "einsum": _operation(
        lambda a, b: contractions.einsum("ij,kj->ik", a, b, **EIGHT),
        lambda a, b: torch.einsum("ij,kj->ik", a, b),
        (5, 9), (4, 9),
    ),
    "baddbmm": _operation(
        partial(contractions.baddbmm, **EIGHT), torch.baddbmm, (2, 5, 4), (2, 5, 9), (2, 9, 4)
    ),
    "addcmul": _operation(
        partial(contractions.addcmul, **EIGHT), torch.addcmul, (5, 9), (5, 9), (5, 9)
    ),
    "vector norm": _operation(
        partial(vector_norm.vector_norm, **EIGHT), torch.linalg.vector_norm, (5, 9), dim=1
    ),
    "normalize": _operation(partial(vector_norm.normalize, **EIGHT), torch_f.normalize, (5, 9)),
}  # fmt: skip

# -- ways to differentiate ---------------------------------------------------------------------------------------------


class Task:
    """A layer as a function of its floating inputs and its parameters, and a cotangent of its result."""

    def __init__(self, module, inputs):
        self._module, self._inputs = module, inputs
        own = dict(module.named_parameters())
        floating = {i: x for i, x in enumerate(inputs) if x.is_floating_point()}
        self._names, self._places = list(own), list(floating)
        self.leaves = (
            *(x.clone().requires_grad_() for x in floating.values()),
            *(x.detach().requires_grad_() for x in own.values()),
        )
        self.all = tuple(range(len(self.leaves)))
        self.cotangent = normal(self.run(*self.leaves).shape, seed=7)

    def run(self, *leaves):
        """Return the result of the layer, from the same random numbers at each call."""
        inputs = list(self._inputs)
        for place, x in zip(self._places, leaves, strict=False):
            inputs[place] = x
        parameters = dict(zip(self._names, leaves[len(self._places) :], strict=True))
        return functional_call(self._module, parameters, tuple(inputs))

    def loss(self, *leaves):
        return (self.run(*leaves) * self.cotangent).sum()

    def halves(self, *leaves):
        """Return two numbers with the sum `loss`."""
        terms = (self.run(*leaves) * self.cotangent).reshape(-1)
        return torch.stack([terms[::2].sum(), terms[1::2].sum()])

    def backward(self, *leaves):
        """Return the gradients of `loss` from a plain backward pass."""
        return torch.autograd.grad(self.loss(*leaves), leaves)

    def first(self, x):
        """Return `loss` as a function of the first leaf."""
        return self.loss(x, *self.leaves[1:])

    def tangents(self):
        return tuple(normal(x.shape, scale=1.0, seed=9) for x in self.leaves)


def _sum(jacobians):
    return [x.sum(0) for x in jacobians]


def _per_sample(task):
    x, *rest = task.leaves
    samples = torch.stack([x, x.flip(-1)])
    return vmap(grad(task.loss), (0, *[None] * len(rest)))(samples, *rest)


def _two_backwards(task):
    x, *rest = task.leaves
    return torch.stack([task.backward(x, *rest)[0], task.backward(x.flip(-1), *rest)[0]])


def _batch(task, by):
    y, grads = task.run(*task.leaves), torch.stack([task.cotangent, -2 * task.cotangent])
    if by == "vmap":
        one = partial(torch.autograd.grad, y, task.leaves, retain_graph=True)
        return vmap(one)(grads)
    return torch.autograd.grad(y, task.leaves, grads, is_grads_batched=True)


def _pulled_batch(task):
    _, pull = vjp(task.run, *task.leaves)
    return vmap(pull)(torch.stack([task.cotangent, -2 * task.cotangent]))


def _twice(task):
    return [torch.stack([x, -2 * x]) for x in task.backward(*task.leaves)]


def _plain(task):
    return task.backward(*task.leaves)


def _plain_first(task):
    return task.backward(*task.leaves)[:1]


def _again(gradients, leaves):
    """Return the gradient of the sum of gradients, which torch takes for zero if no graph leads to a leaf."""
    return torch.autograd.grad(
        sum(x.sum() for x in gradients), leaves, allow_unused=True, materialize_grads=True
    )


def _create_graph(task):
    return torch.autograd.grad(task.loss(*task.leaves), task.leaves, create_graph=True)


def _dual(task):
    with forward_ad.dual_level():
        leaves = map(forward_ad.make_dual, task.leaves, task.tangents())
        return forward_ad.unpack_dual(task.run(*leaves)).tangent


# {name: (how it differentiates, what it must compute)}. "func" and "autograd" say where a derivative is computed.
FIRST = {
    "func": {
        "grad": (lambda t: grad(t.loss, t.all)(*t.leaves), _plain),
        "grad of detached tensors": (lambda t: grad(t.loss, t.all)(*(x.detach() for x in t.leaves)), _plain),
        "grad by one tensor": (lambda t: [grad(t.first)(t.leaves[0])], _plain_first),
        "grad without gradients": (lambda t: torch.no_grad()(grad(t.loss, t.all))(*t.leaves), _plain),
        "grad_and_value": (lambda t: grad_and_value(t.loss, t.all)(*t.leaves)[0], _plain),
        "vjp": (lambda t: vjp(t.run, *t.leaves)[1](t.cotangent), _plain),
        "vmap of vjp": (_pulled_batch, _twice),
        "jacrev": (lambda t: _sum(jacrev(t.halves, t.all)(*t.leaves)), _plain),
        "vmap of grad": (lambda t: [_per_sample(t)], lambda t: [_two_backwards(t)]),
    },
    "autograd": {
        "create_graph": (_create_graph, _plain),
        "functional.vjp": (lambda t: functional.vjp(t.run, t.leaves, t.cotangent)[1], _plain),
        "functional.jacobian": (lambda t: _sum(functional.jacobian(t.halves, t.leaves)), _plain),
        "functional.jacobian, vectorized": (
            lambda t: _sum(functional.jacobian(t.halves, t.leaves, vectorize=True)), _plain,
        ),
        "is_grads_batched": (partial(_batch, by="autograd"), _twice),
        "vmap of autograd.grad": (partial(_batch, by="vmap"), _twice),
    },
}  # fmt: skip
SECOND = {
    "func": {
        "grad, then backward": lambda t: _again(grad(t.loss, t.all)(*t.leaves), t.leaves),
        "grad of grad": lambda t: [grad(lambda x: grad(t.first)(x).sum())(t.leaves[0])],
        "jvp of grad": lambda t: [jvp(grad(t.first), t.leaves[:1], t.tangents()[:1])[1]],
        "jacrev of grad": lambda t: [jacrev(lambda x: grad(t.first)(x).sum())(t.leaves[0])],
        "hessian": lambda t: [hessian(lambda s: t.first(s * t.leaves[0]))(torch.ones(()))],
    },
    "autograd": {
        "create_graph, then backward": lambda t: _again(_create_graph(t), t.leaves),
        "functional.hvp": lambda t: functional.hvp(t.loss, t.leaves, t.tangents())[1],
        "functional.jvp": lambda t: [functional.jvp(t.run, t.leaves, t.tangents())[1]],
    },
}
FORWARD = {
    "func": {
        "jvp": lambda t: [jvp(t.run, t.leaves, t.tangents())[1]],
        "jacfwd": lambda t: [jacfwd(lambda s: t.first(s * t.leaves[0]))(torch.ones(()))],
    },
    "autograd": {
        "dual numbers": lambda t: [_dual(t)],
        "linearize": lambda t: [torch.func.linearize(t.run, *t.leaves)[1](*t.tangents())],
    },
}
BATCHES = "vmap of autograd.grad", "is_grads_batched", "functional.jacobian, vectorized"
# {case: the ways to compute batches of gradients that are refused}.
REFUSED = {
    "attention with dropout": BATCHES,
    "attention": BATCHES[:1],
    "causal attention": BATCHES[:1],
    "masked attention": BATCHES[:1],
    "MultiheadAttention": BATCHES[:1],
    "MultiheadAttention with weights": BATCHES[:1],
    "RReLU in training": BATCHES[:1],
}
TORCHS = "AdaptiveAvgPool2d(1,) (2, 3, 8, 9)", "AdaptiveAvgPool3d(1,) (2, 3, 4, 5, 6)"
"""Layers that save nothing, so that torch's own run: means."""


def _outcome(way, task):
    """Return the detached results of a way to differentiate, or the error that it raises."""
    torch.manual_seed(3)
    try:
        return [x.detach() for x in way(task)]
    except Exception as error:
        return error


def _differ(found, expected) -> bool:
    """Return whether two outcomes differ: two lists of tensors, or errors of two classes."""
    if isinstance(expected, Exception) or isinstance(found, Exception):
        return type(found) is not type(expected)
    try:
        torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-4)
    except AssertionError:
        return True
    return False


def _is_refused(found, message) -> bool:
    return isinstance(found, GradientError) and re.search(message, str(found)) is not None


@pytest.fixture(autouse=True)
def _quiet():
    """Ignore what torch warns of: slow vmap, and scripts that forward mode loads on first use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("case", CASES)
def test_first_derivatives_work(case):
    made, wrong = CASES[case](), {}
    ours, theirs = (Task(module, made.inputs) for module in made[:2])
    for place, ways in FIRST.items():
        for name, (way, expected) in ways.items():
            found = _outcome(way, ours)
            if name in REFUSED.get(case, ()):
                is_wrong = not _is_refused(found, "expected one gradient at a time")
            elif isinstance(found, Exception):  # torch's own function raises it too
                is_wrong = _differ(found, _outcome(way, theirs))
            else:
                is_saving = place == "autograd" or made.is_coded
                is_wrong = _differ(found, _outcome(expected, ours if is_saving else theirs))
            if is_wrong:
                wrong[name] = found
    assert not wrong


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ways, message", [
    (SECOND, "has no (second|forward-mode) derivative"),
    (FORWARD, "has no forward-mode derivative"),
], ids=["second", "forward mode"])  # fmt: skip
def test_other_derivatives_are_refused(case, ways, message):
    made, wrong = CASES[case](), {}
    ours, theirs = (Task(module, made.inputs) for module in made[:2])
    for place, own in ways.items():
        for name, way in own.items():
            found = _outcome(way, ours)
            is_saving = (place == "autograd" or made.is_coded) and case not in TORCHS
            if not (is_saving and _is_refused(found, message)):
                is_own = not is_saving or isinstance(found, Exception)
                if not is_own or _differ(found, _outcome(way, theirs)):
                    wrong[name] = found
    assert not wrong
