"""What the layers of one converted model share during a forward: quantised copies, and where seeds come from.

A tensor that several layers keep (q, k and v of one input; a residual branch) is quantised once. Entries
are found by the tensor's storage, held weakly, so that they never hold the tensor, with its place in there
and its version, so that neither an in-place change nor a reused address can be taken for the old tensor.
They are dropped when the forward ends, or the checkpointed region in which they were made.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fewbit.runtime import ops


class _Scope:
    """The entries of one forward: {key: (weak storage, kept)}, apart for each region of saved-tensor hooks.

    A checkpointed region is made a second time in backward, without what the forward around it had kept:
    so it may not use that the first time either.
    """

    def __init__(self):
        self.plain = {}
        self.hooked = weakref.WeakKeyDictionary()

    def entries(self, pack) -> dict:
        return self.plain if pack is None else self.hooked.setdefault(pack, {})


class Session:
    """Shared by the layers of one converted model, and by no other model.

    A deep copy, or what pickle restores, is a new session with nothing in it.
    """

    def __init__(self):
        self._local = threading.local()
        self._generators = None
        self._start = 0

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.__init__()

    # -- Forwards ----------------------------------------------------------------------------------------

    def enter(self, module, *_) -> None:
        """A forward pre-hook of the root module: entries live until `leave`."""
        if torch.compiler.is_compiling():
            return
        local = self._local
        local.depth = getattr(local, "depth", 0) + 1
        if local.depth == 1:
            local.scope = _Scope()
            if module.training and torch.is_grad_enabled():
                self._start, self._generators = int(torch.randint(2**63 - 1, ())), {}

    def leave(self, *_) -> None:
        """A forward hook of the root module, called also where the forward raised."""
        if torch.compiler.is_compiling() or not getattr(self._local, "depth", 0):
            return
        self._local.depth -= 1
        if not self._local.depth:
            self._local.scope = None

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
            # The weak reference keeps the storage's identity, not its memory, from being used again.
            entries[_key(x, config)] = StorageWeakRef(x.untyped_storage()), kept

    def _entries(self) -> dict | None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack = hooks and hooks[0]
        scope = getattr(self._local, "scope", None)
        if scope is None:
            # A region that a checkpoint makes again: its hooks live as long as it does.
            if pack is None or pack.__module__ != "torch.utils.checkpoint":
                return None
            scope = self._recomputed()
        return scope.entries(pack)

    def _recomputed(self) -> _Scope:
        local = self._local
        if getattr(local, "recomputed", None) is None:
            local.recomputed = _Scope()
        return local.recomputed

    # -- Seeds -------------------------------------------------------------------------------------------

    def seed(self, x) -> torch.Tensor:
        """A seed for one tensor: (1,) int64 on x's device.

        From generators of our own, which torch's default generator starts once a forward. A checkpoint
        that makes a region again, having put torch's generator back, may then draw another number of seeds
        without a change to what dropout draws.
        """
        if self._generators is None or _is_capturing(x):
            return ops.new_seed(x)
        generator = self._generators.get(x.device)
        if generator is None:
            generator = torch.Generator(x.device).manual_seed(self._start)
            self._generators[x.device] = generator
        return torch.randint(
            -(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=x.device, generator=generator
        )


def _key(x, config) -> tuple:
    storage = x.untyped_storage()
    place = (storage._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x._version)
    return *place, config


def _is_capturing(x) -> bool:
    # Into a CUDA graph only torch's own generator can be captured.
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
