"""The context of a model: its layers ask it for the bits and seeds of the present forward pass, and for shared copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from fewbit.runtime.interop.checkpoint import (
    checkpoint_hook,
    in_backward,
    reentrant_region,
    region_of,
)
from fewbit.runtime.interop.interrupts import undo_after
from fewbit.runtime.interop.module_calls import GUARD, TrackedModule
from fewbit.runtime.ops import library
from fewbit.runtime.saved.assignment import ALONE, REENTRANT, BitAssignment
from fewbit.runtime.saved.cache import SavedTensorCache
from fewbit.runtime.saved.checkpoints import CheckpointRegions
from fewbit.runtime.saved.seeds import Seeds

_running = threading.local()  # the innermost call of any model in this thread


def current() -> ForwardContext | None:
    """Return the context of the model whose forward pass runs in this thread, or None."""
    call = _innermost(_running)
    return None if call is None else call.context


@contextmanager
def measuring(observation=None):
    """Run the block so that forward passes of this thread do not count as steps of training.

    Args:
        observation: the probe that measures these forward passes, or None. Within another `measuring` block, the outer
            block's probe is used.
    """
    before = getattr(_running, "measured", ())
    with undo_after(lambda: setattr(_running, "measured", before)):
        _running.measured = before or (observation,)
        yield


def is_measuring() -> bool:
    """Return whether this thread is within a `measuring` block."""
    return bool(getattr(_running, "measured", ()))


class ForwardContext:
    """The state that the layers of one converted model share with each other, but not with other models.

    A deep copy, or an unpickled context, keeps the constructor's arguments and nothing else.

    Args:
        contexts: context managers that are entered around each forward pass in training, in this order.
        policy: the `BitPolicy` that chooses the bits of each forward pass; None if all bits are fixed.
        is_private: whether the context belongs to one pre-activation block (a norm, an activation and a linear layer or
            convolution that share a copy) and not to a model.
    """

    def __init__(self, contexts=(), policy=None, is_private=False):
        self.contexts = contexts
        self.policy = policy
        self.is_private = is_private
        self.salt = b""  # of `Seeds`: another one gives other seeds if all else is equal
        self.checkpoints = CheckpointRegions()
        self.cache = SavedTensorCache(self.checkpoints)
        self._local = _Local()

    def __getstate__(self):
        return {name: getattr(self, name) for name in ("contexts", "policy", "is_private")}

    def __setstate__(self, state):
        self.__init__(**state)

    # -- For CallGuard -----------------------------------------------------------------------------------

    def calls(self) -> tuple:
        """Return weak references to two running calls in this thread: the innermost of any model, and that of this model.

        They are the arguments `running` and `own` of `set_calls`.
        """
        return getattr(_running, "call", None), self._local.call

    def set_calls(self, running, own) -> None:
        """Set the innermost running calls of this thread: `running` of any model, and `own` of this model."""
        self._local.call, _running.call = own, running

    def begin_forward(self, module, inputs) -> None:
        """Choose bits and seeds for a forward pass. A recomputation gets those of the pass of which it repeats a part."""
        local = self._local
        local.is_differentiated = not in_backward()
        begin = self._new_forward if local.is_differentiated else self._recomputed_forward
        self._use(begin(module, inputs))

    def join_region(self, region, is_reentrant: bool) -> None:
        """Record that the forward pass runs through a checkpointed region.

        Args:
            region: a result of `checkpoint.region_of` or `checkpoint.reentrant_region`; None does nothing.
            is_reentrant: whether this is the first run of a region with `use_reentrant=True`, whose layers save tensors
                only when recomputed.
        """
        if region is not None and self._local.forward is not None:
            self.checkpoints.remember(region, self._local.forward)
            self._local.has_saved |= is_reentrant

    def finished_forward(self) -> _Forward | None:
        """Return the forward pass that ends now; None if it has no backward pass, or recomputes a checkpointed region."""
        return self._local.forward if self._local.is_differentiated else None

    @property
    def has_saved(self) -> bool:
        """True if a layer has saved a tensor in this forward pass."""
        return self._local.has_saved

    def record_save(self, value: bool = True) -> None:
        """Record whether a layer has saved a tensor in this forward pass: True or False, as `value` says."""
        self._local.has_saved = value

    def end_forward(self) -> None:
        """Forget the present forward pass."""
        local = self._local
        local.forward = None
        local.is_differentiated, local.activation = False, None

    # -- The modules that run ----------------------------------------------------------------------------

    def is_running(self) -> bool:
        """Return whether a forward pass of the model is running in this thread."""
        return _innermost(self._local) is not None

    def recomputes_alike(self) -> bool:
        """Return whether a checkpoint that recomputes the present call would enter this model's calls and contexts again.

        The answer is yes if the checkpointed region is a module of the model or lies within one, or if there is no
        region. It is no if the region is a bare function.
        """
        hook, call = checkpoint_hook(), _innermost(self._local)
        return hook is None or (call is not None and call.hook is hook)

    def compresses_functions(self) -> bool:
        """Return whether to compress the functions that the running module calls now.

        They are compressed if the module is in training mode and a checkpoint would compress them again when it
        recomputes the call (`recomputes_alike`).
        """
        call = _innermost(self._local)
        return call is not None and call.training and self.recomputes_alike()

    def path(self) -> str:
        """Return the path of the innermost running module in the converted model."""
        call = _innermost(self._local)
        return "" if call is None else call.path

    @contextmanager
    def activation(self, path: str):
        """Run the block as the activation of the module at `path`."""
        local, before = self._local, self._local.activation
        with undo_after(lambda: setattr(local, "activation", before)):
            local.activation = path
            yield

    # -- Bits --------------------------------------------------------------------------------------------

    def assignment(self, x) -> BitAssignment | None:
        """Return the bit assignment of the forward pass in which a layer saves x; None if all bits are fixed.

        A layer called outside a forward pass of its model gets an assignment for x alone. The tensors of a recomputed
        region must have the shapes of its first run.
        """
        if self._is_outside():
            return self._unobserved_assignment((x,), ALONE)
        return self._forward_of(x).assignment

    def activation_bits(self, name: str, bits: int, x) -> int:
        """Return the bits of the few-bit activation `name` of x: `bits`, unless the policy chose others for this forward pass."""
        if self.policy is None or not x.requires_grad or not torch.is_grad_enabled():
            return bits
        if self._is_outside() or torch._C._functorch.maybe_current_level() is not None:
            return bits
        assignment = self._forward_of(x).assignment
        return bits if assignment is None else assignment.activation_bits(name, bits)

    def observed_activation(self, function: str, parameters: tuple) -> tuple | None:
        """Return (name, function, its parameters) of the running activation if a probe measures this forward pass; else None.

        The name is the path of the module, or "path of the module:function" if the module calls a function.
        """
        forward = self._local.forward
        if forward is None or forward.assignment is None or forward.assignment.probe is None:
            return None
        name = self._local.activation
        if name is None:
            name = f"{self.path()}:{function}"
        return name, function, parameters

    # -- Seeds -------------------------------------------------------------------------------------------

    def seed(self, x, name: str, slot: int) -> torch.Tensor:
        """Return the seed from which x is rounded, if the layer `name` saves x as its input number `slot`.

        Returns:
            (1,) int64 on x's device.
        """
        if self._is_outside() or _is_capturing(x):
            return library.new_seed(x)
        self.record_save()
        return self._forward_of(x).seeds.next(x.device, name, slot)

    def seed_of_result(self, y, key, number: int | None = None) -> torch.Tensor:
        """Return the seed from which an activation's result y is rounded, for a copy that all layers with this key share.

        The seed is the same whether the first layer that saves y makes the copy or the activation itself.

        Args:
            y: the activation's result.
            key: `Quantizer.key` of the layers.
            number: the result of `SavedTensorCache.record_consumer`; None: the number of the running activation.

        Returns:
            (1,) int64 on y's device.
        """
        if _is_capturing(y):
            return library.new_seed(y)
        seeds = self._forward_of(y).seeds
        if number is None:
            number = self.cache.result_count
        return seeds.of(y.device, "result", self._local.part, number, key)

    # -- The current forward -----------------------------------------------------------------------------

    def _new_forward(self, module, inputs) -> _Forward:
        assignment = None
        if self.policy is not None:
            measured = getattr(_running, "measured", ())
            if measured or not module.training:
                assignment = self.policy.assign(inputs, *measured)
            else:
                assignment = self.policy.begin(module, inputs)
        return _Forward(assignment, Seeds(self.salt))

    def _recomputed_forward(self, module, inputs) -> _Forward:
        """Return the forward of which a part runs again, or a new one for tensors of no known forward."""
        found = self.checkpoints.recorded_forward()
        return found or self._local.forward or self._unknown_forward(inputs)

    def _unknown_forward(self, inputs) -> _Forward:
        """Return a forward for tensors of no known forward, whose samples' numbers are unknown as well."""
        seeds, before = Seeds(b"unknown"), self._local.unknown
        if before is not None and before.start == seeds.start:
            seeds = (
                before  # else two regions that run from one generator state would be rounded alike
            )
        self._local.unknown = seeds
        is_again = in_backward() and reentrant_region() is not None
        reason = REENTRANT if is_again else ALONE
        return _Forward(self._unobserved_assignment(inputs, reason), seeds)

    def _unobserved_assignment(self, inputs, reason: str) -> BitAssignment | None:
        """Return an assignment for tensors of a forward that no probe follows."""
        if self.policy is None:
            return None
        assignment = self.policy.assign(inputs)
        assignment.unobserved = "" if is_measuring() else reason
        return assignment

    def _use(self, forward: _Forward) -> None:
        self._local.forward = forward
        self._local.part = forward.seeds.number("part")

    def _forward_of(self, x) -> _Forward:
        """Return the forward in which x is saved; in a recomputed region the forward of its first run."""
        local, frame = self._local, region_of(checkpoint_hook())
        if frame is None and local.forward is not None:
            return local.forward
        forward = self._recomputed_forward(None, (x,))
        if frame is not None:
            return self.checkpoints.remember(frame, forward)
        if self.cache.is_open:
            self._use(forward)
        return forward

    def _is_outside(self) -> bool:
        """Return whether a layer is called by itself: neither within a forward of the model nor in a backward pass."""
        return not self.cache.is_open and not in_backward()


