"""What the layers of one converted model share during a forward: quantized copies, and where seeds come from.

A tensor that several layers keep (q, k and v of one input; a residual branch) is quantized once. Entries
are found by the tensor's storage, held weakly, so that they never hold the tensor, with its place in there
and its version, so that neither an in-place change nor a reused address can be taken for the old tensor. Writes
through `x.data` or `x.numpy()` do not change the version; on the CPU entries are therefore also compared by a checksum
of the content. Entries are dropped when the forward ends, or the checkpointed region in which they were made.

An activation whose result a layer keeps makes that copy itself from the next forward on, in the pass in which
it makes the result and its own codes.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from fewbit.runtime import ops
from fewbit.runtime.format.fingerprint import fingerprint
from fewbit.runtime.interop import bypass as exact
from fewbit.runtime.interop.interrupts import ThreadState, afterwards, close_suspended
from fewbit.runtime.interop.module_calls import PATH, SESSION, TrackedModule
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.assignment import ALONE, REENTRANT, BitAssignment
from fewbit.runtime.saved.seeds import Seeds

MOST_FOLLOWED = 4096
_PREACTIVATION = "pre-activation"
_REENTRANT = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__
_running = threading.local()


def current() -> Session | None:
    """The session of the model whose forward runs in this thread."""
    call = _innermost(_running)
    return None if call is None else call.session


@contextmanager
def measuring(probe=None):
    """Within the block forward passes of this thread are no steps of a training.

    An outer block's probe stays in force.

    Args:
        probe: a probe of these forward passes, or None.
    """
    before = getattr(_running, "measured", ())
    with afterwards(lambda: setattr(_running, "measured", before)):
        _running.measured = before or (probe,)
        yield


class Session:
    """Shared by the layers of one converted model, and by no other model.

    contexts: entered around each forward in training, in that order. policy: makes an assignment for each forward,
    whose tensors then share bits, or None for bits that are fixed. is_private: of one block, whatever the model
    around it is converted to. A deep copy, or what pickle restores, is a new session with nothing in it but these.
    salt: see Seeds; another one draws anew where all else is alike.
    """

    def __init__(self, contexts=(), policy=None, is_private=False):
        self.contexts = contexts
        self.policy = policy
        self.is_private = is_private
        self.fuses = False  # whether a norm has offered its result
        self.salt = b""
        self._local = _Local()
        self._followed = {}
        self._forwards = weakref.WeakKeyDictionary()  # by the region of a checkpoint
        self._whole = weakref.WeakSet()  # regions around whole forwards

    def __getstate__(self):
        kept = "contexts", "policy", "is_private"
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state):
        self.__init__(**state)

    # -- Forwards ----------------------------------------------------------------------------------------

    def call(self, module, function, args=(), kwargs=None):
        """Return function(*args, **kwargs), the call of a module with children, as a part of a forward of this model.

        The outermost call is the forward. When the call returns or raises, the previous state is restored, and after
        an exception restored a second time, in case the first restoration was interrupted.
        """
        kwargs = kwargs or {}
        call = _Call(self, module)
        try:
            try:
                self._begin(call, module, args, kwargs)
                outputs = function(*args, **kwargs)
                ended = self._local.forward if call.is_outermost and self._local.started else None
                keeps = self._local.keeps
                if call.is_outermost:
                    self._forget_unused()
            finally:
                call.put_back()
        except BaseException as error:
            close_suspended(error)
            call.put_back()
            if call.state is not None:
                call.state.put_back()
            raise
        if ended is not None:
            if ended.assignment and ended.assignment.probe is not None:
                ended.assignment.probe.watch(outputs)
            # Advance torch's generator once per forward, after the model has drawn its own numbers, and only if a
            # layer saved a tensor.
            if keeps:
                torch.randint(2**63 - 1, (), device="cpu")
        return outputs

    def _begin(self, call: _Call, module, args, kwargs) -> None:
        local, has_grad = self._local, torch.is_grad_enabled()
        _running.call = local.call = weakref.ref(call)
        is_first_of_two = call.training and not has_grad and _reentrant_region() is not None
        if call.is_outermost:
            exact.start()
            local.entries, local.results, local.exposed, local.keeps = {}, {}, {}, False
            if has_grad or is_first_of_two:
                inputs = *args, *kwargs.values()
                local.started = not in_backward()
                begin = self._begun if local.started else self._part_of
                self._go_by(begin(module, inputs))
        region = _reentrant_region() if is_first_of_two else _frame(call.checkpoint)
        if region is not None and local.forward is not None:
            self._forwards.setdefault(region, local.forward)
            local.keeps |= is_first_of_two  # when it is made again
        if call.is_outermost and has_grad and call.training:
            for context, _ in call.contexts:
                context.__enter__()

    def _is_region_over(self) -> bool:
        """Whether to drop what was kept in the checkpointed region in which the outermost call ends, if it is in one.

        The same when the region is made again, in which calls are outermost that were within others at first.
        """
        if self.is_private or not in_checkpoint():
            return True
        frame = _frame(_checkpoint())
        if frame is not None and not in_backward():
            self._whole.add(frame)
        return frame in self._whole

    def is_running(self) -> bool:
        """Return whether a forward of the model is running in this thread."""
        return _innermost(self._local) is not None

    def is_made_again_alike(self) -> bool:
        """Whether a checkpoint that makes this moment again would find this session's contexts entered.

        It does in a region that is a module, or within one; not in a bare function.
        """
        pack, call = _checkpoint(), _innermost(self._local)
        return pack is None or (call is not None and call.checkpoint is pack)

    def compresses_functions(self) -> bool:
        """Return whether to compress functions now: the calling module trains, and a checkpoint would recompute it alike."""
        call = _innermost(self._local)
        return call is not None and call.training and self.is_made_again_alike()

    def path(self) -> str:
        """Of the innermost module that runs, from the converted model on."""
        call = _innermost(self._local)
        return "" if call is None else call.path

    @contextmanager
    def activation(self, path: str):
        """Within it a module of that path runs, whose activation is to be known by that."""
        local, before = self._local, self._local.activation
        with afterwards(lambda: setattr(local, "activation", before)):
            local.activation = path
            yield

    def activation_bits(self, name: str, bits: int, x) -> int:
        """Of a few-bit activation of x: `bits`, unless the forward's assignment has others for that name."""
        if self.policy is None or not x.requires_grad or not torch.is_grad_enabled():
            return bits
        if self._is_outside() or torch._C._functorch.maybe_current_level() is not None:
            return bits
        assignment = self._forward_of(x).assignment
        return bits if assignment is None else assignment.activation_bits(name, bits)

    def observed_activation(self, function: str, parameters: tuple) -> tuple | None:
        """(name, function, parameters) of an activation that runs now, if the forward is observed, or None.

        The name is the path of the module, or for functions that modules call "path of the module:function".
        """
        forward = self._local.forward
        if forward is None or forward.assignment is None or forward.assignment.probe is None:
            return None
        name = self._local.activation
        if name is None:
            name = f"{self.path()}:{function}"
        return name, function, parameters

    # -- What a forward goes by --------------------------------------------------------------------------

    def _begun(self, module, inputs) -> _Forward:
        assignment = None
        if self.policy is not None:
            measured = getattr(_running, "measured", ())
            if measured or not module.training:
                assignment = self.policy.assign(inputs, *measured)
            else:
                assignment = self.policy.begin(module, inputs)
        return _Forward(assignment, Seeds(self.salt))

    def _part_of(self, module, inputs) -> _Forward:
        """Of which what runs now is a part, if that is known."""
        frame = _frame(_checkpoint())
        found = None if frame is None else self._forwards.get(frame)
        if found is None and in_backward():
            region = _reentrant_region()
            found = None if region is None else self._forwards.get(region)
        return found or self._local.forward or self._unknown(inputs)

    def _unknown(self, inputs) -> _Forward:
        """For what is of no forward that is known: numbers of samples are not, either."""
        seeds, before = Seeds(b"unknown"), self._local.unknown
        if before is not None and before.start == seeds.start:
            seeds = before  # else two regions that run from one state would be rounded alike
        self._local.unknown = seeds
        is_again = in_backward() and _reentrant_region() is not None
        return _Forward(
            self._unobserved_assignment(inputs, REENTRANT if is_again else ALONE), seeds
        )

    def _unobserved_assignment(self, inputs, why: str) -> BitAssignment | None:
        """For what is of no forward that a probe goes along with."""
        if self.policy is None:
            return None
        assignment = self.policy.assign(inputs)
        assignment.unobserved = "" if getattr(_running, "measured", ()) else why
        return assignment

    def _go_by(self, forward: _Forward) -> None:
        self._local.forward = forward
        self._local.part = forward.seeds.number("part")

    def _forward_of(self, x) -> _Forward:
        """In which x is kept; in a checkpointed region that is made again, that which it was a part of."""
        local, frame = self._local, _frame(_checkpoint())
        if frame is None and local.forward is not None:
            return local.forward
        forward = self._part_of(None, (x,))
        if frame is not None:
            return self._forwards.setdefault(frame, forward)
        if local.entries is not None:
            self._go_by(forward)
        return forward

    def _is_outside(self) -> bool:
        """Whether a layer is called by itself, not within a forward of the model, nor in a backward pass."""
        return self._local.entries is None and not in_backward()

    def assignment(self, x) -> BitAssignment:
        """Of the forward in which a layer keeps x; of a layer that is called by itself one for x alone.

        In a checkpointed region that is made again its tensors have to be of the same shapes.
        """
        if self._is_outside():
            return self._unobserved_assignment((x,), ALONE)
        return self._forward_of(x).assignment

    def seed(self, x, name: str, slot: int) -> torch.Tensor:
        """For one tensor of the layer of that name, its input number `slot`: (1,) int64 on x's device."""
        if self._is_outside() or _is_capturing(x):
            return ops.new_seed(x)
        self._local.keeps = True
        return self._forward_of(x).seeds.next(x.device, name, slot)

    def seed_of_result(self, y, config, number: int | None = None) -> torch.Tensor:
        """For the copy of an activation's result that all layers with that configuration share.

        The same whoever makes it: the layer that asks first, or before that the activation itself. number: as
        `follows` gave it; None: of the activation that runs.
        """
        if _is_capturing(y):
            return ops.new_seed(y)
        seeds = self._forward_of(y).seeds
        if number is None:
            number = len(self._local.results)
        return seeds.of(y.device, "result", self._local.part, number, config)

    # -- Copies ------------------------------------------------------------------------------------------

    def find(self, x, config):
        """What was kept of x for a layer with that configuration in this forward, or None."""
        self._local.keeps = True
        entries = self._entries()
        found = entries.get(_key(x, config)) if entries else None
        if found is None or x.untyped_storage()._cdata in self._local.exposed:
            return None
        _, kept, content = found
        return kept if content is None or content == fingerprint(x) else None

    def add(self, x, config, kept) -> None:
        """Layers that ask for x, or a tensor that is the same memory in the same state, get `kept`."""
        entries = self._entries()
        if entries is not None and not x.is_inference():
            if offload.is_active():
                _forget_gone(entries)
            # The weak reference keeps the storage's identity, not its memory, from being used again.
            entries[_key(x, config)] = StorageWeakRef(x.untyped_storage()), kept, fingerprint(x)

    def expose(self, x) -> None:
        """Stop sharing copies of x in this forward: its memory was accessed in a way that autograd does not track."""
        if self._local.entries is None:
            return
        # Parameters of lazy modules refuse access through `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                storage = x.untyped_storage()
                # Without the reference a later storage could get the same address, by chance, and no shared copies.
                self._local.exposed[storage._cdata] = StorageWeakRef(storage)
            except (RuntimeError, NotImplementedError):
                pass  # sparse tensors and those of vmap have no storage, and so no copies that are found by it

    def offer(self, y, kept) -> None:
        """Linear layers, convolutions and activations that ask for y get `kept`, whatever their bits are."""
        self.fuses = True
        self.add(y, _PREACTIVATION, kept)

    def offered(self, x):
        """What a norm, or an activation after it, has kept of x, or None."""
        return self.find(x, _PREACTIVATION) if self.fuses else None

    # -- Activations that a layer follows ----------------------------------------------------------------

    def follower(self, x):
        """The quantizer of a layer that took this activation's result in an earlier forward, or None.

        Activations are known by their number in the forward and by their input's shape and dtype.
        """
        if self._local.entries is None or in_checkpoint():
            return None
        return self._followed.get((len(self._local.results), x.shape, x.dtype))

    def produced(self, x, y, quantizer=None, kept=None) -> None:
        """Notes an activation's result, and what a follower is offered of it."""
        local = self._local
        if local.entries is None or in_checkpoint():
            return
        number = len(local.results), x.shape, x.dtype
        local.results[_place(y)] = _Result(number, y, kept is not None)
        if kept is not None:
            self.add(y, quantizer.key, kept)

    def follows(self, x, quantizer) -> int | None:
        """Notes that a layer keeps x: if that is an activation's result, both are one pass next time.

        Returns the number of that activation, or None.
        """
        if self._local.entries is None or in_checkpoint():
            return None
        result = self._local.results.get(_place(x))
        if result is None:
            return None
        result.used = True
        if len(self._followed) >= MOST_FOLLOWED:  # of ever new shapes
            self._followed.clear()
        self._followed[result.number] = quantizer
        return result.number[0]

    def _forget_unused(self) -> None:
        for result in self._local.results.values():
            if result.offered and not result.used:
                self._followed.pop(result.number, None)

    def _entries(self) -> dict | None:
        """Those of this forward; within a checkpointed region its own, in the first forward and the second.

        The second has nothing of what the forward around the region had kept, so the first may not use it. Whatever
        makes an end of a region's entries has to come in both: another region, or none, that asks for its own.
        """
        pack, regions = _checkpoint(), self._local.regions
        if pack is None or pack not in regions:
            regions.clear()  # their hooks live as long as the graph, which is to hold nothing of regions
        return self._local.entries if pack is None else regions.setdefault(pack, {})


