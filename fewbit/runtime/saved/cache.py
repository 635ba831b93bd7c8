"""The quantized copies that the layers of one model share during a forward pass.

A *copy* is the quantized form of a tensor, which a layer saves for the backward pass. If several layers save the same
tensor, such as the input of the projections q, k and v or of a residual branch, the tensor is quantized once. The cache
finds a copy by the tensor's storage, place in the storage, and version. torch increases the version with every in-place
change, so a changed tensor does not get an old copy. The cache has a weak reference to the storage. The memory can be
freed in spite of this reference, but no other storage object gets the same address while the reference exists. Writes
through `x.data` or `x.numpy()` do not change the version, so on the CPU a checksum of the content is compared as well.
A copy is shared only by layers that run in the CUDA stream in which the copy was made: another stream could read the copy
too early, and torch could reuse the copy's memory too early. The cache drops its copies when the forward pass ends.
Copies that were made in a checkpointed region are dropped when the region ends.

A layer that saves an activation's result is called the *consumer* of the activation. Once the cache has seen a
consumer, the activation makes the copy for the consumer in later forward passes, because one pass over memory can
compute the result, the activation's own codes and the copy.

A ReLU saves a 1-bit code for each element, and the codes say where its result is 0. The cache stores these codes as a
*mask*. A layer after the ReLU uses the mask to restore the zeros in its own copy of the result.

A *fixed-point copy* is a copy that a norm makes for itself and for the layers after it (`quantizers/preactivation.py`).
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from fewbit.runtime.format import layout
from fewbit.runtime.format.fingerprint import Content, fingerprint
from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.interop.cuda_streams import stream_of
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.checkpoints import CheckpointRegions

MOST_CONSUMERS = 4096
"""The largest number of remembered pairs of an activation and its consumer."""
_FIXED_POINT = "pre-activation"  # key of fixed-point copies; other copies have a `Quantizer.key`
_SOFTMAX = "softmax"  # the first part of the keys of results of softmax


class SavedTensorCache:
    """The copies that the layers of one model have made in the forward pass that runs in each thread.

    The cache also remembers the consumers of activations from earlier forward passes. Outside of a forward pass the
    cache finds nothing and adds nothing.

    Args:
        checkpoints: the checkpointed regions of the model. Each region has copies of its own.
    """

    def __init__(self, checkpoints: CheckpointRegions):
        self.has_fixed_point = False  # whether a norm has ever added a fixed-point copy
        self._checkpoints = checkpoints
        self._local = _Local()
        self._consumers = {}  # {(number, input shape, input dtype) of an activation: quantizer of its consumer}

    @property
    def is_open(self) -> bool:
        """True while a forward pass runs in this thread."""
        return self._local.entries is not None

    def begin(self) -> None:
        """Start a forward pass with no copies."""
        local = self._local
        local.entries, local.results, local.masks, local.exposed = {}, {}, {}, {}
        local.keys, local.linear = set(), weakref.WeakKeyDictionary()

    def end(self) -> None:
        """Drop the copies of the forward pass."""
        self._local.entries, self._local.results, self._local.masks = None, {}, {}
        self._local.keys, self._local.linear = set(), {}

    # -- Copies ------------------------------------------------------------------------------------------

    def get(self, content: Content, key):
        """Return the copy of a tensor that was put into the cache with this key, or None.

        Args:
            content: the tensor. Its memory, shape, strides, dtype and version must be the same as those of the tensor
                that `put` received.
            key: the settings of the copy: `Quantizer.key` of the layer that looks for the copy.

        Returns:
            The copy (`SavedTensors`) or None.
        """
        entries, place = self._entries(), (content.place, key)
        found = entries.get(place) if entries else None
        if found is None or content.storage._cdata in self._local.exposed:
            return None
        reference, saved, checksum = found
        if not _is_same(checksum, content):
            return None
        if callable(saved):
            saved = saved()
            if saved is not None:
                entries[place] = reference, saved, checksum
        return saved

    def keys(self) -> set:
        """Return the settings of all copies, other than fixed-point ones, that this forward pass has put into the cache."""
        return self._local.keys

    def put(self, content: Content, key, saved) -> None:
        """Add a copy of a tensor, for later layers that save the tensor and whose quantizer has the same settings.

        Args:
            content: the tensor.
            key: the settings of the copy: `Quantizer.key` of the layer that made the copy.
            saved: the copy, `SavedTensors`; or a function, which is called if a layer looks for the copy, and returns the
                copy or None.
        """
        entries = self._entries()
        if entries is not None and not content.x.is_inference():
            if offload.is_active():
                _drop_expired(entries)
            # While the weak reference exists, no other storage object gets the same address. The memory can be freed.
            entry = StorageWeakRef(content.storage), saved, content.checksum
            entries[content.place, key] = entry
            if key != _FIXED_POINT:
                self._local.keys.add(key)

    # -- Results of linear layers that later layers compute again -----------------------------------------

    @property
    def has_linear(self) -> bool:
        """True if `put_linear` has added results in this forward pass."""
        return bool(self._local.linear)

    def put_linear(self, node, y: torch.Tensor, saved) -> None:
        """Add what computes the result of a linear layer again, for later layers.

        Args:
            node: the layer's autograd node.
            y: the result.
            saved: what computes the result, `SavedTensors`.
        """
        # A checkpointed region keeps its saved tensors only while it is differentiated.
        if self.is_open and not in_checkpoint():
            # This tensor has no memory, but it has the version of y, and of all views of y.
            version = y.detach()
            version.data = y.new_empty(0)
            place = y.untyped_storage()._cdata
            self._local.linear[node] = saved, version, version._version, place

    def get_linear(self, node):
        """Return what computes the result of a node again.

        Returns:
            `SavedTensors`. None if the node is not that of a linear layer, or if its result has been changed in place.
        """
        # torch's own nodes have no weak references.
        found = self._local.linear.get(node) if isinstance(node, BackwardCFunction) else None
        if found is None:
            return None
        saved, version, number, place = found
        is_changed = version._version != number or place in self._local.exposed
        return None if is_changed else saved

    # -- Masks ---------------------------------------------------------------------------------------------

    def put_mask(self, content: Content, mask: torch.Tensor, is_in_place: bool) -> None:
        """Add the mask of a ReLU's result y, for later layers that save y.

        Args:
            content: the result y.
            mask: its mask: the packed codes of 1 bit, int32, in the order of y's memory. A bit is 0 where y is 0.
            is_in_place: whether y overwrote the ReLU's input. torch increases y's version when the ReLU returns.
        """
        y = content.x
        can_find = self.is_open and not in_checkpoint() and layout.is_dense(y)
        if can_find and not y.is_inference():
            if offload.is_active():
                _drop_expired(self._local.masks)
            entry = StorageWeakRef(content.storage), mask, content.checksum
            self._local.masks[_memory(y, is_in_place)] = entry

    def get_mask(self, content: Content) -> torch.Tensor | None:
        """Return the mask of a tensor that is the result of a ReLU, or a view of all its elements; else None."""
        if not self._local.masks or in_checkpoint() or not layout.is_dense(content.x):
            return None
        found = self._local.masks.get(_memory(content.x))
        if found is None or content.storage._cdata in self._local.exposed:
            return None
        _, mask, checksum = found
        return mask if _is_same(checksum, content) else None

    def get_fixed_point(self, x):
        """Return the fixed-point copy of x, or None. x is the result of a norm, or of an activation after a norm."""
        return self.get(Content(x), _FIXED_POINT) if self.has_fixed_point else None

    def put_fixed_point(self, y, saved) -> None:
        """Add a fixed-point copy of y, for an activation, a linear layer or a convolution that gets y."""
        self.has_fixed_point = True
        self.put(Content(y), _FIXED_POINT, saved)

    def put_softmax(self, y, key, saved) -> None:
        """Add the copy that softmax saves of its result y, for products whose factor is y or a view of all of y.

        Args:
            y: the result.
            key: the settings of the copy: `Quantizer.key`.
            saved: the copy, `SavedTensors`.
        """
        entries = self._entries()
        if entries is not None and y.is_contiguous() and not y.is_inference():
            reference, checksum = StorageWeakRef(y.untyped_storage()), fingerprint(y)
            entries[_SOFTMAX, *_memory(y)] = reference, (key, saved), checksum

    def get_softmax(self, x, key=None):
        """Return a copy of x if x is a result of softmax, or a contiguous view of all its elements; else None.

        Args:
            x: the tensor.
            key: the settings that the copy must have; None for any settings.
        """
        entries = self._entries()
        if not entries or not x.is_contiguous():
            return None
        found = entries.get((_SOFTMAX, *_memory(x)))
        if found is None or x.untyped_storage()._cdata in self._local.exposed:
            return None
        _, (settings, saved), checksum = found
        is_usable = key in (None, settings) and _is_same(checksum, Content(x))
        return saved.viewed(tuple(x.shape)) if is_usable else None

    def stop_sharing(self, x) -> None:
        """Stop sharing copies of x in this forward pass, because x's memory may change while its version does not."""
        if not self.is_open:
            return
        # Parameters of lazy modules refuse access through `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                storage = x.untyped_storage()
                # The reference reserves the address: a later storage at the same address would get no shared copies.
                self._local.exposed[storage._cdata] = StorageWeakRef(storage)
            except (RuntimeError, NotImplementedError):
                pass  # sparse tensors and vmap's tensors have no storage, so the cache has no copies of them

    def _entries(self) -> dict | None:
        return self._checkpoints.entries(self._local.entries)

    # -- Activations whose results are saved by layers ---------------------------------------------------

    @property
    def result_count(self) -> int:
        """The number of activations that have run in this forward pass, which is the next activation's number."""
        return len(self._local.results)

    def has_result(self, content: Content) -> bool:
        """Return whether a tensor is the result of an activation of this forward pass."""
        return content.place in self._local.results

    def consumer_quantizer(self, x):
        """Return the quantizer of the consumer of the activation that runs next, or None if no consumer is known.

        Args:
            x: the activation's input. An activation is recognized by its number in the forward pass and by the shape
                and dtype of x.
        """
        if not self.is_open or in_checkpoint():
            return None
        return self._consumers.get((self.result_count, x.shape, x.dtype))

    def record_output(self, x, content: Content, quantizer=None, saved=None) -> None:
        """Record that an activation with input x returned a result.

        Args:
            x: the activation's input.
            content: the activation's result.
            quantizer: the quantizer for which the activation made a copy of the result, or None.
            saved: the copy that the activation made of the result, or None.
        """
        if not self.is_open or in_checkpoint():
            return
        number = self.result_count, x.shape, x.dtype
        self._local.results[content.place] = _Result(number, content.storage, saved is not None)
        if saved is not None:
            self.put(content, quantizer.key, saved)

    def record_consumer(self, content: Content, quantizer) -> int | None:
        """Record that a layer saves a tensor. If this is an activation's result, the layer is the activation's consumer.

        Args:
            content: the tensor.
            quantizer: the quantizer of the layer.

        Returns:
            The number of the activation in this forward pass; None if the tensor is not an activation's result.
        """
        results = self._local.results
        result = results.get(content.place) if results else None
        if result is None or not self.is_open or in_checkpoint():
            return None
        result.is_used = True
        if len(self._consumers) >= MOST_CONSUMERS:
            self._consumers.clear()  # so many pairs arise if the inputs' shapes change all the time
        self._consumers[result.number] = quantizer
        return result.number[0]

    def forget_unused(self) -> None:
        """Forget each consumer that did not use the copy that an activation made for it in this forward pass."""
        for result in self._local.results.values():
            if result.has_copy and not result.is_used:
                self._consumers.pop(result.number, None)


