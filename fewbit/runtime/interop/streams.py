"""The CUDA stream in which work on a tensor is put."""

from __future__ import annotations

import torch


def current_stream_of(x) -> int:
    """Return a number that identifies the current stream of x's device. It is 0 if the device has no streams."""
    if not x.is_cuda:
        return 0
    return torch.cuda.current_stream(x.device).cuda_stream
