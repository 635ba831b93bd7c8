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
from fewbit.runtime.format.groups import seed_rows
from fewbit.runtime.ops.quantizer_ops import is_offset


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
        self._pending = None  # (extremes in pinned memory, kind of the copy, event after which they are complete)

    def __getstate__(self):
        return {"is_large": self.is_large, "_count": self._count, "_pending": None}

    def poll(self) -> bool:
        """Return whether the next tensor gets float32 minimums, by the latest answer that has arrived from the GPU."""
        if self._pending is None or torch.cuda.is_current_stream_capturing():
            return self.is_large
        extremes, kind, event = self._pending
        if event.query():
            self.is_large, self._pending = is_large(extremes, kind), None
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
            extremes = torch.empty(
                2, ranges.shape[1], dtype=ranges.dtype, device="cpu", pin_memory=True
            )
            extremes.copy_(extremes_of(ranges, kind), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = extremes, kind, event


def extremes_of(ranges: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the least and the greatest entry of each column of a copy's ranges, (2, 2 or 3) bfloat16.

    One kernel computes them, because launches take longer than the work that is left for the host.

    Args:
        ranges: the ranges of the copy, (rows, 2 or 3) bfloat16 (docs/concepts/quantizer.md).
        kind: the kind of the copy.
    """
    found = ranges.new_empty(2, ranges.shape[1])
    torch.aminmax(ranges[: len(ranges) - seed_rows(kind)], dim=0, out=(found[0], found[1]))
    return found


def is_large(extremes: torch.Tensor, kind: str) -> bool:
    """Return whether a tensor's elements are so far from zero that it needs float32 minimums.

    It does if the greatest element minus the least element is less than 8 times the spacing of bfloat16 numbers at the
    least element. The greatest element is estimated as the greatest minimum plus the greatest range of a group. This
    estimate is never below the greatest element. Copies of other kinds have no extremes. They are estimated as the least
    mean minus 2.5 times the greatest scale, and the greatest mean plus 2.5 times the greatest scale. Of a float32 minimum or mean, only the upper half counts.

    Args:
        extremes: the result of `extremes_of`, on the host.
        kind: the kind of the copy.
    """
    (least, least_extent, *_), (greatest, greatest_extent, *_) = extremes.tolist()
    if kind == UNIFORM:
        return is_offset(least, greatest + greatest_extent)
    scale = max(abs(least_extent), abs(greatest_extent))  # 0.8 to 1.2 standard deviations
    return is_offset(least - 2.5 * scale, greatest + 2.5 * scale)
