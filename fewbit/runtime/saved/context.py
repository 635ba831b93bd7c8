"""The context of a model: the object that gives the model's layers bits, seeds and shared copies in each forward pass."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fewbit.runtime.interop.checkpoint import (
    checkpoint_hook,
    in_backward,
    reentrant_region,
    region_of,
    top_hooks,
)
from fewbit.runtime.interop.module_calls import GUARD, TrackedModule
from fewbit.runtime.parallel.process_groups import is_distributed_run, process_groups
from fewbit.runtime.saved.assignment import ALONE, REENTRANT, BitAssignment
from fewbit.runtime.saved.forward import NO_GROUPS, Forward, RunOfRegion, Saving, running
from fewbit.runtime.saved.seeds import generator_hash, mixed, purpose

MOST_CONSUMERS = 4096


@contextmanager
def measuring(observation=None):
    """Return a context manager in whose block forward passes of this thread do not count as steps of training.

    `observation` is the probe that measures them; of nested blocks, the outermost one's is used.
    """
    before = running.measured
    try:
        running.measured = before or (observation,)
        yield
    finally:
        running.measured = before


class ForwardContext:
    """The state that the layers of one converted model share.

    A copied or unpickled context is constructed anew with the same arguments.

    Args:
        contexts: context managers that are entered around each forward pass in training, in this order.
        policy: the `BitPolicy` that chooses the bits of each forward pass; None if all bits are fixed.
        is_private: whether the context belongs to one pre-activation block and not to a model.
        compressor: the `GraphCompressor` that compresses what torch's operations save, or None.

    Attributes:
        salt: up to 16 bytes; another salt gives other seeds if all else is equal.
        is_distributed: whether several processes may train the model.
        has_fixed_point: whether a norm has ever shared a fixed-point copy.
        consumers: {(number, input shape, input dtype) of an activation: quantizer of its consumer}, from earlier
            forward passes.
    """

    def __init__(self, contexts=(), policy=None, is_private=False, compressor=None):
        self.contexts = contexts
        self.policy = policy
        self.compressor = compressor
        self.is_private = is_private
        self.salt = b""
        self.has_fixed_point, self.consumers = False, {}
        self._regions = weakref.WeakKeyDictionary()  # {region: _Region}
        self._whole = weakref.WeakSet()  # regions around whole forward passes
        self.is_distributed = False
        self._groups = NO_GROUPS  # of the latest forward pass
        self._local = _Local()

    def __getstate__(self):
        names = "contexts", "policy", "is_private", "compressor"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state):
        self.__init__(**state)

    # -- Forward passes ----------------------------------------------------------------------------------

    def begin(self, module, inputs) -> Forward:
        """Return a forward pass that begins now, in a recomputation with the bits and seeds of the first run."""
        outer = running.forward
        # This is `in_backward`, without a call, which takes time in each forward.
        if torch._C._current_graph_task_id() != -1:
            found = self._recorded() or self._unknown(inputs)
            forward = Forward(
                self,
                module,
                outer,
                is_first=False,
                assignment=found.assignment,
                start=found.start,
                groups=found.groups,
                part=found.count(_PART),
            )
            forward.continue_counting(found)
            return forward
        if self.policy is None:
            assignment = None
        elif running.measured or not module.training:
            assignment = self.policy.assign(inputs, *running.measured)
        else:
            assignment = self.policy.begin(module, inputs)
        self.is_distributed = is_distributed_run()
        groups = self._groups = process_groups(module) if self.is_distributed else NO_GROUPS
        # In a CUDA graph, seeds must come from torch's own generator: others would be the same in every replay.
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        ranks = groups.data_rank if groups.data else ()
        start = None if is_captured else generator_hash(self.salt, ranks)
        return Forward(self, module, outer, True, assignment, start, groups)

    def begin_without_gradients(self, module) -> Forward:
        """Return a forward pass without gradients, which has no bits until a layer saves a tensor."""
        return Forward(self, module, running.forward, False, None, None, self._groups, False)

    def innermost_forward(self) -> Forward | None:
        """Return the model's forward pass that runs in this thread, or None."""
        forward = running.forward
        while forward is not None and forward.context is not self:
            forward = forward.outer
        return forward

    @property
    def shares_results(self) -> bool:
        return self.policy is None or self.policy.shares_results

    def run_activation(self, path: str, function, *args, **kwargs):
        """Return function(*args, **kwargs), during which the activation at `path` counts as running."""
        forward = self.innermost_forward()
        if forward is None:
            return function(*args, **kwargs)
        before, forward.activation = forward.activation, path
        try:
            return function(*args, **kwargs)
        finally:
            forward.activation = before

    # -- What layers ask ---------------------------------------------------------------------------------

    def saving(self, x: torch.Tensor) -> Saving:
        """Return what a layer needs to save x now. Both runs of a region get the same bits and seeds.

        Outside a forward pass of the model, x gets bits for itself alone.
        """
        forward = running.forward
        if forward is not None and forward.context is self and top_hooks(False) is None:
            if forward.is_first or forward.start is not None:
                return forward
        return self._unusual_saving(x)

    def _unusual_saving(self, x) -> Saving:
        hook, forward = checkpoint_hook(), self.innermost_forward()
        region = None if hook is None else region_of(hook)
        if region is not None:
            return self._in_region(region, hook, forward, x)
        self._local.forget_runs()
        if forward is None and not in_backward():
            return Saving(self._unobserved(ALONE, (x,)), None, shares=False)
        if forward is not None and (forward.is_first or forward.start is not None):
            return forward
        # A part of a backward pass, or a forward pass at whose beginning gradients were disabled.
        found = self._recorded() or self._unknown((x,))
        if forward is not None:
            forward.has_saved = True
        return found

    def _in_region(self, region, hook, forward, x=None) -> Saving:
        local = self._local
        found = local.runs.get(hook)
        if found is None:
            entry = self._entry(region, forward or self._unknown((x,)))
            found = local.runs[hook] = entry.run()
        local.use(found)
        if forward is not None:
            forward.has_saved = True
        return found

    def _entry(self, region, saving: Saving) -> _Region:
        entry = self._regions.get(region)
        if entry is None:
            entry = self._regions[region] = _Region(saving, saving.count(_REGION))
            _owners.setdefault(region, weakref.ref(self))
        return entry

    def _recorded(self) -> Saving | None:
        hook = checkpoint_hook()
        region = region_of(hook)
        entry = None if region is None else self._regions.get(region)
        if entry is not None:
            return self._in_region(region, hook, None)
        region = reentrant_region() if in_backward() else None
        entry = None if region is None else self._regions.get(region)
        return None if entry is None else entry.run_again(torch._C._current_graph_task_id())

    def join_region(self, forward: Forward, is_whole: bool = False) -> None:
        """Record the region within which a call of a module, or the whole forward pass if `is_whole`, begins, if any.

        Layers in a region with `use_reentrant=True` save tensors only when the region is recomputed.
        """
        if forward.hook is not None:
            region = region_of(forward.hook)
            if region is not None and forward.is_first:
                self._entry(region, forward)
        elif not torch.is_grad_enabled() and forward.module.training and not in_backward():
            region = reentrant_region()
            if region is not None:
                self._entry(region, forward)
                forward.has_saved = True
                if is_whole:
                    self._whole.add(region)

    def end(self, forward: Forward) -> None:
        """Drop the copies of regions, unless a region that still runs contains the forward pass."""
        is_over = forward.hook is None or self.is_private or self._contains(forward)
        if is_over and self._local.latest is not None:
            self._local.forget_runs()

    def repeats(self, forward: Forward) -> bool:
        if not in_backward():
            return False
        region = reentrant_region() if forward.hook is None else region_of(forward.hook)
        return region in self._whole

    def _contains(self, forward) -> bool:
        """Return whether the running region contains the whole forward pass, as its first run recorded."""
        region = region_of(forward.hook)
        if region is not None and not in_backward():
            self._whole.add(region)
        return region in self._whole

    def _unknown(self, inputs) -> Saving:
        start = mixed(generator_hash(b"unknown", self._groups.data_rank), 0, 0) + 2**63
        is_again = in_backward() and reentrant_region() is not None
        assignment = self._unobserved(REENTRANT if is_again else ALONE, inputs)
        found, before = Saving(assignment, start, self._groups, shares=False), self._local.unknown
        if before is not None and before.start == start:
            # Otherwise two regions with the same generator state would be rounded alike.
            found.continue_counting(before)
        self._local.unknown = found
        return found

    def _unobserved(self, reason: str, inputs=()) -> BitAssignment | None:
        if self.policy is None:
            return None
        assignment = self.policy.assign(inputs)
        assignment.unobserved = "" if running.measured else reason
        return assignment

    def activation_bits(self, name: str, bits: int, x) -> int:
        if self.policy is None or not x.requires_grad or not torch.is_grad_enabled():
            return bits
        if torch._C._functorch.maybe_current_level() is not None:
            return bits
        assignment = self.saving(x).assignment
        return bits if assignment is None else assignment.activation_bits(name, bits)

    def observed_activation(self, function: str, parameters: tuple) -> tuple | None:
        """Return (name, function, parameters) of the running activation; None if no probe measures this forward.

        The name is the activation module's path, or "path:function" if the module at this path calls the function.
        """
        forward = self.innermost_forward()
        if forward is None or forward.assignment is None or forward.assignment.probe is None:
            return None
        name = forward.activation
        if name is None:
            name = f"{forward.path}:{function}"
        return name, function, parameters

    # -- Consumers of activations ------------------------------------------------------------------------

    def add_consumer(self, result, quantizer) -> None:
        result.is_used = True
        if len(self.consumers) >= MOST_CONSUMERS:
            self.consumers.clear()  # so many pairs arise if the inputs' shapes change all the time
        self.consumers[result.number] = quantizer

    def forget_unused(self, forward: Forward) -> None:
        """Forget each consumer that did not use an activation's copy."""
        for result in forward.shared.results.values():
            if result.has_copy and not result.is_used:
                self.consumers.pop(result.number, None)


