"""Compiled graphs in CUDA graphs: nothing that fewbit adds waits for the GPU or leaves it, and replays draw new seeds.

The graphs are traced on the CPU, and then say that their tensors are on the fake device of `fake_cuda`, before fewbit's
partitioner gets them.
"""

from functools import partial

import pytest
import torch
from compiled_models import MARKS
from fake_cuda import DEVICE, FakeCuda
from samples import normal
from torch import fx, nn
from torch._C import DispatchKey
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.utils._pytree import tree_map_only

import fewbit
from fewbit.compiler import partitioner, seed_counters
from fewbit.compiler.graphs import is_from_fewbit

pytestmark = MARKS
NETWORKS = {
    "mlp": (
        lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU()),
        (32, 64),
    ),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Tanh()),
        (4, 4, 16, 16),
    ),
}  # fmt: skip


def moved(joint):
    """Let a joint graph say that its tensors are on the device."""
    for node in joint.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": DEVICE}
        node.meta["val"] = tree_map_only(torch.Tensor, _moved, node.meta.get("val"))


def _moved(x):
    with x.fake_mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)


class _Partitioned(Exception):
    """Raised when the graphs are there, because torch for the CPU cannot run them."""


def partitioned(network, x):
    """Return the forward and the backward graph of a network on the device, and the inputs of the forward graph."""
    partition, found = fewbit.partition_fn(4), []

    def cut(joint, inputs, **options):
        moved(joint)
        found.extend(partition(joint, inputs, **options))
        return found

    parameters = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    inputs = [x.requires_grad_(), *parameters.values()]

    def stop(graph, inputs):
        raise _Partitioned

    def call(x, *values):
        state = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(network, state, (x,))

    how = {"partition_fn": cut, "decompositions": select_decomp_table()}
    with pytest.raises(_Partitioned):
        aot_function(call, stop, **how)(*inputs)
    return found, inputs


class Run(fx.Interpreter):
    """Runs a graph so that the dispatch mode of the fake device sees what fewbit's ops do, too."""

    def call_function(self, target, args, kwargs):
        if getattr(target, "namespace", "") == "fewbit":
            target = partial(target._op_dk, DispatchKey.CompositeExplicitAutograd)
        return super().call_function(target, args, kwargs)


@pytest.fixture
def cuda(monkeypatch):
    with FakeCuda(monkeypatch) as cuda:
        yield cuda
    seed_counters._counters.pop(DEVICE, None)


@pytest.mark.inductor
@pytest.mark.parametrize("name", NETWORKS)
def test_graphs_can_be_captured(name, monkeypatch):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    prepared = []
    monkeypatch.setattr(partitioner, "counter_of", prepared.append)
    (forward, backward), inputs = partitioned(make(), normal(shape, scale=1.0))
    assert set(prepared) == {
        DEVICE
    }  # a counter that is made during a capture would belong to the graph
    added = 0
    for graph in (forward, backward):
        assert get_first_incompatible_cudagraph_node(graph) is None
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.device == DEVICE, node
            added += is_from_fewbit(node)
    assert added > 4
    tangents = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    with FakeCuda(monkeypatch) as cuda:
        try:
            given = [each.detach().to(DEVICE) for each in inputs]
            counter = seed_counters.counter_of(DEVICE)
            seed_counters._draw_seeds(1, DEVICE)  # a step before the capture, as torch asks for
            before = counter.value.cpu()
            tangent = torch.ones(tangents[-1].shape).to(DEVICE)
            with torch.no_grad(), cuda.capture():
                results = Run(forward).run(*given)
                saved = results[-(len(tangents) - 1) :]
                gradients = Run(backward).run(*saved, tangent)
            assert cuda.faults == []
            assert "fewbit.quantize" in cuda.launches and "fewbit.dequantize" in cuda.launches
            assert all(cuda.has(x) for x in gradients if isinstance(x, torch.Tensor))
            assert not torch.equal(counter.value.cpu(), before)
        finally:
            seed_counters._counters.pop(DEVICE, None)


def test_a_replay_draws_from_where_the_counter_is(cuda):
    """The captured operations read and change the counter's own memory, which no operation sets during a capture."""
    torch.manual_seed(3)
    counter = seed_counters.counter_of(DEVICE)
    first = seed_counters._draw_seeds(2, DEVICE).cpu()
    place = counter.value.untyped_storage()._cdata
    cuda.launches.clear()
    with cuda.capture():
        second = seed_counters._draw_seeds(2, DEVICE)
    assert cuda.faults == [] and "fill_" not in cuda.launches and "transfer" not in cuda.launches
    assert counter.value.untyped_storage()._cdata == place and cuda.has(second)
    assert len({*first.tolist(), *second.cpu().tolist()}) == 4


def test_a_graph_that_waits_is_found(cuda):
    x = torch.zeros(4, device=DEVICE)
    with cuda.capture():
        x.sum().item()
    assert cuda.faults
