"""An emulation on the CPU of a side stream that copies as late as allowed, to find code that relies on early copies.

Work of the current stream is done at once. Copies wait in a queue, in order, until an event in the queue is waited for or,
with a `patience`, until that many others are queued behind them.
"""

from __future__ import annotations

import random
import threading
from collections import deque

import torch
from torch.multiprocessing.reductions import StorageWeakRef

POISON = 0xA5


class Violation(AssertionError):
    """The error of memory that was freed or read before its copy was done."""


class _Copy:
    """One queued copy. It holds the host's memory, as the pinned allocator does, but not the device's."""

    def __init__(self, target, source, device_side):
        self.is_out = device_side is source
        self.host = target if self.is_out else source
        self.weak = StorageWeakRef(device_side.untyped_storage())
        self.held = None  # strong once `hold` has been called
        self.done = False

    def run(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        if storage is None:
            raise Violation("device memory was freed before the copy that uses it")
        device_side = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (len(self.host),), (1,))
        target, source = (self.host, device_side) if self.is_out else (device_side, self.host)
        target.copy_(source)
        self.done, self.held = True, None


class EmulatedTransfers:
    """The `CudaTransfers` of tensors on the CPU. made: the last object. log: ("out" or "back", bytes) in order."""

    capturing = False
    patience = None
    made = None

    @staticmethod
    def is_ready():
        return True

    def __init__(self, device):
        assert device.type == "cpu"
        type(self).made = self
        self.queue = deque()
        self.log = []
        self.waits = 0
        self.local = threading.local()
        self.random = random.Random(0)
        self.lock = threading.RLock()

    def is_capturing(self):
        return self.capturing

    def current(self):
        return "current"

    def to_host(self, source):
        host = torch.full((len(source),), POISON, dtype=torch.uint8)
        return host, self._queue(_Copy(host, source, source), "out")

    def to_device(self, host):
        target = torch.full((len(host),), POISON, dtype=torch.uint8)
        return target, self._queue(_Copy(target, host, target), "back")

    def _queue(self, copy, direction):
        with self.lock:
            self.queue.append(copy)
            self.log.append((direction, len(copy.host)))
            while self.patience is not None and len(self.queue) > self.random.randint(
                0, self.patience
            ):
                self.queue.popleft().run()
        return copy

    def wait(self, event):
        with self.lock:
            self.waits += 1
            while not event.done:
                self.queue.popleft().run()

    def hold(self, memory, stream=None):
        with self.lock:
            for copy in self.queue:
                if copy.weak.cdata == memory.untyped_storage()._cdata:
                    copy.held = memory

    def finish(self):
        """Do all queued copies. Raise Violation if memory was freed too early."""
        with self.lock:
            while self.queue:
                self.queue.popleft().run()


class EagerTransfers(EmulatedTransfers):
    """Transfers that copy at once."""

    patience = 0


class FitfulTransfers(EmulatedTransfers):
    """Transfers that copy at random times."""

    patience = 4
