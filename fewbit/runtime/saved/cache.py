"""The quantized copies that the layers of one model share during a forward pass.

A *copy* is the quantized form of a tensor, which a layer saves for the backward pass. If several layers save the same
tensor, such as the input of the projections q, k and v or of a residual branch, the tensor is quantized once. A copy is
found by the tensor's storage, the tensor's place in the storage and its version. An in-place change or a reused address
is therefore not mistaken for the saved tensor. The cache refers to the storage weakly and does not keep it alive.
Writes through `x.data` or `x.numpy()` do not change the version, so on the CPU a checksum of the content is compared as
well. The cache drops its copies when the forward pass ends, or when the checkpointed region ends in which they were
made.

If a layer saves an activation's result, then from the next forward pass on the activation makes the copy for that
layer. The activation's result, its own codes and the copy are then computed in one pass over memory.
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
    """The copies made in the forward pass that runs in a thread.

    The cache also remembers, from earlier forward passes, which layers saved the results of activations. Outside of a
    forward pass the cache finds nothing and adds nothing.
    """

    def __init__(self, checkpoints: CheckpointRegions):
        self.has_fixed_point = False  # whether a norm has ever added a fixed-point copy
        self._checkpoints = checkpoints
        self._local = _Local()
        self._consumers = {}  # {(number, shape, dtype) of an activation: quantizer of the layer that saves its result}

    @property
    def is_open(self) -> bool:
        """True while a forward pass runs in this thread."""
        return self._local.entries is not None

    def begin(self) -> None:
        """Start a forward pass with no copies."""
        local = self._local
        local.entries, local.results, local.exposed = {}, {}, {}

    def end(self) -> None:
        """Drop the copies of the forward pass."""
        self._local.entries, self._local.results = None, {}

    # -- Copies ------------------------------------------------------------------------------------------

    def get(self, x, key):
        """Return the copy of x (`SavedTensors`) that a layer may use whose quantizer has the key `key`, or None."""
        entries = self._entries()
        found = entries.get((*_place(x), key)) if entries else None
        if found is None or x.untyped_storage()._cdata in self._local.exposed:
            return None
        _, saved, content = found
        return saved if content is None or content == fingerprint(x) else None

    def put(self, x, key, saved) -> None:
        """Add a copy of x, for later layers that save x and whose quantizer has the same settings.

        A tensor counts as x if it has the same place in memory, shape, strides, dtype and version.

        Args:
            x: the tensor.
            key: the settings of the copy, as `Quantizer.key`.
            saved: the copy, `SavedTensors`.
        """
        entries = self._entries()
        if entries is not None and not x.is_inference():
            if offload.is_active():
                _drop_expired(entries)
            # The weak reference keeps the storage's identity, not its memory, from being used again.
            entries[*_place(x), key] = StorageWeakRef(x.untyped_storage()), saved, fingerprint(x)

    def get_fixed_point(self, x):
        """Return the copy of x in K-bit fixed point, or None. A norm, or an activation after the norm, adds such a copy."""
        return self.get(x, _FIXED_POINT) if self.has_fixed_point else None

    def put_fixed_point(self, y, saved) -> None:
        """Add a copy of y in K-bit fixed point, which linear layers, convolutions and activations of y use."""
        self.has_fixed_point = True
        self.put(y, _FIXED_POINT, saved)

    def stop_sharing(self, x) -> None:
        """Stop sharing copies of x in this forward pass, because x's memory may change without a new version."""
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
        """The number of activations that have run in this forward pass."""
        return len(self._local.results)

    def consumer_quantizer(self, x):
        """Return the quantizer of the layer that saved this activation's result in an earlier forward pass, or None.

        Args:
            x: the activation's input. An activation is recognized by its number in the forward pass and by the shape
                and dtype of x.
        """
        if not self.is_open or in_checkpoint():
            return None
        return self._consumers.get((self.result_count, x.shape, x.dtype))

    def record_output(self, x, y, quantizer=None, saved=None) -> None:
        """Record that an activation of x returned y.

        Args:
            x: the activation's input.
            y: the activation's result.
            quantizer: the quantizer for which the activation made a copy of y, or None.
            saved: the copy that the activation made of y, or None.
        """
        if not self.is_open or in_checkpoint():
            return
        number = self.result_count, x.shape, x.dtype
        self._local.results[_place(y)] = _Result(number, y, saved is not None)
        if saved is not None:
            self.put(y, quantizer.key, saved)

    def record_consumer(self, x, quantizer) -> int | None:
        """Record that the layer that has the quantizer `quantizer` saves x.

        If x is an activation's result, the activation makes the copy of x in the next forward pass.

        Returns:
            The number of the activation in this forward pass; None if x is not an activation's result.
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
        """Forget the layers that did not use the copy that an activation made for them in this forward pass."""
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
