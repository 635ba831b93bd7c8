"""Move saved tensors to the host between the forward and the backward pass (ActNN's level L4, section 5.2).

Within an `Offload`, hooks on saved tensors replace a marked tensor by a *handle*. Here a *copy* is one of bytes on the
host, and a layer all tensors saved between two calls of `mark`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fewbit.errors import InputError
from fewbit.runtime.interop.saved_tensor_hooks import take_off_hooks
from fewbit.runtime.saved.transfers import CudaTransfers, OnDevice

LEAST_BYTES = 64 * 1024
AHEAD = 2
TRANSFERS = {"cuda": CudaTransfers}
"""{device type: class that copies bytes between device and host}. Tensors on other devices are not moved."""


class _RunningOffloads(threading.local):
    """The pairs (Offload, _Forward) that this thread is in, innermost last. A block that moves nothing has no _Forward."""

    def __init__(self):
        self.entered = []

    def forward(self) -> _Forward | None:
        return self.entered[-1][1] if self.entered else None


running = _RunningOffloads()


def mark(*tensors: torch.Tensor) -> None:
    """Mark tensors that a layer made only for the backward pass."""
    if running.entered:  # most calls end here
        forward = running.forward()
        if forward is not None:
            forward.mark(tensors)


class Offload:
    """A context manager around a forward pass that moves tensors saved by fewbit to the host until the backward pass.

    docs/guides/offload.md says when nothing is moved.

    Args:
        least: the size in bytes of the smallest storage that is moved.
        ahead: the number of layers whose tensors are copied at the same time. The tensors of the last `ahead` layers
            stay on the device, and those of the next `ahead` layers are copied back in advance.
        transfers: as `TRANSFERS`, which is the default.

    Raises:
        InputError: `least` or `ahead` is not an integer of at least 0.
    """

    def __init__(self, least: int = LEAST_BYTES, ahead: int = AHEAD, transfers=None):
        for name, value in (("least", least), ("ahead", ahead)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InputError(f"{name}: expected an integer of at least 0, got {value!r}")
        self.least, self.ahead = least, ahead
        self.bytes_out = 0  # moved to the host so far
        self.bytes_back = 0  # copied back to devices so far
        self._kinds = TRANSFERS if transfers is None else transfers
        self._transfers = {}  # by device
        self._on_host = weakref.WeakSet()
        self._lock = threading.RLock()  # autograd runs backward in one thread per device
        self._local = (
            threading.local()
        )  # its attribute `forward` is that of the thread's latest `one_layer`

    def __getstate__(self):
        return {"least": self.least, "ahead": self.ahead, "transfers": self._kinds}

    def __setstate__(self, state):
        self.__init__(**state)

    def __repr__(self) -> str:
        return f"Offload(least={self.least}, ahead={self.ahead})"

    @property
    def bytes_on_host(self) -> int:
        """The bytes of moved tensors that autograd graphs hold on the host."""
        return sum(len(copy.host) for copy in tuple(self._on_host))

    @contextmanager
    def one_layer(self, tensors: list[torch.Tensor]):
        """Return a context manager that moves these tensors, one more layer of the thread's forward pass, to the host.

        A new forward pass begins if the graph of the latest layer no longer exists, or if its backward pass has begun.
        """
        forward = getattr(self._local, "forward", None)
        if forward is None or forward.is_over():
            self._local.forward = forward = _Forward(self)
        is_moved = any(kind.is_ready() for kind in self._kinds.values()) and _may_enter()
        running.entered.append((self, forward if is_moved else None))
        if is_moved:
            torch._C._autograd._push_saved_tensors_default_hooks(*forward.hooks)
            forward.mark(tensors)
        try:
            yield
        finally:
            running.entered.pop()
            if is_moved:
                take_off_hooks(forward.hooks)
                forward.forget_marks()

    def __enter__(self) -> Offload:
        forward = None
        if any(kind.is_ready() for kind in self._kinds.values()) and _may_enter():
            forward = _Forward(self)
        running.entered.append((self, forward))
        if forward is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*forward.hooks)
        return self

    def __exit__(self, *error) -> None:
        _, forward = running.entered.pop()
        if forward is not None:
            take_off_hooks(forward.hooks)
            forward.end()

    def transfers_of(self, device: torch.device):
        """Return the object that copies between this device and the host; None if tensors stay on the device."""
        kind = self._kinds.get(device.type)
        if kind is None:
            return None
        with self._lock:
            if device not in self._transfers:
                self._transfers[device] = kind(device)
            return self._transfers[device]

    def send(self, transfers, source: torch.Tensor) -> tuple[_Copy, OnDevice]:
        """Start to copy bytes to the host. Return the copy, and what keeps the bytes on the device."""
        host, event = transfers.to_host(source)
        copy = _Copy(host)
        self._on_host.add(copy)
        self.bytes_out += len(host)
        return copy, OnDevice(transfers, source, event)

    def fetch(self, transfers, copy: _Copy) -> OnDevice:
        self.bytes_back += len(copy.host)
        return OnDevice(transfers, *transfers.to_device(copy.host))


class _Forward:
    def __init__(self, offload: Offload):
        self._offload = offload
        pack, unpack = _hooks()
        # The first hook identifies this forward's hooks: it is a new object in each forward.
        self.hooks = partial(pack), unpack
        self._marked = {}  # {address of a storage: _Marked}; its weak reference reserves the address
        self._layer = 0
        self._lanes = {}

    def mark(self, tensors) -> None:
        self._layer += 1
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() >= max(self._offload.least, 1):
                self._marked.setdefault(storage._cdata, _Marked(storage))

    def pack(self, tensor):
        marked = self._find(tensor)
        lane = None if marked is None else self._lane(tensor.device)
        if lane is None or lane.transfers.is_capturing():
            return _Stayed(tensor.detach(), tensor._version)
        return lane.save(tensor, marked, self._layer)

    def _find(self, tensor):
        if not self._marked or type(tensor) is not torch.Tensor:
            return None
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None
        return self._marked.get(tensor.untyped_storage()._cdata)

    def _lane(self, device):
        if device not in self._lanes:
            transfers = self._offload.transfers_of(device)
            self._lanes[device] = None if transfers is None else _Lane(self._offload, transfers)
        return self._lanes[device]

    def forget_marks(self) -> None:
        self._marked = {}

    def end(self) -> None:
        self.forget_marks()
        for lane in self._lanes.values():
            if lane is not None:
                lane.end()

    def is_over(self) -> bool:
        lanes = [lane for lane in self._lanes.values() if lane is not None]
        return bool(lanes) and any(lane.is_over() for lane in lanes)


class _Marked:
    def __init__(self, storage):
        self.storage = StorageWeakRef(storage)
        self.copy = lambda: None


class _Lane:
    """The tensors that one forward has saved on one device, layer by layer."""

    def __init__(self, offload: Offload, transfers):
        self.transfers = transfers
        self._offload, self._lock = offload, offload._lock
        self._number = None
        self._layers = []  # a list of weak references to handles for each layer
        self._leaving = (
            deque()
        )  # (number of the layer, copy, OnDevice) of copies to the host, oldest first
        self._present = weakref.WeakSet()  # copies whose bytes are on the device
        self._has_restored = False

    def is_over(self) -> bool:
        return self._has_restored or not (self._layers and _alive(self._layers[-1]))

    # -- Forward -----------------------------------------------------------------------------------------

    def save(self, tensor, marked: _Marked, number: int) -> _Handle:
        with self._lock:
            if number != self._number:
                self._number = number
                self._layers.append([])
            here = len(self._layers) - 1
            copy = marked.copy()
            if copy is None:
                copy, leaving = self._offload.send(self.transfers, _bytes_of(tensor))
                marked.copy = weakref.ref(copy)
                self._leaving.append((here, copy, leaving))
            handle = _Handle(self, here, copy, tensor)
            copy.handles.append(weakref.ref(handle))
            self._layers[here].append(weakref.ref(handle))
            # The forward waits if copies are slower; otherwise the device would hold the tensors of all layers.
            while self._leaving and self._leaving[0][0] <= here - self._offload.ahead:
                self._leaving.popleft()[2].use()
            return handle

    def end(self) -> None:
        with self._lock:
            while self._leaving:
                _, copy, leaving = self._leaving.popleft()
                self._put(copy, leaving)

    # -- Backward ----------------------------------------------------------------------------------------

    def restore(self, handle: _Handle) -> torch.Tensor:
        """Return the bytes of a handle for the current stream, and start to copy back the next layers."""
        with self._lock:
            if self._leaving:  # those of `one_layer`, whose forward pass ends unannounced
                self.end()
            self._has_restored = True
            self._fetch(handle.copy)
            self._fetch_before(handle.layer)
            value = handle.copy.value
            handle.copy.wanted_by.discard(handle)
            self._forget(handle.layer)
            return value.use()

    def _fetch_before(self, layer: int) -> None:
        found = 0
        while layer > 0 and found < self._offload.ahead:
            layer -= 1
            found += self._fetch_layer(layer)

    def _fetch_layer(self, layer: int) -> bool:
        handles = _alive(self._layers[layer])
        for handle in handles:
            self._fetch(handle.copy)
        return bool(handles)

    def _fetch(self, copy: _Copy) -> None:
        if copy.value is None:
            self._put(copy, self._offload.fetch(self.transfers, copy))

    def _put(self, copy: _Copy, value: OnDevice) -> None:
        copy.value = value
        copy.wanted_by.update(_alive(copy.handles))
        self._present.add(copy)

    def _forget(self, layer: int) -> None:
        """Free bytes that only handles of later layers want, which the backward pass has left."""
        for copy in tuple(self._present):
            if not any(handle.layer <= layer for handle in copy.wanted_by):
                copy.value = None
                copy.wanted_by.clear()
                self._present.discard(copy)


class _Copy:
    """The bytes of a storage on the host, in pinned memory, which exist as long as a graph has handles of the storage.

    Attributes:
        handles: weak references to the handles of tensors in the storage.
        value: the bytes on the device (OnDevice), or None. They are freed when `wanted_by` is empty.
        wanted_by: the handles that need the bytes on the device and have not been unpacked yet.
    """

    def __init__(self, host: torch.Tensor):
        self.host = host
        self.handles = []
        self.value = None
        self.wanted_by = weakref.WeakSet()


class _Handle:
    def __init__(self, lane: _Lane, layer: int, copy: _Copy, tensor: torch.Tensor):
        self.lane, self.layer, self.copy = lane, layer, copy
        self._dtype = tensor.dtype
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def unpack(self) -> torch.Tensor:
        memory = self.lane.restore(self)
        view = torch.empty(0, dtype=self._dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), *self._place)


class _Stayed(NamedTuple):
    """A saved tensor that is not moved: detached, because else its own autograd node could hold itself alive."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """Return the tensor. Raise RuntimeError if it was changed in place, which autograd does not check after hooks."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {list(self.tensor.shape)} {self.tensor.dtype} is at version "
                f"{self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _alive(references) -> list[_Handle]:
    return [handle for reference in references if (handle := reference()) is not None]


# -- Hooks -----------------------------------------------------------------------------------------------


def _pack(tensor):
    # Autograd also uses these hooks in its own threads, which are in no `Offload` block.
    forward = running.forward()
    return _Stayed(tensor.detach(), tensor._version) if forward is None else forward.pack(tensor)


def _unpack(packed):
    return packed.unpack()


def _hooks() -> tuple:
    """Return the pack and the unpack hook, disabled for torch.compile if Dynamo is imported."""
    return _uncompiled() if "torch._dynamo" in sys.modules else (_pack, _unpack)


@cache
def _uncompiled() -> tuple:
    return torch.compiler.disable(_pack), torch.compiler.disable(_unpack)


def _may_enter() -> bool:
    """Return whether an Offload may push its hooks: not in a backward pass, nor on top of others' hooks."""
    autograd = torch._C._autograd
    if torch._C._current_graph_task_id() != -1 or not autograd._saved_tensors_hooks_is_enabled():
        return False
    top = autograd._top_saved_tensors_default_hooks(False)
    if not top:
        return True
    pack = getattr(top[0], "func", None)
    return pack is _pack or ("torch._dynamo" in sys.modules and pack is _uncompiled()[0])
