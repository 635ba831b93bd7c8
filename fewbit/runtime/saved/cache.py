"""The quantized copies that the layers of one model share during a forward.

A tensor that several layers save, such as the input of q, k and v or of a residual branch, is quantized once. A copy is
found by the tensor's storage, its place in the storage and its version, so that neither an in-place change nor a
reused address is mistaken for the saved tensor. The storage is referred to weakly and stays collectable. Writes through
`x.data` or `x.numpy()` do not change the version; on the CPU a checksum of the content is compared as well. Copies are
dropped when the forward ends, or the checkpointed region in which they were made.

An activation whose result a layer saves makes that layer's copy itself from the next forward on, in the pass in which
the activation computes its result and its own codes.
"""

from __future__ import annotations

import threading

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fewbit.runtime.format.fingerprint import fingerprint
from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.checkpoints import CheckpointRegions

MOST_CONSUMERS = 4096
"""The largest number of remembered pairs of an activation and the layer that saves its result."""
_FIXED_POINT = "pre-activation"  # key of fixed-point copies, beside `Quantizer.key`


class SavedTensorCache:
    """Copies of the forward that runs in a thread, and the layers that saved activations' results in earlier forwards.

    Outside of a forward nothing is found and nothing is added.
    """

    def __init__(self, checkpoints: CheckpointRegions):
        self.has_fixed_point = False  # whether a norm has ever added a fixed-point copy
        self._checkpoints = checkpoints
        self._local = _Local()
        self._consumers = {}  # {(number, shape, dtype) of an activation: quantizer of the layer that saves its result}

    @property
    def is_open(self) -> bool:
        """True while a forward runs in this thread."""
        return self._local.entries is not None

    def begin(self) -> None:
        """Start a forward with no copies."""
        local = self._local
        local.entries, local.results, local.exposed = {}, {}, {}

    def end(self) -> None:
        """Drop the copies of the forward."""
        self._local.entries, self._local.results = None, {}

    # -- Copies ------------------------------------------------------------------------------------------

    def get(self, x, key):
        """Return the SavedTensors of x that a layer with this key may use, or None."""
        entries = self._entries()
        found = entries.get((*_place(x), key)) if entries else None
        if found is None or x.untyped_storage()._cdata in self._local.exposed:
            return None
        _, saved, content = found
        return saved if content is None or content == fingerprint(x) else None

    def put(self, x, key, saved) -> None:
        """Let later layers with this key that save x, or the same memory in the same state, use these SavedTensors."""
        entries = self._entries()
        if entries is not None and not x.is_inference():
            if offload.is_active():
                _drop_expired(entries)
            # The weak reference keeps the storage's identity, not its memory, from being used again.
            entries[*_place(x), key] = StorageWeakRef(x.untyped_storage()), saved, fingerprint(x)

    def get_fixed_point(self, x):
        """Return the fixed-point copy of x that a norm, or an activation after it, has added, or None."""
        return self.get(x, _FIXED_POINT) if self.has_fixed_point else None

    def put_fixed_point(self, y, saved) -> None:
        """Let linear layers, convolutions and activations of y use this copy, whatever their bits are."""
        self.has_fixed_point = True
        self.put(y, _FIXED_POINT, saved)

    def stop_sharing(self, x) -> None:
        """Stop sharing copies of x in this forward: its memory was accessed in a way that autograd does not track."""
        if not self.is_open:
            return
        # Parameters of lazy modules refuse access through `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                storage = x.untyped_storage()
                # Without the reference a later storage could get the same address, by chance, and no shared copies.
                self._local.exposed[storage._cdata] = StorageWeakRef(storage)
            except (RuntimeError, NotImplementedError):
                pass  # sparse tensors and those of vmap have no storage, and so no copies that are found by it

    def _entries(self) -> dict | None:
        return self._checkpoints.entries(self._local.entries)

    # -- Activations whose results are saved by layers ---------------------------------------------------

    @property
    def result_count(self) -> int:
        """The number of activations that have run in this forward."""
        return len(self._local.results)

    def consumer_quantizer(self, x):
        """Return the quantizer of the layer that saved this activation's result in an earlier forward, or None.

        Args:
            x: the activation's input. Activations are known by their number in the forward and their input's shape and
                dtype.
        """
        if not self.is_open or in_checkpoint():
            return None
        return self._consumers.get((self.result_count, x.shape, x.dtype))

    def record_output(self, x, y, quantizer=None, saved=None) -> None:
        """Record an activation's result y of x, and the copy of y that the activation made for `quantizer`, if any."""
        if not self.is_open or in_checkpoint():
            return
        number = self.result_count, x.shape, x.dtype
        self._local.results[_place(y)] = _Result(number, y, saved is not None)
        if saved is not None:
            self.put(y, quantizer.key, saved)

    def record_consumer(self, x, quantizer) -> int | None:
        """Record that a layer saves x. If x is an activation's result, the next forward makes both in one pass.

        Returns:
            The number of that activation in this forward, or None.
        """
        if not self.is_open or in_checkpoint():
            return None
        result = self._local.results.get(_place(x))
        if result is None:
            return None
        result.is_used = True
        if len(self._consumers) >= MOST_CONSUMERS:
            self._consumers.clear()  # inputs come in ever new shapes
        self._consumers[result.number] = quantizer
        return result.number[0]

    def forget_unused(self) -> None:
        """Forget the layers that did not use the copy that an activation made for them in this forward."""
        for result in self._local.results.values():
            if result.has_copy and not result.is_used:
                self._consumers.pop(result.number, None)


class _Local(threading.local):
    """The state of the forward that runs in a thread."""

    def __init__(self):
        self.entries = None  # {(place, key): (reference to the storage, SavedTensors, checksum)}
        self.results = {}  # {place: _Result}
        self.exposed = {}  # {address: reference} of storages that may be written to without a new version


class _Result:
    """An activation's result in this forward, and whether a layer saved it."""

    def __init__(self, number, y, has_copy):
        self.number, self.has_copy, self.is_used = number, has_copy, False
        self.storage = StorageWeakRef(y.untyped_storage())  # its address is not used again


def _place(x) -> tuple:
    """Return what tells the tensor x, as it is now, from other tensors."""
    storage = x.untyped_storage()
    return storage._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x._version


def _drop_expired(entries) -> None:
    """Drop copies of tensors that are gone, which would otherwise stay on the device until the forward ends."""
    for key in [key for key, (storage, *_) in entries.items() if storage.expired()]:
        del entries[key]
