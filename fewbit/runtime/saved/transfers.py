"""Copy bytes, uint8 of shape (n,), between a CUDA device and pinned host memory, in a stream of its own, the side stream."""

from __future__ import annotations

import sys

import torch


class CudaTransfers:
    """Copies bytes between one device and the host. The host never waits; CUDA streams wait for one another."""

    def __init__(self, device: torch.device):
        self.device = device
        self.side = torch.cuda.Stream(device)

    @staticmethod
    def is_ready() -> bool:
        return torch.cuda.is_initialized()

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured into a CUDA graph, which would not include the side stream."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start to copy bytes to pinned memory. They must not change before the returned event."""
        # The device is given explicitly because the user may have set another default.
        host = torch.empty(len(source), dtype=torch.uint8, device="cpu", pin_memory=True)
        return host, self._copy(host, source)

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        target = torch.empty(len(host), dtype=torch.uint8, device=self.device)
        return target, self._copy(target, host)

    def _copy(self, target, source):
        self.side.wait_stream(self.current())
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
            return self.side.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        self.current().wait_event(event)

    def hold(self, memory: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Prevent memory from being reused before a stream, by default the side stream, has done its present work."""
        memory.record_stream(self.side if stream is None else stream)


class OnDevice:
    """Bytes on the device that the side stream reads or writes until an event.

    Once the home stream (the current one when this object was made) has waited for the event, freed memory can be
    reused at once. Otherwise `CudaTransfers.hold` must delay the reuse, which costs memory.
    """

    def __init__(self, transfers, memory: torch.Tensor, event):
        self.transfers, self.memory, self.event = transfers, memory, event
        self._home = transfers.current()
        self._is_waited_for = False

    def use(self) -> torch.Tensor:
        """Return the bytes, for work that the current stream gets from now on."""
        self.transfers.wait(self.event)
        current = self.transfers.current()
        if current != self._home:
            self.transfers.hold(self.memory, current)
        self._is_waited_for = True
        return self.memory

    def __del__(self):
        if not self._is_waited_for and not sys.is_finalizing():
            self.transfers.hold(self.memory)