def sessions_of(model: nn.Module) -> Iterator[Session]:
    """Yield the session of every module whose calls run within one. The same session can come several times."""
    for module in model.modules():
        session = vars(module).get(SESSION)
        if isinstance(module, TrackedModule) and session is not None:
            yield session


class _Local(threading.local):
    """The forward that runs in a thread. regions: entries by the hook of a checkpoint, of the latest region alone."""

    def __init__(self):
        self.call = None  # a weak reference to the innermost _Call
        self.entries = None
        self.exposed = {}  # {address: reference} of storages that may be written to without a new version
        self.started = False  # whether this forward is to be differentiated, and no part of another
        self.forward = None  # a _Forward, while one runs, or a part of one again
        self.part = 0  # number of that part
        self.keeps = False  # whether a layer has asked to keep something
        self.unknown = None  # the latest Seeds of what is of no forward that is known
        self.results = {}  # those of activations, by place
        self.activation = None  # path of the module that runs one
        self.regions = weakref.WeakKeyDictionary()


class _Forward(NamedTuple):
    """What a forward goes by, and whoever makes a part of it again. assignment: None where bits are fixed."""

    assignment: BitAssignment | None
    seeds: Seeds


class _Call:
    """A call of a module, with the state to restore when the call ends.

    Only the Python frame of the call owns this object, so an abandoned call is no longer current once its frame is
    gone. checkpoint: the checkpointed region in which the module was called. training: whether the module is in training
    mode. path: the module's path in the model.
    """

    __slots__ = (
        "__weakref__", "session", "checkpoint", "training", "path", "is_outermost", "contexts", "state", "_around", "_outer", "_said",
    )  # fmt: skip

    def __init__(self, session: Session, module):
        local = session._local
        self.session = session
        self.checkpoint, self.training = _checkpoint(), module.training
        self.path = vars(module).get(PATH, "")
        self._around, self._outer, self._said = (
            getattr(_running, "call", None),
            local.call,
            exact.stack(),
        )
        self.is_outermost = _innermost(local) is None
        self.state = ThreadState() if self.is_outermost else None
        contexts = session.contexts if self.is_outermost else ()
        self.contexts = [(context, context.depth_outside()) for context in contexts]

    def put_back(self) -> None:
        """Restore everything that the call has changed. Calling this twice has the same effect as calling it once."""
        session, local = self.session, self.session._local
        if self.is_outermost:
            for context, depth in reversed(self.contexts):
                context.cut(depth)
            if session._is_region_over():
                local.regions.clear()
            local.entries, local.results, local.forward = None, {}, None
            local.started, local.activation = False, None
        exact.put_back(self._said)
        local.call, _running.call = self._outer, self._around


class _Result:
    """An activation's result in this forward, and whether a layer kept it."""

    def __init__(self, number, y, offered):
        self.number, self.offered, self.used = number, offered, False
        self.storage = StorageWeakRef(y.untyped_storage())  # its address is not used again


def _innermost(local) -> _Call | None:
    """Return the innermost call that has not ended: of any session for `_running`, of one session for its `_Local`."""
    reference = getattr(local, "call", None)
    return None if reference is None else reference()


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


def _reentrant_region():
    """The autograd context of the innermost reentrant checkpoint whose region this thread runs, or None.

    It is the same when the region is made again, perhaps in another thread.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _REENTRANT:
            return frame.f_locals["ctx"]
        frame = frame.f_back
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
    for key in [key for key, (storage, *_) in entries.items() if storage.expired()]:
        del entries[key]


def _is_capturing(x) -> bool:
    # Into a CUDA graph only torch's own generator can be captured.
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
