"""The dtype of groups' minimums for the tensors of one layer, on devices that the host does not wait for.

On the CPU every tensor decides for itself. On a GPU the host may not wait for the answer, and a layer goes by an earlier
tensor of its own, whose answer has arrived meanwhile. Either way values are exact in expectation; only their variance
depends on the answer.
"""

from __future__ import annotations

import torch

from fewbit.runtime.backends.reference_quantizer import limits_of
from fewbit.runtime.format.groups import STEPS


class MinDtypeSelector:
    """Selects the dtype for one layer. Tensors number 1, 2, 4, 8 ... and then every 256th are examined."""

    EVERY = 256
    """The period with which tensors are examined in the long run."""

    def __init__(self):
        self.is_large = False
        self._count = 0
        self._pending = None  # (answer on the host, event after which it is there)

    def __getstate__(self):
        return {"is_large": self.is_large, "_count": self._count, "_pending": None}

    def poll(self) -> bool:
        """Return the latest answer that has arrived: whether minimums are float32."""
        if self._pending is None or torch.cuda.is_current_stream_capturing():
            return self.is_large
        if self._pending[1].query():
            self.is_large, self._pending = bool(self._pending[0]), None
        return self.is_large

    def ask(self, ranges: torch.Tensor) -> None:
        """Start to find the answer for a tensor from its minimums and ranges, without waiting."""
        if torch.cuda.is_current_stream_capturing() or not ranges.numel():
            return
        self._count += 1
        if self._count & (self._count - 1) and self._count % self.EVERY:
            return
        with torch.cuda.device(ranges.device):
            answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            answer.copy_(is_large(ranges), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = answer, event


def is_large(ranges: torch.Tensor) -> torch.Tensor:
    """Return whether the range of all groups together is below 8 bfloat16 steps of their minimum, as a 0-D bool."""
    minimum, extent = limits_of(ranges)
    least, greatest = minimum.min(), (minimum + extent).max()
    exponent = torch.frexp(least)[1] - 1
    step = torch.ldexp(torch.ones_like(least), exponent - 7)
    return (least != 0) & (greatest - least < STEPS * step)
