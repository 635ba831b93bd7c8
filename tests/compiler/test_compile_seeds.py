"""The seeds of compiled graphs, and dropout."""

import itertools
import threading

import pytest
import torch
from compiled_models import EXACT, MARKS
from layers import relative
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.compiler import compiling, seed_counters
from fewbit.compiler.graphs import insert
from fewbit.compiler.joint_graph import JointGraph
from fewbit.compiler.rewrite import Rewriter
from fewbit.compiler.seed_counters import Drawing, counter_of, draw_seeds_op
from fewbit.runtime.backends import reference
from fewbit.runtime.ops.dense_ops import quantize_dense_op

pytestmark = MARKS


@pytest.mark.inductor
def test_dropout_draws_what_it_would_draw():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()), torch.randn(32, 64)
    losses = []
    for overrides in (EXACT, None):
        torch._dynamo.reset()
        compiled = fewbit.compile(model, 2, overrides=overrides, backend="aot_eager")
        torch.manual_seed(5)
        losses.append([float(compiled(x).detach().sum()) for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_draws_masks_again_in_the_backward_pass(dynamic):
    """Nothing of a mask is saved, and the gradient has the mask of the forward pass."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 64), nn.Dropout(0.3)
    model, x = nn.Sequential(*layers), torch.randn(128, 64)

    def gradient(compiled):
        compiled(x).sum().backward()  # compiles the model
        torch.manual_seed(5)
        model.zero_grad()
        compiled(x).square().mean().backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    exact = gradient(torch.compile(model, dynamic=dynamic))
    torch._dynamo.reset()
    compiled = fewbit.compile(model, 8, dynamic=dynamic)
    assert 0 < relative(gradient(compiled), exact) < 0.02
    large = [row for row in compiled.partitioner.report.rows if row.saved_bytes > 1024]
    assert {(row.shape, row.bits) for row in large} == {((128, 256), 8)}


def test_each_step_rounds_anew_and_a_seed_reproduces_the_steps():
    def drawn(seed):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        seeds = [draw_seeds_op(3, device=torch.device("cpu")) for _ in range(2)]
        assert torch.equal(before, torch.get_rng_state())
        return torch.cat(seeds)

    first, other, again = drawn(11), drawn(12), drawn(11)
    assert len({*first.tolist(), *other.tolist()}) == 12
    assert torch.equal(first, again)


REPEATS = {  # name: what brings torch's generator back into an earlier state, given that state
    "seed": lambda _: torch.manual_seed(3),
    "state": torch.set_rng_state,
}


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["", "with dropout"])
def test_a_generator_in_an_earlier_state_repeats_steps(repeat, dropout):
    layers = nn.Linear(64, 64), nn.Dropout(dropout), nn.Tanh(), nn.Linear(64, 64)
    model, x = nn.Sequential(*layers), torch.randn(32, 64)
    compiled = fewbit.compile(model, 2, backend="aot_eager")

    def steps(count):
        for _ in range(count):
            model.zero_grad()
            compiled(x).square().sum().backward()
            yield torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = [*steps(1)]
    between = torch.get_rng_state()
    first += steps(2)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(first, 2))
    repeat(state)
    assert all(map(torch.equal, steps(3), first))
    torch.set_rng_state(between)  # as a run that was interrupted goes on
    assert all(map(torch.equal, steps(2), first[1:]))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_both_runs_of_a_region_draw_alike(use_reentrant, monkeypatch):
    """Dropout after compiled blocks has one mask, all blocks and steps round differently, and both runs of one alike."""
    drawn, draw = [], seed_counters._Counter.draw
    monkeypatch.setattr(
        seed_counters._Counter,
        "draw",
        lambda self, count: (drawn.append(draw(self, count)), drawn[-1])[1],
    )
    blocks, weight = nn.Sequential(Residual(), Residual()), torch.randn(32, 64)
    fewbit.compile_blocks_(blocks, 8, backend="aot_eager")
    dropout, seeds = nn.Dropout(0.5), []
    for _ in range(3):
        drawn.clear()
        x = torch.randn(32, 64, requires_grad=True)
        y = checkpoint(lambda x: dropout(blocks(x)), x, use_reentrant=use_reentrant)
        (y * weight).sum().backward()
        exact = x.detach().requires_grad_()
        h = exact
        for block in blocks:
            h = h + torch.tanh(F.linear(h, block.linear.weight, block.linear.bias))
        (h * (y != 0) * 2 * weight).sum().backward()
        assert 0 < relative(x.grad, exact.grad) < 0.02
        own = [int(seed) for tensor in drawn for seed in tensor]
        assert len(own) == len({*own}) * (1 if use_reentrant else 2)
        seeds += {*own}
    assert len({*seeds}) == len(seeds)


def test_manual_seed_repeats_the_first_call_of_another_model():
    gradients = []
    for seed in (5, 5, 6):
        torch.manual_seed(0)
        layers = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)
        model, x = nn.Sequential(*layers), torch.randn(32, 64)
        compiled = fewbit.compile(model, 2, backend="aot_eager")
        torch.manual_seed(seed)
        compiled(x).sum().backward()
        gradients.append(model[2].weight.grad)
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("is_one_model", [False, True])
@pytest.mark.parametrize("seed", [None, 99])
def test_threads_within_one_call_draw_no_seed_twice(seed, is_one_model):
    """Calls of two threads share the counter of a device, and perhaps the state of torch's generator."""
    device, drawn, counters = torch.device("cpu"), [], set()

    def call():
        if seed is not None:
            torch.manual_seed(seed)
        with Drawing(counters if is_one_model else set()):
            draw_seeds_op(1, device=device)

    with Drawing(counters):
        drawn += draw_seeds_op(4, device=device).tolist()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        drawn += draw_seeds_op(4, device=device).tolist()
    assert len({*drawn}) == 8


def test_a_captured_graph_goes_on_with_the_counter(monkeypatch):
    """Each replay of a captured restart would draw the same seeds."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(32, 64)
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    compiled(x)
    counter = counter_of(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    value, state = counter.value.clone(), torch.get_rng_state()
    drawn = draw_seeds_op(3, device=torch.device("cpu"))
    assert torch.equal(drawn, reference.draw_seeds(value, 3)) and torch.equal(counter.value, value)
    compiled(x)
    assert torch.equal(torch.get_rng_state(), state)
    later = []
    for _ in range(8):
        reference.draw_seeds(value, 1)
        later.append(int(value))
    assert int(counter.value) in later


def test_draws_outside_of_calls_do_not_repeat_between_them():
    """A graph of `partition_fn` and a compiled model may take turns."""
    compiled, x = fewbit.compile(nn.Linear(64, 64), 2, backend="aot_eager"), torch.randn(32, 64)
    seeds = []
    for _ in range(3):
        compiled(x)
        seeds += draw_seeds_op(2, device=torch.device("cpu")).tolist()
    assert len({*seeds}) == 6


def test_each_device_draws_its_seeds():
    """The devices exist only as those of fake tensors."""
    devices = [torch.device("cpu"), torch.device("cuda", 1)]
    with FakeTensorMode() as mode:
        inputs, results = [], []
        graph = fx.Graph()
        for i, device in enumerate(devices):
            inputs.append(graph.placeholder(f"primals_{i + 1}"))
            inputs[-1].meta["val"] = torch.empty(64, 64, device=device)
        tangents = [graph.placeholder(f"tangents_{i + 1}") for i in range(2)]
        for x, tangent in zip(inputs, tangents, strict=True):
            tangent.meta["val"] = x.meta["val"]
        sines = [insert(graph, mode, torch.ops.aten.sin.default, (x,)) for x in inputs]
        for sine, tangent in zip(sines, tangents, strict=True):
            results.append(insert(graph, mode, torch.ops.aten.mul.Tensor, (tangent, sine)))
        graph.output((*sines, *results))
    settings = compiling._resolved(2, None)
    copies = Rewriter(JointGraph(graph, 2, frozenset()), lambda root: settings).run()
    assert {copy.root.node for copy in copies.values()} == set(sines)
    quantizations = [node for node in graph.nodes if node.target is quantize_dense_op]
    assert len(quantizations) == 2
    for node in quantizations:
        x, seed = node.args[:2]
        (drawn,) = seed.all_input_nodes
        assert drawn.target is draw_seeds_op
        assert drawn.kwargs["device"] == seed.meta["val"].device == x.meta["val"].device
    graph.lint()
