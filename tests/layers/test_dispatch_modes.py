"""Modes that watch torch's operations, such as FlopCounterMode: they change nothing that a layer computes or saves."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from layers import CASES, one_of_each_class
from samples import load_table, normal
from torch import nn
from torch.nn import functional as torch_f
from torch.overrides import TorchFunctionMode
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import fewbit
import fewbit.functional as F
from fewbit.catalog import store


class Watching(TorchDispatchMode):
    """A mode that records the names of operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


class WatchingFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "a dispatch mode": Watching,
    "a function mode": WatchingFunctions,
    "DebugMode": DebugMode,
}


def _step(module, inputs, mode):
    """Return the result, the gradients, the saved tensors, and the state of torch's random generator afterwards."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    saved = {}

    def pack(x):
        saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    module.zero_grad()
    torch.manual_seed(5)
    with mode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = module(*(x * 1 if x.requires_grad else x for x in inputs))
        y.sin().sum().backward()
    gradients = [x.grad for x in (*inputs, *module.parameters()) if x.grad is not None]
    # Autograd may save a parameter, or a tensor that the user holds. Layers change none of them.
    found = y, *gradients, *saved.values(), torch.get_rng_state()
    return [x.detach().clone() for x in found]


def _check(found, expected, mode):
    # FlopCounterMode computes some of torch's operations in several steps, which round differently.
    error = 1e-6 if mode == "FlopCounterMode" else 0
    torch.testing.assert_close(found, expected, rtol=error, atol=error, equal_nan=True, msg=mode)


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    """Let torch and fewbit load the modules that modes and policies import on first use."""
    layers = nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 3)
    compressed(*layers, bits=fewbit.AdaptiveBits(3))(torch.ones(2, 40)).sum().backward()
    for mode in MODES.values():
        with mode():
            torch.ones(2).sin()


@pytest.mark.parametrize("case", one_of_each_class())
def test_a_layer(case):
    made = CASES[case]()
    expected = _step(copy.deepcopy(made.ours), made.inputs, nullcontext)
    for name, mode in MODES.items():
        _check(_step(copy.deepcopy(made.ours), made.inputs, mode), expected, name)


def compressed(*layers, **options):
    model = nn.Sequential(*layers)
    for number, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(parameter.shape, scale=0.3, seed=number))
    fewbit.compress_(model, verbose=False, **options)
    return model


@pytest.mark.parametrize("name", MODES)
def test_a_mode_inside_and_around_a_compressed_model(name):
    """A function mode that a layer of the model enters lies above fewbit's own, which shares copies in all modes."""

    class Inner(nn.Module):
        def __init__(self, mode):
            super().__init__()
            self.mode, self.linear = mode, nn.Linear(40, 40)

        def forward(self, x):
            with self.mode():
                return torch_f.dropout(torch_f.gelu(self.linear(x)), 0.3)

    def steps(inside, around):
        layers = Inner(inside), nn.LayerNorm(40), nn.ReLU(inplace=True), nn.Linear(40, 3)
        model = compressed(*layers, bits=fewbit.AdaptiveBits(3))
        x = normal((16, 40), scale=1.0)
        return [tensor for _ in range(2) for tensor in _step(model, [x], around)]

    expected = steps(nullcontext, nullcontext)
    _check(steps(MODES[name], nullcontext), expected, name)
    _check(steps(nullcontext, MODES[name]), expected, name)


def test_the_operations_that_a_mode_sees():
    """A mode sees torch's operations, without those that only a compiler needs."""
    made = CASES["Linear(70, 9) (5, 70)"]()
    mode = Watching()
    _step(made.ours, made.inputs, lambda: mode)
    assert {"aten::addmm", "aten::mm"} <= set(mode.seen)
    assert all(name.startswith("aten::") for name in mode.seen)


# Layers in which torch's own function changes what it has computed, so that torch refuses to save the results of all operations.
CHANGING = "circular", "RMSNorm", "BatchNorm", "PreActivation", "Dropout", "dropout"


@pytest.mark.parametrize(
    "case", [case for case in one_of_each_class() if not any(name in case for name in CHANGING)]
)
@pytest.mark.parametrize("policy", ["MUST_SAVE", "PREFER_RECOMPUTE"])
def test_a_selectively_checkpointed_region(case, policy):
    """torch computes such a region twice, in modes that save the results of operations and give them back."""
    made = CASES[case]()
    if not made.inputs[0].is_floating_point():
        pytest.skip("no input of the region needs a gradient")

    def region(**options):
        run = partial(checkpoint, made.ours, use_reentrant=False, **options)
        torch.manual_seed(5)
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in made.inputs]
        leaves = *(x for x in inputs if x.requires_grad), *made.ours.parameters()
        y = run(*(x * 1 if x.requires_grad else x for x in inputs))
        return y, *torch.autograd.grad(y.sin().sum(), leaves)

    contexts = partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy[policy]
    )
    assert all(map(torch.equal, region(context_fn=contexts), region()))


@pytest.mark.parametrize(
    "place", ["FlopCounterMode", "func.grad", "vmap", "checkpoint", "autocast"]
)
def test_a_callables_table_is_made_in_a_fresh_state(place, monkeypatch):
    """The callable's derivative is computed by torch, which must not reach the modes and transforms of the caller."""
    x = normal((5, 9), scale=1.0).requires_grad_()
    table, solved = load_table("tanh", 3), []

    def solve(function, bits, **settings):
        point = torch.ones(3, requires_grad=True)
        solved.append(torch.autograd.grad(function(point).sum(), point)[0].numpy())
        return table

    monkeypatch.setattr(store, "load_table", solve)
    own = "of " + place  # in the closure, so that each callable has a table of its own

    def loss(x):
        return F.pointwise(x, lambda x: (own, x.tanh())[1]).sum()

    expected = torch.autograd.grad(F.pointwise(x, torch.tanh, table=table).sum(), x)[0]
    if place == "func.grad":
        found = torch.func.grad(loss)(x)
    elif place == "vmap":
        found = torch.func.vmap(torch.func.grad(loss))(x)
    elif place == "checkpoint":
        found = torch.autograd.grad(checkpoint(loss, x * 1, use_reentrant=False), x)[0]
    else:
        mode = MODES.get(place, partial(torch.autocast, "cpu"))
        with mode():
            found = torch.autograd.grad(loss(x), x)[0]
    assert torch.equal(found, expected)
    assert len(solved) == 1
