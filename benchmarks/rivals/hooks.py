"""Hooks on saved tensors that quantize to 8 bits, as a user of torch could write them."""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ELEMENTS = 2**15
"""Smaller tensors, such as statistics of norms and of attention, are saved as they are."""


class _Copy:
    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale


def int8_hooks(module):
    """Return hooks that save a tensor as 8-bit integers, with a scale for each row. Equal tensors share one copy."""
    parameters = {StorageWeakRef(p.untyped_storage()).cdata for p in module.parameters()}
    copies = {}  # a weak reference to a storage keeps its address from being used again

    def pack(x):
        storage = StorageWeakRef(x.untyped_storage())
        is_large = x.is_floating_point() and x.numel() >= ELEMENTS
        if not is_large or storage.cdata in parameters:
            return (
                x.detach()
            )  # x itself could be the result of the node that saves it, a cycle of references
        key = storage.cdata, x._version, x.storage_offset(), x.shape, x.stride()
        _, known = copies.get(key, (None, lambda: None))
        if known() is None:
            scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            copy = _Copy((x.detach() / scale).round_().to(torch.int8), scale)
            copies[key] = storage, weakref.ref(copy, lambda _: copies.pop(key, None))
            return copy
        return known()

    def unpack(saved):
        return saved.codes * saved.scale if isinstance(saved, _Copy) else saved

    return pack, unpack
