"""A simulation of torch's caching allocator for CUDA with one stream, to compute what it would report.

A request is rounded up to a multiple of 512 bytes. Requests up to 1 MB are served from segments of 2 MB (the small
pool), and larger ones below 10 MB from segments of 20 MB. A still larger request gets a segment of its own, a multiple
of 2 MB. The allocator takes the smallest free block that fits, and splits it if more than 1 MB would be left (in the
small pool: 512 bytes or more). Otherwise `torch.cuda.memory_allocated()` counts the whole block.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MB = 2**20


class _Block:
    def __init__(self, segment, offset, size, previous=None, following=None):
        self.segment, self.offset, self.size = segment, offset, size
        self.previous, self.following = previous, following
        self.free = False


class CachingAllocator:
    """The simulated allocator.

    Attributes:
        allocated: The bytes of all blocks in use, with the unused ends of blocks that were not split.
    """

    def __init__(self):
        self.allocated = 0
        self._free = {True: set(), False: set()}  # by pool: True is the small one
        self._segments = 0

    def allocate(self, size):
        size = max(512, -(-size // 512) * 512)
        small = size <= MB
        pool = self._free[small]
        fitting = [block for block in pool if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda each: (each.size, each.segment, each.offset))
            pool.remove(block)
        else:
            large = 20 * MB if size < 10 * MB else -(-size // (2 * MB)) * 2 * MB
            block = _Block(self._segments, 0, 2 * MB if small else large)
            self._segments += 1
        self._split(block, size, small)
        block.free = False
        self.allocated += block.size
        return block, small

    def _split(self, block, size, small):
        left = block.size - size
        if left >= 512 if small else left > MB:
            rest = _Block(block.segment, block.offset + size, left, block, block.following)
            if block.following is not None:
                block.following.previous = rest
            block.following, block.size = rest, size
            rest.free = True
            self._free[small].add(rest)

    def release(self, block, small):
        self.allocated -= block.size
        pool, block.free = self._free[small], True
        before, after = block.previous, block.following
        if after is not None and after.free:
            pool.remove(after)
            self._merge(block, after)
        if before is not None and before.free:
            pool.remove(before)
            self._merge(before, block)
            block = before
        pool.add(block)

    @staticmethod
    def _merge(block, following):
        block.size += following.size
        block.following = following.following
        if block.following is not None:
            block.following.previous = block


class Allocations(TorchDispatchMode):
    """A dispatch mode that allocates the storages of operators' results in the simulated allocator, while they live.

    Args:
        workspace: The bytes that every convolution needs while it runs, as cuDNN's kernels do.
    """

    def __init__(self, workspace=0):
        super().__init__()
        self._workspace = workspace
        self.allocator = CachingAllocator()
        self._alive = {}

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or not storage.nbytes():
            return
        held = self.allocator.allocate(storage.nbytes())

        def died(_):
            del self._alive[key]
            self.allocator.release(*held)

        self._alive[key] = weakref.ref(storage, died)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        scratch = self._workspace if "convolution" in str(operator) else 0
        held = self.allocator.allocate(scratch) if scratch else None
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        if held is not None:
            self.allocator.release(*held)
        return result


def state_in_order(module):
    """Yield parameters and buffers in the order in which `module.to(device)` moves them."""
    for child in module.children():
        yield from state_in_order(child)
    for own in (module._parameters, module._buffers):
        yield from (tensor for tensor in own.values() if tensor is not None)
