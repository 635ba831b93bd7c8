"""What the layers of one converted model share during a forward: quantised copies, and where seeds come from.

A tensor that several layers keep (q, k and v of one input; a residual branch) is quantised once. Entries
are found by the tensor's storage, held weakly, so that they never hold the tensor, with its place in there
and its version, so that neither an in-place change nor a reused address can be taken for the old tensor.
They are dropped when the forward ends, or the checkpointed region in which they were made.

An activation whose result a layer keeps makes that copy itself from the next forward on, in the pass in which
it makes the result and its own codes.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import contextmanager
from types import FunctionType
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import _CheckpointFrame

from fewbit.runtime import offload, ops
from fewbit.runtime.exact import forget
from fewbit.runtime.seeds import Seeds
from fewbit.runtime.variables import Plan

MOST_FOLLOWED = 4096
_PREACTIVATION = "pre-activation"
PATH = "_fewbit_path"
"""The attribute of a module that says where in the converted model it is."""
_running = threading.local()


def current() -> Session | None:
    """The session of the model whose forward runs in this thread."""
    return getattr(_running, "session", None)


@contextmanager
def measuring(observation=None):
    """Within it forwards of this thread are no steps of a training. observation: what they tell, or None.

    (That of an outer one stays.)
    """
    before = getattr(_running, "measured", ())
    _running.measured = before or (observation,)
    try:
        yield
    finally:
        _running.measured = before


class Session:
    """Shared by the layers of one converted model, and by no other model.

    contexts: entered around each forward in training, in that order. variables: makes a plan for each forward,
    whose tensors then share bits, or None for bits that are fixed. is_private: of one block, whatever the model
    around it is converted to. A deep copy, or what pickle restores, is a new session with nothing in it but these.
    """

    def __init__(self, contexts=(), variables=None, is_private=False):
        self.contexts = contexts
        self.variables = variables
        self.is_private = is_private
        self.fuses = False  # whether a norm has offered its result
        self._local = _Local()
        self._followed = {}
        self._seeds = None  # of the latest forward, once there is one
        self._plans = weakref.WeakKeyDictionary()  # of checkpointed regions that may be made again

    def __getstate__(self):
        kept = "contexts", "variables", "is_private"
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state):
        self.__init__(**state)

    # -- Forwards ----------------------------------------------------------------------------------------

    def enter(self, module, args=(), kwargs=None) -> None:
        """A forward pre-hook, with keyword inputs, of every module with layers inside.

        The outermost one's call is the forward.
        """
        if torch.compiler.is_compiling():
            return
        local = self._local
        # No hook is told of a forward that was interrupted from the keyboard, with those around it.
        caller = sys._getframe(1)
        while (around := current()) is not None:
            if around is self and local.outermost() is not module or around._still_runs(caller):
                break
            around.abandon()
        path = vars(module).get(PATH, "")
        local.calls.append(_Call(_checkpoint(), module.training, path))
        if len(local.calls) > 1:
            return
        local.outermost = weakref.ref(module)
        local.entries, local.results = {}, {}
        local.around, _running.session = current(), self
        local.started = torch.is_grad_enabled() and not in_backward()
        if local.started:
            self._seeds = None
            if self.variables is not None:
                inputs = *args, *(kwargs or {}).values()
                local.plan = self._plan_of(module, inputs)
        if torch.is_grad_enabled() and module.training:
            for context in self.contexts:
                context.__enter__()
                local.entered.append(context)

    def leave(self, module=None, args=(), kwargs=None, outputs=None) -> None:
        """A forward hook, with keyword inputs, of the same modules, called also where the forward raised."""
        local = self._local
        if torch.compiler.is_compiling() or not local.calls:
            return
        local.calls.pop()
        if not local.calls:
            self._forget_unused()
            self._end()
            if local.started and local.plan and local.plan.observation is not None:
                local.plan.observation.watch(outputs)
            # Torch's generator moves on, once a forward and after all that the model draws.
            if local.started and self._seeds is not None:
                torch.randint(2**63 - 1, (), device="cpu")

    def _end(self) -> None:
        local = self._local
        local.entries, local.results, _running.session = None, {}, local.around
        while local.entered:
            local.entered.pop().__exit__(None, None, None)

    def abandon(self) -> None:
        """Ends a forward of this thread that no hook has ended."""
        if self._local.calls:
            self._local.calls = []
            self._end()
            forget()

    def _still_runs(self, caller) -> bool:
        """Whether the outermost call of this forward is among those that led to `caller`.

        caller: the frame in which torch calls the hooks of the module that is called now.
        """
        outermost, frame = self._local.outermost(), caller.f_back
        while frame is not None:
            if frame.f_code is caller.f_code and frame.f_locals.get("self") is outermost:
                return outermost is not None
            frame = frame.f_back
        return False

    def is_made_again_alike(self) -> bool:
        """Whether a checkpoint that makes this moment again would find this session's contexts entered.

        It does in a region that is a module, or within one; not in a bare function.
        """
        pack = _checkpoint()
        calls = self._local.calls
        return pack is None or bool(calls and calls[-1].checkpoint is pack)

    def is_evaluating(self) -> bool:
        """Whether the innermost module that runs is in evaluation mode."""
        calls = self._local.calls
        return bool(calls and not calls[-1].training)

    def path(self) -> str:
        """Of the innermost module that runs, from the converted model on."""
        calls = self._local.calls
        return calls[-1].path if calls else ""

    # -- Variables ---------------------------------------------------------------------------------------

    def _plan_of(self, module, inputs) -> Plan:
        measured = getattr(_running, "measured", ())
        if measured or not module.training:
            return self.variables.plan(inputs, *measured)
        return self.variables.begin(module, inputs)

    def plan(self) -> Plan:
        """Of this forward; in a checkpointed region that is made again, of the forward that it was a part of.

        (Its tensors have to be of the same shapes.)
        """
        latest = self._local.plan or self.variables.plan(())
        frame = _frame(_checkpoint())
        return latest if frame is None else self._plans.setdefault(frame, latest)

    # -- Copies ------------------------------------------------------------------------------------------

    def find(self, x, config):
        """What was kept of x for a layer with that configuration in this forward, or None."""
        entries = self._entries()
        found = entries.get(_key(x, config)) if entries else None
        return None if found is None else found[1]

    def add(self, x, config, kept) -> None:
        """Layers that ask for x, or a tensor that is the same memory in the same state, get `kept`."""
        entries = self._entries()
        if entries is not None and not x.is_inference():
            if offload.is_active():
                _forget_gone(entries)
            # The weak reference keeps the storage's identity, not its memory, from being used again.
            entries[_key(x, config)] = StorageWeakRef(x.untyped_storage()), kept

    def offer(self, y, kept) -> None:
        """Linear layers, convolutions and activations that ask for y get `kept`, whatever their bits are."""
        self.fuses = True
        self.add(y, _PREACTIVATION, kept)

    def offered(self, x):
        """What a norm, or an activation after it, has kept of x, or None."""
        return self.find(x, _PREACTIVATION) if self.fuses else None

    # -- Activations that a layer follows ----------------------------------------------------------------

    def follower(self, x):
        """The quantiser of a layer that took this activation's result in an earlier forward, or None.

        Activations are known by their number in the forward and by their input's shape and dtype.
        """
        if self._local.entries is None or in_checkpoint():
            return None
        return self._followed.get((len(self._local.results), x.shape, x.dtype))

    def produced(self, x, y, quantiser=None, kept=None) -> None:
        """Notes an activation's result, and what a follower is offered of it."""
        local = self._local
        if local.entries is None or in_checkpoint():
            return
        number = len(local.results), x.shape, x.dtype
        local.results[_place(y)] = _Result(number, y, kept is not None)
        if kept is not None:
            self.add(y, quantiser.key, kept)

    def follows(self, x, quantiser) -> None:
        """Notes that a layer keeps x: if that is an activation's result, both are one pass next time."""
        if self._local.entries is None or in_checkpoint():
            return
        result = self._local.results.get(_place(x))
        if result is not None:
            result.used = True
            if len(self._followed) >= MOST_FOLLOWED:  # of ever new shapes
                self._followed.clear()
            self._followed[result.number] = quantiser

    def _forget_unused(self) -> None:
        for result in self._local.results.values():
            if result.offered and not result.used:
                self._followed.pop(result.number, None)

    def _entries(self) -> dict | None:
        """Those of this forward; within a checkpointed region its own, in the first forward and the second.

        The second has nothing of what the forward around the region had kept, so the first may not use it.
        """
        pack = _checkpoint()
        return self._local.entries if pack is None else self._local.regions.setdefault(pack, {})

    # -- Seeds -------------------------------------------------------------------------------------------

    def seed(self, x) -> torch.Tensor:
        """A seed for one tensor: (1,) int64 on x's device."""
        if self._is_outside(x):
            return ops.new_seed(x)
        if self._seeds is None:
            self._seeds = Seeds()
        return self._seeds.draw(x.device)

    def give_back(self, x, seed: torch.Tensor) -> None:
        """The seed for x was not needed."""
        if not self._is_outside(x):
            self._seeds.give_back(seed)

    def _is_outside(self, x) -> bool:
        outside = self._local.entries is None and not in_backward()
        return outside or _is_capturing(x)


