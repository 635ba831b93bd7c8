"""CUDA streams: the current one and its capture, memory that several streams use, and copies to the host."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch


def stream_of(x: torch.Tensor) -> int:
    """Return a number that identifies the current stream of x's device, 0 without CUDA."""
    # torch.cuda.current_stream would make an object each time, which takes longer.
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def hold_for_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Prevent CUDA memory of other streams from being reused before the current stream has done its present work."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class AsyncHostCopy:
    """A copy of floating tensors to the host. Making this object starts the copy."""

    def __init__(self, tensors):
        self._tensors = list(tensors)  # kept alive, since `values` has their ids
        hold_for_stream(self._tensors)  # if this object is dropped before the copy is complete
        self._parts = {}
        for device in {tensor.device for tensor in self._tensors}:
            self._parts[device] = _start(
                [
                    tensor.detach().reshape(-1).double()
                    for tensor in self._tensors
                    if tensor.device == device
                ]
            )

    def is_there(self) -> bool:
        """Return whether the copy is complete; False during the capture of a CUDA graph, which forbids queries."""
        events = [event for _, event in self._parts.values() if event is not None]
        if events and torch.cuda.is_current_stream_capturing():
            return False
        return all(event.query() for event in events)

    def values(self) -> dict[int, list[float]]:
        """Wait for the copy. Return {id(tensor): list of the tensor's entries}."""
        found = {}
        for device, (flat, event) in self._parts.items():
            if event is not None:
                event.synchronize()
            entries = iter(flat.tolist())
            for tensor in self._tensors:
                if tensor.device == device:
                    found[id(tensor)] = list(islice(entries, tensor.numel()))
        return found


def _start(tensors):
    """Start to copy 1-D tensors. Return their entries on the host, and the event of completion or None."""
    flat = torch.cat(tensors)
    if not flat.is_cuda:
        return flat, None
    with torch.cuda.device(flat.device):
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event
