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

    As in torch 2.13, a block's weights are gathered while the block runs, in the backward pass one block ahead, from the loss on, and the
    others' while the model does. A collective's buffer exists until the next of its kind. Gradients of a block are whole until its end.

    Args:
        blocks: the blocks in the order of their calls.
        memory: the `OptimizerBytes`, with weights and gradients in the dtypes of the shards.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], memory, processes: Processes):
        self.shards, self.memory = processes.shards, memory
        self.has_gloo = self.shards > 1 and processes.uses_gloo(next(model.parameters()).device)
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
        step = _Step(self, kept)
        for one in _ends_first(whole.happened):
            step.add(one)
        step.finish()
        return Timeline(existing, step.happened)


class _Step:
    """The events and marks of one process. `kept` is the part of a gradient that exists after its reduction."""

    def __init__(self, model: ShardedWeights, kept: float):
        self.happened: list[Event | Mark] = []
        self._model, self._kept = model, kept
        self._gathered: set[int] = set()
        self._of_block: dict[object, int] = {}  # gradients that are whole
        self._of_rest: dict[object, int] = {}
        self._buffers = {"gather": 0, "reduce": 0, "ahead": 0}
        self._is_forward, self._last = True, -1
        self._allocate("gather", self._gather_size(-1))

    def add(self, one: Event | Mark):
        """Add an event or a mark of the whole model, and the events that follow from it."""
        if isinstance(one, Event):
            self._add_event(one)
        elif one.kind == ENTER or (one.kind == BEGIN and one.block not in self._gathered):
            self.happened.append(one)
            self._enter(one.block)
        else:
            if one.kind == LEAVE:
                self._leave(one.block)
            elif one.kind == LOSS:
                self._begin_backward()
            elif one.kind == END and one.block in self._gathered:
                self._leave(one.block)
                self._reduce(self._of_block)
            self.happened.append(one)

    def finish(self):
        """End the backward passes of the model and of blocks whose inputs have no gradients, in FSDP2's order."""
        self._during("weights", -self._model.weights[-1])
        self._reduce(self._of_rest)
        for block in sorted(self._gathered):
            self._leave(block)
        self._reduce(self._of_block)

    def _during(self, key, change: int):
        self.happened.append(Event(key, change))

    def _add_event(self, event: Event):
        self.happened.append(event)
        if getattr(event.key, "role", None) == GRADIENTS and not self._is_forward:
            gradients = self._of_block if self._gathered else self._of_rest
            gradients[event.key] = gradients.get(event.key, 0) + event.change

    def _enter(self, block: int):
        self._gathered.add(block)
        if self._is_forward:
            self._last = block
            old = self._buffers["gather"]
            self._allocate("gather", self._gather_size(block))
            self._during(("weights", block), self._model.weights[block])
            self._during("gather", -old)  # FSDP2 refers to it until the new weights are copied
        else:
            self._during(("weights", block), self._model.weights[block])
            self._prefetch(block - 1)

    def _leave(self, block: int):
        if block in self._gathered:
            self._gathered.remove(block)
            self._during(("weights", block), -self._model.weights[block])

    def _begin_backward(self):
        """Prefetch the last block's weights, as the model does before its own backward pass."""
        self._is_forward = False
        self._free("gather")
        if self._last >= 0:
            self._prefetch(self._last)

    def _prefetch(self, block: int):
        """Gather the weights of a block, if there is one before. The earlier ones are copied by now."""
        self._free("ahead")
        if block >= 0:
            size = self._gather_size(block)
            self._allocate("ahead", size)
            self._copy(size)

    def _reduce(self, gradients: dict[object, int]):
        size = int(self._model.reduced * sum(gradients.values()))
        self._free("reduce")
        self._allocate("reduce", size)
        for key, whole in gradients.items():
            self._during(key, int(self._kept * whole) - whole)
        self._copy(size)
        gradients.clear()

    def _gather_size(self, block: int) -> int:
        return (
            self._model.weights[block] if self._model.shards > 1 else 0
        )  # a process alone copies its weights

    def _allocate(self, buffer: str, size: int):
        self._during(buffer, size)
        self._buffers[buffer] = size

    def _free(self, buffer: str):
        self._during(buffer, -self._buffers[buffer])
        self._buffers[buffer] = 0

    def _copy(self, size: int):
        """Add the copy of a buffer with which gloo works. In a forward pass, the weights that follow are as large."""
        if self._model.has_gloo:
            self._during("copy", size)
            self._during("copy", -size)


def _ends_first(happened: list[Event | Mark]) -> list[Event | Mark]:
    """Put the end of a block's backward pass before the begin of the next one, as FSDP2 does, if both are at one tensor."""
    found = list(happened)
    for number in range(len(found) - 1):
        first, second = found[number : number + 2]
        if isinstance(first, Mark) and isinstance(second, Mark):
            if (first.kind, second.kind) == (BEGIN, END) and first.block != second.block:
                found[number : number + 2] = second, first
    return found
