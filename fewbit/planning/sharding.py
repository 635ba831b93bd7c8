"""`fully_shard` divides a model: this file has the bytes of a process, and mixed precision."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fewbit.planning.all_ranks import Processes
from fewbit.planning.timeline import BEGIN, END, ENTER, LEAVE, LOSS, Event, Mark, Timeline

GRADIENTS = "gradients"


@contextmanager
def mixed_precision(units: Iterable[nn.Module], policy):
    """Return a context manager in which a model computes as with `fully_shard` of these units and this policy, or None.

    Args:
        units: the blocks, and the model as the last one.
        policy: the MixedPrecisionPolicy, or None.
    """
    units = list(units)
    parameters = list(units[-1].parameters())
    dtype = getattr(policy, "param_dtype", None)
    before = [(p, p.data, p.grad) for p in parameters if dtype and p.is_floating_point()]

    def cast(values, dtype):
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)

    def enter(module, args, kwargs):
        return cast(args, dtype), cast(kwargs, dtype)

    def leave(module, args, output):
        return cast(output, policy.output_dtype)

    handles = []
    try:
        for parameter, data, _ in before:
            parameter.grad, parameter.data = None, data.to(dtype)
        for unit in units:
            if dtype and policy.cast_forward_inputs:
                handles.append(unit.register_forward_pre_hook(enter, with_kwargs=True))
            if getattr(policy, "output_dtype", None):
                handles.append(unit.register_forward_hook(leave))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data, grad in before:
            parameter.grad, parameter.data = None, data
            parameter.grad = grad


class ShardedWeights:
    """The bytes of weights and gradients of a model if `fully_shard` divides its blocks, and the model as a whole.

    As in torch 2.13, a block's weights are gathered while the block runs, in the backward pass one block ahead, and the others' while the
    model does. A collective's buffer exists until the next of its kind. Gradients of a block are whole until its end.

    Args:
        blocks: the blocks in the order of their calls.
        memory: the `OptimizerBytes`, with weights and gradients in the dtypes of the shards.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], memory, processes: Processes):
        self.shards, self.memory = processes.shards, memory
        self.has_gloo = self.shards > 1 and next(model.parameters()).device.type == "cpu"
        known: set[int] = set()
        self.weights, self.gradients = [], []
        for module in (*blocks, model):
            own = [p for p in module.parameters() if id(p) not in known]
            known |= {id(p) for p in own}
            self.weights.append(sum(p.nbytes for p in own))
            self.gradients.append(sum(p.nbytes for p in own if p.requires_grad))
        reduced = getattr(processes.precision, "reduce_dtype", None)
        size = max((p.itemsize for p in model.parameters() if p.requires_grad), default=1)
        self.reduced = 1 if reduced is None else reduced.itemsize / size

    def timeline(self, whole: Timeline, accumulates: bool) -> Timeline:
        """Return the timeline of one process, from that of the whole model without earlier gradients.

        `accumulates`: whether gradients exist before the step.
        """
        memory, shards = self.memory, self.shards
        existing = dict(whole.existing)
        existing["weights"] += self.weights[-1] - sum(self.weights) + memory.weights // shards
        existing["optimizer"] = memory.state // shards
        existing[GRADIENTS] = memory.gradients // shards if accumulates else 0
        kept = 0.0 if accumulates else memory.gradients / max(sum(self.gradients), 1) / shards
        found: list[Event | Mark] = []
        gathered: set[int] = set()
        of_block: dict[object, int] = {}  # gradients that are whole
        of_rest: dict[object, int] = {}
        buffers = {"gather": 0, "reduce": 0, "ahead": 0}
        is_forward = True

        def during(name, change):
            found.append(Event(name, change))

        def gather(size):
            if shards > 1:  # a process without others copies its weights
                during("gather", size)
                during("gather", -buffers["gather"])
                buffers["gather"] = size

        def reduced(gradients):
            size = int(self.reduced * sum(gradients.values()))
            during("reduce", -buffers["reduce"])
            during("reduce", size)
            buffers["reduce"] = size
            for key, whole in gradients.items():
                found.append(Event(key, int(kept * whole) - whole))
            if self.has_gloo:  # its reduction works on a copy
                during("copy", size)
                during("copy", -size)
            gradients.clear()

        def leave(block):
            if block in gathered:
                gathered.remove(block)
                during(("weights", block), -self.weights[block])

        def ahead(block):
            """Free the gathered weights of a block, which are copied by now, and gather those of the block before."""
            size = self.weights[block - 1] if block and shards > 1 else 0
            during("ahead", -buffers["ahead"])
            during("ahead", size)
            buffers["ahead"] = size

        gather(self.weights[-1])
        for one in _ends_first(whole.happened):
            if isinstance(one, Event):
                found.append(one)
                if getattr(one.key, "role", None) == GRADIENTS and not is_forward:
                    gradients = of_block if gathered else of_rest
                    gradients[one.key] = gradients.get(one.key, 0) + one.change
                continue
            if one.kind == ENTER or (one.kind == BEGIN and one.block not in gathered):
                found.append(one)
                if is_forward:
                    gather(self.weights[one.block])
                gathered.add(one.block)
                during(("weights", one.block), self.weights[one.block])
                if not is_forward:
                    ahead(one.block)
                continue
            if one.kind == LEAVE:
                leave(one.block)
            elif one.kind == LOSS:
                is_forward = False
                gather(0)
            elif one.kind == END and one.block in gathered:
                leave(one.block)
                reduced(of_block)
            found.append(one)
        during("weights", -self.weights[-1])
        reduced(of_rest)
        return Timeline(existing, found)


def _ends_first(happened: list[Event | Mark]) -> list[Event | Mark]:
    """Put the end of a block's backward pass before the begin of the next one, as FSDP2 does, if both are at one tensor."""
    found = list(happened)
    for number in range(len(found) - 1):
        first, second = found[number : number + 2]
        if isinstance(first, Mark) and isinstance(second, Mark):
            if (first.kind, second.kind) == (BEGIN, END):
                found[number : number + 2] = second, first
    return found
