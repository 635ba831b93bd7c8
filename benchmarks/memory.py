"""Appendix B of Few-bit Backward compared with what fewbit counts, for every model.

    python benchmarks/memory.py            # under a minute

Prints fewbit's number, the paper's and their ratio, and writes results/memory.json. Columns whose names
contain `allocated` have the numbers that torch's caching allocator would report for the same tensors
(`CachingAllocator`), because the paper's numbers contain the allocator's rounding.
"""

from __future__ import annotations

import weakref

import harness
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fewbit import models
from fewbit.analysis.memory import (
    BITS,
    DEVICE_BYTES,
    MB,
    PAPER,
    MemoryReport,
    freeze_dropout,
    measure,
    paper_activation,
)

WORKSPACE = 5 * MB  # an example, not a figure of cuDNN: a scratch buffer that changes the result


# -- The allocator -----------------------------------------------------------------------------------


class _Block:
    def __init__(self, segment, offset, size, previous=None, following=None):
        self.segment, self.offset, self.size = segment, offset, size
        self.previous, self.following = previous, following
        self.free = False


class CachingAllocator:
    """The simulation of torch's caching allocator for CUDA with one stream, to compute what it would report.

    A request is rounded up to a multiple of 512 bytes. Requests up to 1 MB are served from segments of 2 MB (the small
    pool), and larger ones below 10 MB from segments of 20 MB. A still larger request gets a segment of its own, a multiple
    of 2 MB. The allocator takes the smallest free block that fits, and splits it if more than 1 MB would be left (in the
    small pool: 512 bytes or more). Otherwise `torch.cuda.memory_allocated()` counts the whole block.

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


# -- The table ---------------------------------------------------------------------------------------


def allocated(name, size, workspace=0):
    """Return (MB of the model, MB of the tensors that a forward leaves) as the simulated allocator counts them.

    Args:
        name: The name of a model.
        size: The width and height of the image in pixels, or the number of tokens.
        workspace: The bytes that every convolution needs temporarily.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        model = models.build(name, paper_activation(name))
        freeze_dropout(model)
        track = Allocations(workspace)
        for tensor in state_in_order(model):
            track.add(tensor)
        before = track.allocator.allocated
        if models.family(name).is_text:
            inputs = torch.zeros((1, size), dtype=torch.int64)
        else:
            inputs = torch.empty((1, 3, size, size))
        track.add(inputs)
        with track:
            output = model(inputs)
        after = track.allocator.allocated
        del output
    return before / MB, (after - before) / MB


def row(name):
    measured = measure(name)
    record = MemoryReport((measured,), DEVICE_BYTES, BITS).records()[0]
    ours = {
        "model_mb": measured.model_bytes / MB,
        "activation_mb": measured.activation_bytes / MB,
        "nonlinear_mb": measured.nonlinear_bytes / MB,
        "max_batch_standard": record["max_batch_standard"],
        **{f"max_batch_{bits}bit": record[f"max_batch_{bits}bit"] for bits in BITS},
    }
    model_allocated, activation_allocated = allocated(name, measured.size)
    result = {"model": name, "size": measured.size, "parameters": measured.parameters}
    printed = PAPER.get(name, (None,) * len(ours))
    for (key, value), figure in zip(ours.items(), printed, strict=True):
        result[key] = value if isinstance(value, int) else round(value, 3)
        result[f"paper_{key}"] = figure
        result[f"ratio_{key}"] = None if figure is None else round(value / figure, 4)
    result["model_mb_allocated"] = round(model_allocated, 3)
    result["activation_mb_allocated"] = round(activation_allocated, 3)
    _, with_workspace = allocated(name, measured.size, WORKSPACE)
    result["activation_mb_allocated_5mb_workspace"] = round(with_workspace, 3)
    for bits in BITS:
        result[f"max_batch_packed_{bits}bit"] = record[f"max_batch_packed_{bits}bit"]
    return result


def main():
    about = harness.machine("torch", "transformers")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(
        f"\n{'':16}{'model MB':^24}{'saved MB':^24}{'nonlinear MB':^24}{'batch':^18}{'2 bit':^18}"
    )
    rows = []
    for name in models.names():
        each = row(name)
        rows.append(each)
        cells = ""
        for key, digits, width in (
            ("model_mb", 1, 8),
            ("activation_mb", 1, 8),
            ("nonlinear_mb", 1, 8),
            ("max_batch_standard", 0, 5),
            ("max_batch_2bit", 0, 5),
        ):
            figure, ratio = each[f"paper_{key}"], each[f"ratio_{key}"]
            cells += f"{each[key]:{width}.{digits}f}"
            cells += (
                f"{'-':>{width}}{'-':>8}" if figure is None else f"{figure:{width}}{ratio:8.3f}"
            )
        print(f"{name:16}{cells}")
    harness.save("memory", about, rows)
    compared = [each for each in rows if each["paper_model_mb"] is not None]
    near = sum(abs(each["ratio_activation_mb"] - 1) <= 0.02 for each in compared)
    print(f"\nsaved MB within 2 % of the paper's: {near} of {len(compared)}")
    near = sum(
        abs(each["activation_mb_allocated"] / each["paper_activation_mb"] - 1) <= 0.02
        for each in compared
    )
    print(f"the same by the simulated allocator: {near} of {len(compared)}")
    exact = sum(round(each["model_mb_allocated"], 1) == each["paper_model_mb"] for each in compared)
    print(f"model MB by the simulated allocator, same digits: {exact} of {len(compared)}")
    for each in compared:
        print(
            f"{each['model']:16} allocated: model {each['model_mb_allocated']:.1f} "
            f"(paper {each['paper_model_mb']}), kept {each['activation_mb_allocated']:.1f}, "
            f"with workspaces {each['activation_mb_allocated_5mb_workspace']:.1f} "
            f"(paper {each['paper_activation_mb']})"
        )


if __name__ == "__main__":
    main()