def contexts_of(model: nn.Module) -> Iterator[ForwardContext]:
    """Yield the context of every module whose calls run within a `CallGuard`. The same context can be yielded several times."""
    for module in model.modules():
        guard = vars(module).get(GUARD)
        if isinstance(module, TrackedModule) and guard is not None:
            yield guard.context


class _Local(threading.local):
    """The forward that runs in a thread."""

    def __init__(self):
        self.call = None  # a weak reference to the innermost call of the model
        self.is_differentiated = (
            False  # whether this forward has a backward pass and is no recomputation
        )
        self.forward = None  # a _Forward, while one runs, or a part of one again
        self.part = 0  # number of that part
        self.has_saved = False  # whether a layer has asked to save a tensor
        self.unknown = None  # the latest Seeds of tensors of no known forward
        self.activation = None  # path of the module that runs one


class _Forward(NamedTuple):
    """Bits and seeds of a forward and of its recomputed parts. assignment: None if bits are fixed."""

    assignment: BitAssignment | None
    seeds: Seeds


def _innermost(local):
    """Return the innermost call that has not ended: of any model for `_running`, of one model for its `_Local`.

    Only the Python frame of the call owns the call, so an abandoned call is no longer current once its frame is gone.
    """
    reference = getattr(local, "call", None)
    return None if reference is None else reference()


def _is_capturing(x) -> bool:
    # Into a CUDA graph only torch's own generator can be captured.
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
