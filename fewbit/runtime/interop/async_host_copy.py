"""Numbers on their way from devices to the host, which nothing waits for."""

from __future__ import annotations

from itertools import islice

import torch


class AsyncHostCopy:
    """Values of tensors, floating, once they are there; starts on its own."""

    def __init__(self, tensors):
        self._tensors = list(tensors)  # kept: they are known by their identity
        self._parts = {}
        for device in {tensor.device for tensor in self._tensors}:
            self._parts[device] = _start(
                [
                    each.detach().reshape(-1).double()
                    for each in self._tensors
                    if each.device == device
                ]
            )

    def is_there(self) -> bool:
        """Whether nothing would wait."""
        return all(event is None or event.query() for _, event in self._parts.values())

    def values(self) -> dict[int, list[float]]:
        """{id(tensor): its entries}; waits for what is not there."""
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
    """(all entries on the host, an event after which they are there, or None)."""
    flat = torch.cat(tensors)
    if not flat.is_cuda:
        return flat, None
    with torch.cuda.device(flat.device):
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event
