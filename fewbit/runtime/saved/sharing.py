"""The quantized copies that the layers of one model share during a forward pass.

A copy is found by the saved tensor's storage, place in the storage, and version, and by the CUDA stream. The *consumer*
of an activation is the layer that saves its result; the activation makes the copy for it. A *mask* is the 1-bit codes
of a ReLU, which say where its result is 0.
"""

from __future__ import annotations

import weakref

import torch
from torch.autograd.function import BackwardCFunction

from fewbit.runtime.format import layout
from fewbit.runtime.interop.checkpoint import top_hooks
from fewbit.runtime.interop.cuda_streams import stream_of
from fewbit.runtime.saved import offload

FIXED_POINT = "pre-activation"
_SOFTMAX = "softmax"
_storages = torch.UntypedStorage
_UNKNOWN = object()
_STEPS, _MOST_PATHS = 5, 8
"""`keep_source` looks for a result at most so many operations before the argument of a logarithm, on so many paths side by side."""


def place_of(x: torch.Tensor, changes: int = 0, stride=_UNKNOWN) -> tuple | None:
    """Return a tuple that identifies a tensor with its present content, and the current stream.

    It is None for an inference tensor, which has no version. `changes` is the number of in-place changes of x that its
    version does not count yet; `stride` is None if the caller knows that x is contiguous.
    """
    try:
        version = x._version + changes
    except RuntimeError:
        return None
    if stride is not None:
        stride = None if x.is_contiguous() else x.stride()
    place = x.untyped_storage()._cdata, x.storage_offset(), x.shape, stride, x.dtype, version
    return (*place, stream_of(x)) if x.is_cuda else place


def memory_of(x: torch.Tensor, changes: int = 0) -> tuple | None:
    """Return what identifies the content of a dense tensor, whatever its shape; see `place_of`."""
    try:
        version = x._version + changes
    except RuntimeError:
        return None
    storage = x.untyped_storage()
    memory = storage._cdata, x.storage_offset(), x.numel(), x.dtype, version
    return (*memory, stream_of(x)) if x.is_cuda else memory