class _Local(threading.local):
    """The forward that runs in a thread. regions: by the hooks of a checkpoint, which live as long as it."""

    def __init__(self):
        self.calls = []  # a _Call for each of the modules that run, outermost first
        self.outermost = None  # a weak reference to the module
        self.entries = None
        self.entered = []  # contexts of this forward
        self.started = False  # whether seeds start in this forward
        self.plan = None  # of the latest forward
        self.results = {}  # those of activations, by place
        self.around = None
        self.regions = weakref.WeakKeyDictionary()


class _Call(NamedTuple):
    """Of a module: the checkpointed region in which it was called, whether it is in training mode, where it is."""

    checkpoint: object
    training: bool
    path: str


class _Result:
    """An activation's result in this forward, and whether a layer kept it."""

    def __init__(self, number, y, offered):
        self.number, self.offered, self.used = number, offered, False
        self.storage = StorageWeakRef(y.untyped_storage())  # its address is not used again


def _checkpoint():
    """The hook of the checkpointed region that runs, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack = hooks and hooks[0]
    return pack if getattr(pack, "__module__", None) == "torch.utils.checkpoint" else None


def _frame(pack):
    """What a checkpointed region is known by, the first time and again: its frame, among what its hook holds."""
    for cell in getattr(pack, "__closure__", None) or ():
        held = cell.cell_contents
        held = held() if isinstance(held, weakref.ref) else held
        if isinstance(held, _CheckpointFrame):
            return held
        if isinstance(held, FunctionType) and (frame := _frame(held)) is not None:
            return frame
    return None


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether a checkpointed region runs in this thread, for the first time or again."""
    return _checkpoint() is not None


def _place(x) -> tuple:
    storage = x.untyped_storage()
    return storage._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x._version


def _key(x, config) -> tuple:
    return *_place(x), config


def _forget_gone(entries) -> None:
    """Drops what was kept of tensors that are gone: else it would stay on the device to the forward's end."""
    for key in [key for key, (storage, _) in entries.items() if storage.expired()]:
        del entries[key]


def _is_capturing(x) -> bool:
    # Into a CUDA graph only torch's own generator can be captured.
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
