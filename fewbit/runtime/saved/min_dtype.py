"""Decide whether the minimums (in rotated copies, the means) of groups are float32 or bfloat16, for one layer on a GPU.

A uniform copy has a minimum and a range for each group of elements. A minimum in bfloat16 is rounded down, and the range
is enlarged to reach the greatest element. If a tensor's elements are far from zero compared with their range, this makes
the range, and so the rounding errors, much larger. A rotated copy has means: the distance from a group's mean to the
nearest bfloat16 number adds to all elements of the group, and so to their rounding errors. On the CPU the dtype is
decided for every tensor. On a GPU the host would have to wait for the decision, so a layer uses the decision about one of
its earlier tensors. Dequantized values are exact in expectation with either dtype, but their variance differs.
"""

from __future__ import annotations

import torch

from fewbit.config import UNIFORM
from fewbit.runtime.backends.reference_quantizer import limits_of
from fewbit.runtime.format.groups import STEPS, seed_rows


class MinDtypeSelector:
    """Selects the dtype of minimums for one layer.

    It examines the tensors whose number, counted from 1, is a power of two or a multiple of 256.

    Attributes:
        is_large: the latest answer that has arrived: whether minimums must be float32.
    """

    EVERY = 256
    """In the long run, one of this many tensors is examined."""

    def __init__(self):
        self.is_large = False
        self._count = 0
        self._pending = None  # (answer in pinned memory, event after which the answer is complete)

    def __getstate__(self):
        return {"is_large": self.is_large, "_count": self._count, "_pending": None}

    def poll(self) -> bool:
        """Return whether the next tensor gets float32 minimums, by the latest answer that has arrived from the GPU."""
        if self._pending is None or torch.cuda.is_current_stream_capturing():
            return self.is_large
        if self._pending[1].query():
            self.is_large, self._pending = bool(self._pending[0]), None
        return self.is_large

    def ask(self, ranges: torch.Tensor, kind: str) -> None:
        """Start to compute whether a tensor needs float32 minimums, without waiting for the GPU.

        Args:
            ranges: the ranges of the tensor's copy, (rows, 2 or 3) bfloat16 (docs/concepts/quantizer.md).
            kind: the kind of the copy.
        """
        if torch.cuda.is_current_stream_capturing() or len(ranges) == seed_rows(kind):
            return
        self._count += 1
        if self._count & (self._count - 1) and self._count % self.EVERY:
            return
        with torch.cuda.device(ranges.device):
            answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            answer.copy_(is_large(ranges, kind), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = answer, event


def is_large(ranges: torch.Tensor, kind: str) -> torch.Tensor:
    """Return whether a tensor's elements are so far from zero that it needs float32 minimums, as a 0-D bool tensor.

    It does if the greatest element minus the least element is less than 8 times the spacing of bfloat16 numbers at the
    least element. A rotated copy has no extremes. They are estimated as the groups' means minus and plus 2.5 scales.

    Args:
        ranges: the ranges of the tensor's copy, (rows, 2 or 3) bfloat16 (docs/concepts/quantizer.md).
        kind: the kind of the copy.
    """
    minimum, extent = limits_of(ranges[: len(ranges) - seed_rows(kind)])
    if kind != UNIFORM:
        scale = extent.abs()  # 0.8 to 1.2 times the standard deviation of its group
        minimum, extent = minimum - 2.5 * scale, 5 * scale
    least, greatest = minimum.min(), (minimum + extent).max()
    exponent = torch.frexp(least)[1] - 1
    step = torch.ldexp(torch.ones_like(least), exponent - 7)
    return (least != 0) & (greatest - least < STEPS * step)
