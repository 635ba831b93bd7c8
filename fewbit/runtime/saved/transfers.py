"""Copies between a CUDA device and pinned host memory on a side stream. All tensors here are bytes: uint8, (n,)."""

from __future__ import annotations

import sys

import torch


class CudaTransfers:
    """The copies between one device and the host. The host never waits; streams wait for one another."""

    def __init__(self, device: torch.device):
        self.device = device
        self.side = torch.cuda.Stream(device)

    @staticmethod
    def is_ready() -> bool:
        """Return whether the process uses CUDA."""
        return torch.cuda.is_initialized()

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured into a CUDA graph, which would not include a side stream."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def current(self) -> torch.cuda.Stream:
        """Return the device's current stream."""
        return torch.cuda.current_stream(self.device)

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start a copy to the host.

        Args:
            source: bytes on the device, whose memory may not change until the event.

        Returns:
            The copy in pinned memory, and the event after which it is complete.
        """
        # The device is given explicitly because the user may have set another default.
        host = torch.empty(len(source), dtype=torch.uint8, device="cpu", pin_memory=True)
        return host, self._copy(host, source)

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start a copy to the device.

        Args:
            host: a copy from `to_host`, which the side stream completes before it starts this one.

        Returns:
            The copy in memory of the current stream, and the event after which it is complete.
        """
        target = torch.empty(len(host), dtype=torch.uint8, device=self.device)
        return target, self._copy(target, host)

    def _copy(self, target, source):
        self.side.wait_stream(self.current())
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
            return self.side.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Make the current stream wait for the event."""
        self.current().wait_event(event)

    def hold(self, memory: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Prevent memory, once freed, from being reused before `stream` (the side stream) has done its work so far."""
        memory.record_stream(self.side if stream is None else stream)


class OnDevice:
    """Bytes on the device, which the side stream reads or writes until an event.

    The bytes are memory of the stream that is current at the start. Once that stream has waited for the event they need no
    `hold`, because the next user of the memory comes later in the order of that stream. Without `hold` the memory can be
    reused at once; with it only after the device has got there, and the host, far ahead, would allocate new memory.

    Args:
        transfers: the `CudaTransfers` of the device.
        memory: the bytes.
        event: the event after which the side stream has done its work on them.
    """

    def __init__(self, transfers, memory: torch.Tensor, event):
        self.transfers, self.memory, self.event = transfers, memory, event
        self._home = transfers.current()
        self._is_waited_for = False

    def use(self) -> torch.Tensor:
        """Return the bytes for later work of the current stream."""
        self.transfers.wait(self.event)
        current = self.transfers.current()
        if current != self._home:
            self.transfers.hold(self.memory, current)
        self._is_waited_for = True
        return self.memory

    def __del__(self):
        if not self._is_waited_for and not sys.is_finalizing():
            self.transfers.hold(self.memory)