def address_of(x: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's storage; None for None."""
    return None if x is None else x.untyped_storage()._cdata


class SharedCopies:
    """The copies that the layers of one model have made in a forward pass, or in one run of a region.

    In all methods, `place` is `place_of` the tensor, and `key` the `Quantizer.key` of the layer.

    Attributes:
        copies: {place of a tensor: {key: copy}}.
        keys: the keys of all copies other than fixed-point ones.
        results: {place of an activation's result: `ActivationResult`}, in the order of the activations.
        masks: {memory of a ReLU's result: its mask}.
        exposed: the addresses of storages that may change while their version does not.
        wanted: {autograd node: (version, weak reference) of its result}, for layers that use their result in the backward
            pass instead of a copy, if the result is kept anyway.
    """

    __slots__ = (
        "_held",
        "_linear",
        "copies",
        "exposed",
        "keys",
        "masks",
        "results",
        "wanted",
    )

    def __init__(self):
        self.keys, self.results = set(), {}
        self.copies = {}
        self.masks = {}
        self.exposed = set()
        self.wanted = {}
        self._held = {}  # {address of a storage: weak reference, which keeps the address from being used again}
        self._linear = None  # {autograd node: what computes its result again}

    def __del__(self):
        held = self._held
        for address in held:
            _storages._free_weak_ref(held[address])

    # -- Copies ------------------------------------------------------------------------------------------

    def get(self, place: tuple, key):
        if place not in self.copies or place[0] in self.exposed:
            return None
        copies = self.copies[place]
        found = copies.get(key)
        if callable(found):
            found = copies[key] = found()
        return found

    def entries(self, place: tuple | None) -> dict:
        if place not in self.copies or place[0] in self.exposed:
            return {}
        return self.copies[place]

    def with_more_bits(self, place: tuple, key: tuple):
        """Return a copy that has more bits than that of `key` and no other difference, or None."""
        bits, *others = key
        for more, *of_other in sorted(self.copies.get(place, ()), key=str):
            if bits is not None and more is not None and more > bits and of_other == others:
                found = self.get(place, (more, *of_other))
                if found is not None:
                    return found
        return None

    def put(self, x: torch.Tensor, place: tuple | None, key, saved) -> None:
        """Add a copy of a tensor, or a function that returns the copy or None; without a place, it is not shared."""
        if place is None:
            return
        if place[0] not in self._held or offload.running.entered:
            self._hold(x, place)
        if place in self.copies:
            self.copies[place][key] = saved
        else:
            self.copies[place] = {key: saved}
        if key not in self.keys and key != FIXED_POINT:
            self.keys.add(key)

    def clear(self) -> None:
        self.copies.clear()
        self.masks.clear()

    def _hold(self, x, place) -> None:
        """Keep the address of x's storage from being used again."""
        if offload.running.entered:
            self._drop_expired()
        if place[0] not in self._held:
            self._held[place[0]] = x.untyped_storage()._weak_ref()

    def _drop_expired(self) -> None:
        """Drop copies and masks of tensors that no longer exist, before the forward ends."""
        gone = {at for at, reference in self._held.items() if _storages._expired(reference)}
        for entries in (self.copies, self.masks):
            for place in [place for place in entries if _address(place) in gone]:
                del entries[place]

    def stop_sharing(self, x) -> None:
        """Stop sharing copies of x, whose memory may change while its version does not."""
        # Parameters of lazy modules refuse access through `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                storage = x.untyped_storage()
            except (RuntimeError, NotImplementedError):
                return  # sparse tensors and vmap's tensors have no storage, so there are no copies of them
            # A later storage at the same address would get no shared copies.
            self._held.setdefault(storage._cdata, storage._weak_ref())
            self.exposed.add(storage._cdata)

    # -- Fixed-point copies, and results of softmax --------------------------------------------------------

    def get_softmax(self, x, key=None):
        """Return a copy, with any key for None, if x is a result of softmax or a contiguous view of all of it."""
        if not self.copies or not x.is_contiguous():
            return None
        memory = memory_of(x)
        found = self.copies.get((_SOFTMAX, memory))
        if found is None or memory[0] in self.exposed:
            return None
        settings, saved = found
        return saved.viewed(tuple(x.shape)) if key in (None, settings) else None

    def put_softmax(self, y, key, saved) -> None:
        memory = memory_of(y)
        if memory is not None and y.is_contiguous():
            self._hold(y, memory)
            self.copies[_SOFTMAX, memory] = key, saved

    # -- Results of linear layers that later layers compute again -----------------------------------------

    @property
    def has_linear(self) -> bool:
        return bool(self._linear)

    def put_linear(self, node, y: torch.Tensor, saved) -> None:
        """Add the `SavedTensors` that compute the result y of the linear layer with this autograd node."""
        if self._linear is None:
            self._linear = weakref.WeakKeyDictionary()
        # This tensor has no memory, but it has the version of y, and of all views of y.
        version = y.detach()
        version.data = y.new_empty(0)
        self._linear[node] = saved, version, version._version, y.untyped_storage()._cdata

    def get_linear(self, node):
        """Return what computes a node's result again; None if it is no linear layer's, or was changed in place."""
        # torch's own nodes have no weak references.
        if not self._linear or not isinstance(node, BackwardCFunction):
            return None
        found = self._linear.get(node)
        if found is None:
            return None
        saved, version, number, address = found
        is_changed = version._version != number or address in self.exposed
        if self.exposed:
            is_changed = is_changed or not self.exposed.isdisjoint(map(address_of, saved.tensors))
        return None if is_changed else saved

    # -- Results that are kept anyway -------------------------------------------------------------------------

    def note_kept(self, x: torch.Tensor) -> bool:
        """Give a layer its result if that is x, which is kept until the backward pass, or if x is a view of at least half of it.

        The layer's autograd node gets the attribute `result`. Return whether there is such a layer.
        """
        # Parameters of lazy modules refuse access through `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            if not x.requires_grad:
                return False
            y = x._base if x._is_view() else x
            node = y.grad_fn
            if node not in self.wanted or y._version != self.wanted[node][0]:
                return False
            if y is not x and y.numel() > 2 * x.numel():
                return False
            if self.exposed and address_of(y) in self.exposed:
                return False
            y, hooks = y.detach(), top_hooks(False)
            if hooks is None:
                node.result = y, y._version, None
            else:  # as torch saves tensors
                pack, unpack = hooks
                node.result = pack(y), None, unpack
            return True

    def keep_source(self, x: torch.Tensor) -> None:
        """Keep the result from which x was computed in a few steps, such as `x = y.clamp(min=1e-6)`, if it still exists."""
        found, seen, level = set(), set(), {x.grad_fn} - {None}
        for _ in range(_STEPS):
            found |= level & self.wanted.keys()
            seen |= level
            before = {each for node in level - found for each, _ in node.next_functions}
            level = before - seen - {None}
            if len(level) > _MOST_PATHS:
                return
        y = self.wanted[found.pop()][1]() if len(found) == 1 else None
        if y is not None and y.numel() <= 2 * x.numel():
            self.note_kept(y)

    # -- Masks ---------------------------------------------------------------------------------------------

    def put_mask(self, y: torch.Tensor, mask: torch.Tensor, changes: int) -> None:
        """Add the mask of a ReLU's result y, in the order of y's memory."""
        memory = memory_of(y, changes)
        if memory is not None:
            self._hold(y, memory)
            self.masks[memory] = mask

    def get_mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the mask if x is the result of a ReLU or a view of all of it, else None."""
        if not self.masks or not layout.is_dense(x):
            return None
        memory = memory_of(x)
        mask = self.masks.get(memory)
        return None if mask is None or memory[0] in self.exposed else mask

    # -- Activations whose results are saved by layers ---------------------------------------------------

    def record_output(self, x, y, place: tuple | None, has_copy: bool) -> None:
        number = len(self.results), x.shape, x.dtype
        if place is None:
            place = number
        else:
            self._hold(y, place)
        self.results[place] = ActivationResult(number, has_copy)


class ActivationResult:
    """An activation's result in a forward pass.

    Attributes:
        number: (number of the activation, shape and dtype of its input).
        has_copy: whether the activation made a copy of the result for its consumer.
        is_used: whether a layer saved the result.
    """

    __slots__ = ("has_copy", "is_used", "number")

    def __init__(self, number, has_copy):
        self.number, self.has_copy, self.is_used = number, has_copy, False


def _address(place) -> int:
    return place[1][0] if place[0] == _SOFTMAX else place[0]
