"""Every layer and every way to differentiate it: `torch.autograd`, `torch.func`, batches of gradients, and forward mode.

A first derivative is that of a plain backward pass. Within the transforms of `torch.func` activations save codes, and all
other layers are torch's own. A second derivative, and one in forward mode, raises GradientError if fewbit saves anything.
"""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial

import pytest
import torch
from layers import CASES, one_of_each_class, relative
from samples import normal
from torch import nn
from torch.autograd import forward_ad, functional
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

import fewbit
from fewbit.errors import GradientError

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

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


def _samples(task):
    """Return two samples of the first leaf, and the other leaves."""
    x, *rest = task.leaves
    return torch.stack([x, x.flip(-1)]).detach().requires_grad_(), *rest


def _per_sample(task):
    x, *rest = _samples(task)
    return vmap(grad(task.loss, task.all), (0, *[None] * len(rest)))(x, *rest)


def _through_vmap(task):
    x, *rest = _samples(task)
    losses = vmap(task.loss, (0, *[None] * len(rest)))(x, *rest)
    return torch.autograd.grad(losses.sum(), x)


def _two_backwards(task):
    samples, *rest = _samples(task)
    return map(torch.stack, zip(*(task.backward(x, *rest) for x in samples), strict=True))


def _two_backwards_of_first(task):
    return list(_two_backwards(task))[:1]


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
        "vmap of grad": (_per_sample, _two_backwards),
        "backward through vmap": (_through_vmap, _two_backwards_of_first),
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
# {how it differentiates: a function}. These are derivatives that need more than fewbit saves.
REFUSED = {
    "func": {
        "grad, then backward": lambda t: _again(grad(t.loss, t.all)(*t.leaves), t.leaves),
        "grad of grad": lambda t: [grad(lambda x: grad(t.first)(x).sum())(t.leaves[0])],
        "jvp of grad": lambda t: [jvp(grad(t.first), t.leaves[:1], t.tangents()[:1])[1]],
        "jacrev of grad": lambda t: [jacrev(lambda x: grad(t.first)(x).sum())(t.leaves[0])],
        "hessian": lambda t: [hessian(lambda s: t.first(s * t.leaves[0]))(torch.ones(()))],
        "jvp": lambda t: [jvp(t.run, t.leaves, t.tangents())[1]],
        "jacfwd": lambda t: [jacfwd(lambda s: t.first(s * t.leaves[0]))(torch.ones(()))],
    },
    "autograd": {
        "create_graph, then backward": lambda t: _again(_create_graph(t), t.leaves),
        "functional.hvp": lambda t: functional.hvp(t.loss, t.leaves, t.tangents())[1],
        "functional.jvp": lambda t: [functional.jvp(t.run, t.leaves, t.tangents())[1]],
        "dual numbers": lambda t: [_dual(t)],
        "linearize": lambda t: [torch.func.linearize(t.run, *t.leaves)[1](*t.tangents())],
    },
}
FORWARD = "jvp of grad", "hessian", "jvp", "jacfwd", "dual numbers", "linearize"
BATCHES = "vmap of autograd.grad", "is_grads_batched", "functional.jacobian, vectorized"


def one_at_a_time(case):
    """Return the ways to compute batches of gradients that are refused."""
    if "attention, dropout" in case:
        return BATCHES
    return BATCHES[:1] if "ttention" in case or case == "RReLU in training" else ()


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


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    """Let torch load the modules that transforms import on first use, and the scripts of forward mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.func.linearize(grad(torch.sin), torch.ones(()))


@pytest.mark.fast(40)
@pytest.mark.parametrize("case", CASES)
def test_first_derivatives_work(case):
    made, wrong = CASES[case](), {}
    ours, theirs = (Task(module, made.inputs) for module in made[:2])
    for place, ways in FIRST.items():
        for name, (way, expected) in ways.items():
            found = _outcome(way, ours)
            if name in one_at_a_time(case):
                is_wrong = not _is_refused(found, "expected one gradient at a time")
            elif isinstance(found, Exception):  # torch's own function raises it too
                is_wrong = _differ(found, _outcome(way, theirs))
            else:
                is_saving = place == "autograd" or made.is_coded
                is_wrong = _differ(found, _outcome(expected, ours if is_saving else theirs))
            if is_wrong:
                wrong[name] = found
    assert not wrong


@pytest.mark.fast(24)
@pytest.mark.parametrize("case", one_of_each_class())
def test_other_derivatives_are_refused(case):
    made, wrong = CASES[case](), {}
    ours, theirs = (Task(module, made.inputs) for module in made[:2])
    for place, ways in REFUSED.items():
        for name, way in ways.items():
            found = _outcome(way, ours)
            if place == "autograd" or made.is_coded:
                order = "forward-mode" if name in FORWARD else "second"
                is_wrong = not _is_refused(found, f"has no {order} derivative")
            else:
                is_wrong = _differ(found, _outcome(way, theirs))
            if is_wrong:
                wrong[name] = found
    assert not wrong


@pytest.mark.parametrize("place", ["func", "autograd"])
def test_a_compressed_model(place):
    theirs = nn.Sequential(
        nn.Linear(8, 40), nn.GELU(), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 3)
    )
    ours = copy.deepcopy(theirs)
    fewbit.compress_(ours, bits=8, layers={"activation_bits": 8}, verbose=False)
    inputs = [normal((6, 8), scale=1.0)]
    ours, theirs = Task(ours, inputs), Task(theirs, inputs)
    for way, expected in FIRST[place].values():
        for gradient, exact in zip(_outcome(way, ours), _outcome(expected, theirs), strict=True):
            assert relative(gradient, exact) < 0.02
    for way in REFUSED[place].values():
        with pytest.raises(GradientError, match="has no (second|forward-mode) derivative"):
            way(ours)


@pytest.mark.parametrize("layers", [(nn.Linear(64, 16),), (nn.ReLU(), nn.Linear(64, 16))])
def test_tensors_that_have_outlived_a_transform(layers):
    """torch computes with a tensor that `torch.func.grad` has wrapped, also after the transform has ended."""

    def outlived(x):
        kept = []

        def square(x):
            kept.append(x * 1.0)
            return x.square().sum()

        grad(square)(x)
        return kept[0]

    x = normal((8, 64))
    model = nn.Sequential(*layers)
    found = []
    for bits in (None, 8):
        if bits is not None:
            fewbit.compress_(model, bits, verbose=False)
        for leaf in (x, outlived(x)):
            model.zero_grad()
            model(leaf).square().sum().backward()
            found.append(model[-1].weight.grad.clone())
    for gradient in found[1:]:
        assert relative(gradient, found[0]) < 0.05
