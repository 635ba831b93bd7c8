"""Copy numbers from devices to the host without waiting for the copies."""

from __future__ import annotations

from itertools import islice

import torch


class AsyncHostCopy:
    """A copy of floating tensors to the host. Making this object starts the copy."""

    def __init__(self, tensors):
        self._tensors = list(tensors)  # kept alive, since `values` has their ids
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
        """Return whether the copy is complete, so that `values` would not wait.

        Return False while a CUDA graph is captured, because CUDA forbids queries of events during a capture.
        """
        events = [event for _, event in self._parts.values() if event is not None]
        if events and torch.cuda.is_current_stream_capturing():
            return False
        return all(event.query() for event in events)

    def values(self) -> dict[int, list[float]]:
        """Return {id(tensor): list of the tensor's entries}, after waiting until the copy is complete."""
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
    """Start to copy the entries of 1-D tensors on one device to the host.

    Returns:
        All entries as one tensor on the host, and the CUDA event after which the copy is complete. The event is None if
        the tensors are on the CPU.
    """
    flat = torch.cat(tensors)
    if not flat.is_cuda:
        return flat, None
    with torch.cuda.device(flat.device):
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event