class _Local(threading.local):
    """The state of the forward pass that runs in a thread."""

    def __init__(self):
        self.entries = None  # {(place, key): (reference to the storage, SavedTensors, checksum)}
        self.keys = set()  # of `entries`
        self.results = {}  # {place: _Result}
        # {autograd node: (SavedTensors, a tensor with the version of the result, its version, the result's storage)}
        self.linear = {}
        self.masks = {}  # {memory: (reference to the storage, mask, checksum)}
        self.exposed = {}  # {address: reference} of storages that may change while their version does not


class _Result:
    """An activation's result in this forward pass.

    Attributes:
        number: (number of the activation, shape and dtype of its input).
        has_copy: whether the activation made a copy of the result for its consumer.
        is_used: whether a layer saved the result.
        storage: a weak reference, so that no other storage gets the result's address.
    """

    def __init__(self, number, storage, has_copy):
        self.number, self.has_copy, self.is_used = number, has_copy, False
        self.storage = StorageWeakRef(storage)


def _is_same(checksum, content: Content) -> bool:
    """Return whether a tensor has this checksum. A tensor on a device has none, and counts as unchanged."""
    return checksum is None or checksum == content.checksum


def _memory(x, changes: int = 0) -> tuple:
    """Return a tuple that identifies the content of a dense tensor, whatever its shape, and the current stream.

    Args:
        x: the tensor.
        changes: the number of in-place changes of x that its version does not count yet.
    """
    storage = x.untyped_storage()
    place = storage._cdata, x.storage_offset(), x.numel(), x.dtype, x._version + changes
    return *place, stream_of(x)


def _drop_expired(entries) -> None:
    """Drop copies and masks of tensors that no longer exist. They would stay on the device until the forward ends."""
    for key in [key for key, (storage, *_) in entries.items() if storage.expired()]:
        del entries[key]