_PART, _REGION = purpose("part"), purpose("region")


class _Region:
    """A region, as its later runs need it: its forward pass, and its number in the forward pass."""

    def __init__(self, saving: Saving, number: int):
        self.assignment, self.groups, self._latest = saving.assignment, saving.groups, (None, None)
        start = saving.start
        if start is not None:
            start = mixed(start, _REGION, number) + 2**63
        self.start = start

    def run(self) -> RunOfRegion:
        return RunOfRegion(self.assignment, self.start, self.groups)

    def run_again(self, task: int) -> RunOfRegion:
        latest, found = self._latest
        if latest != task:
            found = self.run()
            self._latest = task, found
        return found


class _Local(threading.local):
    def __init__(self):
        self.runs = weakref.WeakKeyDictionary()  # {hook of a region: RunOfRegion}
        self.latest = None  # weak reference to the latest run
        self.unknown = None  # the latest Saving outside of all known forward passes

    def use(self, run: RunOfRegion) -> None:
        """Drop the copies of the run before: a hook lives as long as its graph, which must not hold copies."""
        latest = None if self.latest is None else self.latest()
        if latest is not run:
            if latest is not None:
                latest.shared.clear()
            self.latest = weakref.ref(run)

    def forget_runs(self) -> None:
        if self.latest is not None:
            latest = self.latest()
            if latest is not None:
                latest.shared.clear()
            self.latest = None


_owners = weakref.WeakKeyDictionary()
"""{region: weak reference to the context of the model in whose forward pass it began}"""


def current() -> ForwardContext | None:
    """Return the context of the model whose forward pass, or a region of it, runs in this thread, or None."""
    forward = running.forward
    if forward is not None:
        return forward.context
    hook = checkpoint_hook()
    region = None if hook is None else region_of(hook)
    return None if region not in _owners else _owners[region]()


def contexts_of(model: nn.Module) -> Iterator[ForwardContext]:
    """Yield the context of every module that has a `CallGuard`, repeatedly if modules share it."""
    for module in model.modules():
        guard = vars(module).get(GUARD)
        if isinstance(module, TrackedModule) and guard is not None:
            yield guard.context
