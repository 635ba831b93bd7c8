"""The context of a model: the object that gives the model's layers bits, seeds and shared copies in each forward pass.

A *copy* is the quantized form of a tensor that layers save. A *call* is a call of one of the model's modules, which
`CallGuard` (`calls.py`) runs, and also the object that represents the call while it runs. The outermost call is a
forward pass. A *region* is a part of a forward pass that `torch.utils.checkpoint` recomputes, that is, runs again in
the backward pass. A *probe* measures a forward pass for the policy, which chooses bits.
"""

from __future__ import annotations

import threading
import weakref
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
from fewbit.runtime.parallel.process_groups import process_groups
from fewbit.runtime.saved.assignment import ALONE, REENTRANT, BitAssignment
from fewbit.runtime.saved.cache import SavedTensorCache
from fewbit.runtime.saved.checkpoints import CheckpointRegions
from fewbit.runtime.saved.seeds import Seeds

_running = threading.local()  # the innermost call of any model in this thread


def current() -> ForwardContext | None:
    """Return the context of the model whose forward pass runs in this thread, or None."""
    # Every layer calls this function, so it does not call `_innermost`.
    reference = getattr(_running, "call", None)
    call = None if reference is None else reference()
    return None if call is None else call.context


@contextmanager
def measuring(observation=None):
    """Return a context manager in whose block forward passes of this thread do not count as steps of training.

    Args:
        observation: the probe that measures these forward passes, or None. If `measuring` blocks are nested, only the
            probe of the outermost block is used.
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

    A deep copy or an unpickled context is constructed anew with the same arguments. Other state is not copied.

    Args:
        contexts: context managers that are entered around each forward pass in training, in this order.
        policy: the `BitPolicy` that chooses the bits of each forward pass; None if all bits are fixed.
        is_private: whether the context belongs to one pre-activation block (a norm, an activation and a linear layer or
            convolution that share a copy) and not to a model.
        compressor: the `GraphCompressor` that compresses what torch's operations save, or None.
    """

    def __init__(self, contexts=(), policy=None, is_private=False, compressor=None):
        self.contexts = contexts
        self.policy = policy
        self.compressor = compressor
        self.is_private = is_private
        self.salt = b""  # for `Seeds`: another salt gives other seeds if all else is equal
        self.checkpoints = CheckpointRegions()
        self.cache = SavedTensorCache(self.checkpoints)
        self._local = _Local()
        self._groups = (
            None  # of the latest forward pass, for regions whose forward pass is not known
        )

    def __getstate__(self):
        names = "contexts", "policy", "is_private", "compressor"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state):
        self.__init__(**state)

    # -- For CallGuard -----------------------------------------------------------------------------------

    def calls(self) -> tuple:
        """Return weak references to two calls: this thread's innermost call of any model, and that of this model.

        The two references are the arguments `running` and `own` of `set_calls`.
        """
        return getattr(_running, "call", None), self._local.call

    def set_calls(self, running, own) -> None:
        """Set this thread's innermost call of any model, `running`, and of this model, `own`, as weak references."""
        self._local.call, _running.call = own, running

    def begin_forward(self, module, inputs) -> None:
        """Choose the bits and seeds of a forward pass. In a recomputation, take those of the recomputed forward pass.

        Args:
            module: the module whose call is the forward pass.
            inputs: the call's arguments.
        """
        local = self._local
        local.is_differentiated = not in_backward()
        begin = self._new_forward if local.is_differentiated else self._recomputed_forward
        self._use(begin(module, inputs))

    def join_region(self, region, is_reentrant: bool) -> None:
        """Record that the forward pass runs through a checkpointed region.

        Args:
            region: the region, as `checkpoint.region_of` or `checkpoint.reentrant_region` returned it; None if no
                region runs.
            is_reentrant: whether this is the first run of a region with `use_reentrant=True`. Layers in such a region
                save tensors only when the region is recomputed.
        """
        if region is not None and self._local.forward is not None:
            self.checkpoints.remember(region, self._local.forward)
            self._local.has_saved |= is_reentrant

    def finished_forward(self) -> _Forward | None:
        """Return the forward pass that ends now; None if it has no backward pass, or is a recomputation."""
        return self._local.forward if self._local.is_differentiated else None

    @property
    def has_saved(self) -> bool:
        """True if a layer has saved a tensor in this forward pass."""
        return self._local.has_saved

    def record_save(self, value: bool = True) -> None:
        """Record whether a layer has saved a tensor in this forward pass. False is recorded when the pass begins."""
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
        """Return whether the code that runs now would run within a call of this model again if it is recomputed.

        The answer is yes if no region runs, or if the innermost call began inside the region, so that the whole call is
        recomputed. The answer is no if the region began inside the call.
        """
        hook, call = checkpoint_hook(), _innermost(self._local)
        return hook is None or (call is not None and call.hook is hook)

    def compresses_functions(self) -> bool:
        """Return whether to compress the functions that the running module calls now.

        They are compressed if the module is in training mode, and if a recomputation would compress them again
        (`recomputes_alike`).
        """
        call = _innermost(self._local)
        return call is not None and call.training and self.recomputes_alike()

    def path(self) -> str:
        """Return the path of the innermost running module in the converted model."""
        call = _innermost(self._local)
        return "" if call is None else call.path

    @contextmanager
    def activation(self, path: str):
        """Return a context manager in whose block the activation of the module at `path` counts as running."""
        local, before = self._local, self._local.activation
        with undo_after(lambda: setattr(local, "activation", before)):
            local.activation = path
            yield

    # -- Bits --------------------------------------------------------------------------------------------

    @property
    def shares_results(self) -> bool:
        """True if layers compute results of earlier layers again from the copies of other layers."""
        return self.policy is None or self.policy.shares_results

    def assignment(self, x) -> BitAssignment | None:
        """Return the bit assignment of the forward pass in which a layer saves x; None if all bits are fixed.

        A layer that is called outside a forward pass of the model gets an assignment for x alone. Within a recomputed
        region, the result is the assignment of the region's first run, so that both runs save the same copies.
        """
        if self._is_outside():
            return self._unobserved_assignment((x,), ALONE)
        return self._forward_of(x).assignment

    def activation_bits(self, name: str, bits: int, x) -> int:
        """Return the bits that the policy chose for an activation in this forward pass, or `bits` if it chose none.

        Args:
            name: the name of the few-bit activation.
            bits: the activation's own bits.
            x: the activation's input.
        """
        if self.policy is None or not x.requires_grad or not torch.is_grad_enabled():
            return bits
        if self._is_outside() or torch._C._functorch.maybe_current_level() is not None:
            return bits
        assignment = self._forward_of(x).assignment
        return bits if assignment is None else assignment.activation_bits(name, bits)

    def observed_activation(self, function: str, parameters: tuple) -> tuple | None:
        """Return (name, function, parameters) of the running activation, or None if no probe measures this forward.

        The name is the path of the activation module. If another module calls the activation as a function, the name is
        "path of the module:function".
        """
        forward = self._local.forward
        if forward is None or forward.assignment is None or forward.assignment.probe is None:
            return None
        name = self._local.activation
        if name is None:
            name = f"{self.path()}:{function}"
        return name, function, parameters

    # -- Seeds -------------------------------------------------------------------------------------------

    def seed(self, x, name: str, slot: int) -> int | torch.Tensor:
        """Return the seed from which x is rounded.

        Args:
            x: the tensor that a layer saves.
            name: the name of the layer.
            slot: the number of x among the layer's inputs, from 0.

        Returns:
            An int that fits into int64, or (1,) int64 on x's device.
        """
        if self._is_outside() or _is_capturing(x):
            return library.new_seed(x)
        self._local.has_saved = True
        return self._forward_of(x).seeds.next(x.device, name, slot)

    def seed_of_result(self, y, key, number: int | None = None) -> int | torch.Tensor:
        """Return the seed from which an activation's result y is rounded.

        All layers with this key share one copy of y. Either the activation makes the copy, or the first layer that
        saves y makes it. The seed is the same in both cases.

        Args:
            y: the activation's result.
            key: `Quantizer.key` of the layers.
            number: the number of the activation in the forward pass, as `SavedTensorCache.record_consumer` returned it.
                None stands for the activation that runs now.

        Returns:
            An int that fits into int64, or (1,) int64 on y's device.
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
        self._groups = process_groups(module)
        return _Forward(assignment, Seeds(self.salt, self._groups))

    def _recomputed_forward(self, module, inputs) -> _Forward:
        """Return the forward to which the recomputed region belongs, or a new forward if that forward is not known."""
        found = self.checkpoints.recorded_forward()
        return found or self._local.forward or self._unknown_forward(inputs)

    def _unknown_forward(self, inputs) -> _Forward:
        """Return a new forward for tensors that are saved outside of all known forwards.

        The numbers that the user gave to samples are not used for these tensors, because the samples are not known.
        """
        seeds, before = Seeds(b"unknown", self._groups), self._local.unknown
        if before is not None and before.start == seeds.start:
            # Otherwise two regions with the same generator state would be rounded alike.
            seeds = before
        self._local.unknown = seeds
        is_again = in_backward() and reentrant_region() is not None
        reason = REENTRANT if is_again else ALONE
        return _Forward(self._unobserved_assignment(inputs, reason), seeds)

    def _unobserved_assignment(self, inputs, reason: str) -> BitAssignment | None:
        """Return an assignment for the tensors of a forward that no probe measures, for the given reason."""
        if self.policy is None:
            return None
        assignment = self.policy.assign(inputs)
        assignment.unobserved = "" if is_measuring() else reason
        return assignment

    def _use(self, forward: _Forward) -> None:
        self._local.forward = forward
        self._local.part = forward.seeds.number("part")

    def _forward_of(self, x) -> _Forward:
        """Return the forward in which x is saved. In a recomputed region, this is the forward of the first run."""
        local, hook = self._local, checkpoint_hook()
        frame = None if hook is None else region_of(hook)
        if frame is None and local.forward is not None:
            return local.forward
        forward = self._recomputed_forward(None, (x,))
        if frame is not None:
            forward = self.checkpoints.remember(frame, forward)
            seeds = self.checkpoints.seeds(frame, weakref.ref(hook), forward.seeds)
            return forward._replace(seeds=seeds)
        if self.cache.is_open:
            self._use(forward)
        return forward

    def _is_outside(self) -> bool:
        """Return whether this thread is neither in a forward of the model nor in a backward pass."""
        return not self.cache.is_open and not in_backward()


def contexts_of(model: nn.Module) -> Iterator[ForwardContext]:
    """Yield the context of every module whose calls run within a `CallGuard`. A context may be yielded repeatedly."""
    for module in model.modules():
        guard = vars(module).get(GUARD)
        if isinstance(module, TrackedModule) and guard is not None:
            yield guard.context


class _Local(threading.local):
    """The forward that runs in a thread."""

    def __init__(self):
        self.call = None  # a weak reference to the innermost call of the model
        self.is_differentiated = False  # the forward has a backward pass and is no recomputation
        self.forward = None  # the running _Forward, or the one that is partly recomputed now
        self.part = 0  # 0 in the first run of `forward`, then 1, 2 ... in recomputations
        self.has_saved = False  # whether a layer has asked to save a tensor
        self.unknown = None  # the latest Seeds of tensors outside of all known forwards
        self.activation = None  # path of the module whose activation runs now


class _Forward(NamedTuple):
    """The bits and seeds of a forward and of its recomputed regions. The assignment is None if all bits are fixed."""

    assignment: BitAssignment | None
    seeds: Seeds


def _innermost(local):
    """Return the innermost call that has not ended, or None.

    Only the Python frame of a call has a strong reference to the call, so an abandoned call is gone with its frame.

    Args:
        local: `_running`, for the innermost call of any model, or the `_Local` of one model.
    """
    reference = getattr(local, "call", None)
    return None if reference is None else reference()


def _is_capturing(x) -> bool:
    # In a CUDA graph, seeds must come from torch's own generator: others would be the same in every replay.
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
