"""Copies between a CUDA device and pinned host memory on a stream of their own.

All tensors here are bytes: uint8, (n,).
"""

from __future__ import annotations

import sys

import torch


class CudaTransfers:
    """Those of one device. The host never waits; streams wait for one another."""

    def __init__(self, device: torch.device):
        self.device = device
        self.side = torch.cuda.Stream(device)

    @staticmethod
    def is_ready() -> bool:
        """Whether the process uses such devices."""
        return torch.cuda.is_initialized()

    def is_capturing(self) -> bool:
        """Whether the current stream is captured into a CUDA graph, of which a side stream would be no part."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """(pinned copy, event after which it is there). Until then source's memory must stay as it is."""
        # The device is named, as a default one could be set.
        host = torch.empty(len(source), dtype=torch.uint8, device="cpu", pin_memory=True)
        return host, self._copy(host, source)

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """(copy in memory of the current stream, event after which it is there).

        host: from `to_host`, whose copy the side stream has made before it makes this one.
        """
        target = torch.empty(len(host), dtype=torch.uint8, device=self.device)
        return target, self._copy(target, host)

    def _copy(self, target, source):
        self.side.wait_stream(self.current())
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
            return self.side.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """What the current stream does from now on comes after the event."""
        self.current().wait_event(event)

    def hold(self, memory: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Once freed, memory is used again only after what that stream, the side stream, has been given."""
        memory.record_stream(self.side if stream is None else stream)


class OnDevice:
    """Bytes on the device, which the side stream reads or writes until `event`.

    They are memory of the stream that is current now. Once that has waited for the event they need no `hold`:
    whatever gets the memory next comes after the event too, in the order of that stream. (Memory that is held
    is free only when the device has got there; the host, far ahead, would have taken new memory meanwhile.)
    """

    def __init__(self, transfers, memory: torch.Tensor, event):
        self.transfers, self.memory, self.event = transfers, memory, event
        self._home = transfers.current()
        self._is_waited_for = False

    def use(self) -> torch.Tensor:
        """The bytes, for what the current stream does from now on."""
        self.transfers.wait(self.event)
        current = self.transfers.current()
        if current != self._home:
            self.transfers.hold(self.memory, current)
        self._is_waited_for = True
        return self.memory

    def __del__(self):
        if not self._is_waited_for and not sys.is_finalizing():
            self.transfers.hold(self.memory)
