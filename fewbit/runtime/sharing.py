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


class Session:
    """Shared by the layers of one converted model, and by no other model.

    calls: a context that is entered around each forward in training, or None. A deep copy, or what pickle
    restores, is a new session with nothing in it.
    """

    def __init__(self, calls=None):
        self.calls = calls
        self._local = _Local()
        self._generators = None
        self._start = 0

    def __getstate__(self):
        return {"calls": self.calls}

    def __setstate__(self, state):
        self.__init__(**state)

    # -- Forwards ----------------------------------------------------------------------------------------

    def enter(self, module, *_) -> None:
        """A forward pre-hook of every module with layers inside; the outermost one's call is the forward."""
        if torch.compiler.is_compiling():
            return
        local = self._local
        local.depth += 1
        if local.depth > 1:
            return
        local.entries = {}
        if module.training and torch.is_grad_enabled():
            # Where a checkpoint makes a region again torch's generator is to draw what it drew.
            if torch._C._current_graph_task_id() == -1:
                self._start, self._generators = int(torch.randint(2**63 - 1, ())), {}
            if self.calls is not None:
                self.calls.__enter__()
                local.entered = True

    def leave(self, *_) -> None:
        """A forward hook of the same modules, called also where the forward raised."""
        local = self._local
        if torch.compiler.is_compiling() or not local.depth:
            return
        local.depth -= 1
        if not local.depth:
            local.entries = None
            if local.entered:
                local.entered = False
                self.calls.__exit__(None, None, None)

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
        """Those of this forward; within a checkpointed region its own, in the first forward and the second.

        The second has nothing of what the forward around the region had kept, so the first may not use it.
        """
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack = hooks and hooks[0]
        if pack is None or getattr(pack, "__module__", None) != "torch.utils.checkpoint":
            return self._local.entries
        return self._local.regions.setdefault(pack, {})

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


class _Local(threading.local):
    """The forward that runs in a thread. regions: by the hooks of a checkpoint, which live as long as it."""

    def __init__(self):
        self.depth = 0
        self.entries = None
        self.entered = False
        self.regions = weakref.WeakKeyDictionary()


def _key(x, config) -> tuple:
    storage = x.untyped_storage()
    place = (storage._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x._version)
    return *place, config


def _is_capturing(x) -> bool:
    # Into a CUDA graph only torch's own generator can be captured.
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
