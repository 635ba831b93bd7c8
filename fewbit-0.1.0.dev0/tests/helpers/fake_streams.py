"""Fake CUDA streams and memory. They record which operation happens before which, and find races.

An *operation* is anything that accesses memory: a kernel, a copy, an access by the host. It belongs to a stream; the host
counts as a stream, too. The operations of one stream are numbered, and run one after the other. The *clock* of a stream
holds, for each stream, the number of the last operation that is known to be over before the next operation of this stream
starts. It advances when the stream waits for an event, and when the host has waited for something. A *race* is a pair of
accesses to one block of memory in two streams, at least one of them a write, where the first access is not known to be
over when the second starts. The fakes never wait. They only record what would be guaranteed on a device.

Memory follows the rules of torch's allocator. A block belongs to the stream in which it was allocated, its *home*. When a
block is freed, the next allocation in its home may get it at once. If `record_stream` has named other streams, the
allocator first waits for the work that they had when the block was freed. So an allocation counts as a write of the home
stream to the new block, and to all freed blocks of the home, whichever it gets.
"""

from __future__ import annotations

import random


class Clock(dict):
    """For each stream, the number of the last operation that is over. Streams that are missing have number 0."""

    def join(self, other: Clock) -> None:
        """Let all operations be over that are over by the other clock."""
        for stream, number in other.items():
            self[stream] = max(number, self.get(stream, 0))


class Block:
    """A block of memory.

    Attributes:
        home: the stream in which the block was allocated; the host for pinned memory.
        name: the name of the operation that allocated the block, for messages.
        reads, writes: {stream: (number, name) of the last operation that read or wrote the block}.
        recorded: the streams that `record_stream` has named.
        released: after the block was freed, the clock of the recorded streams at that moment.
        graph: the capture in which the block was allocated, or None.
        graphs: other captures whose operations use the block.
    """

    def __init__(self, home: Stream, name: str):
        self.home, self.name = home, name
        self.reads, self.writes = {}, {}
        self.recorded, self.released = set(), Clock()
        self.graph, self.graphs = home.capture, set()


class Stream:
    """A CUDA stream, with the methods of `torch.cuda.Stream` that fewbit and the tests use."""

    def __init__(self, recorder: Recorder, name: str = ""):
        recorder.streams.append(self)
        self.recorder, self.name = recorder, name or f"stream {len(recorder.streams)}"
        self.clock = Clock()
        self.capture = None  # the capture that includes this stream

    def __repr__(self) -> str:
        return self.name

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.recorder)
        event.clock, event.capture = Clock(self.clock), self.capture
        return event

    def wait_event(self, event: Event) -> None:
        if event.capture is not self.capture:
            if self.capture is None and event.capture is self.recorder.capture:
                self.capture = event.capture  # CUDA captures this stream, too, from now on
                self.capture.streams.append(self)
            else:
                self.recorder.fault(f"{self} waits for an event from outside of its capture")
        self.clock.join(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    """A CUDA event, with the methods of `torch.cuda.Event` that fewbit uses."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.clock, self.capture = Clock(), None

    def record(self) -> None:
        self.recorder.current.record_event(self)

    def synchronize(self) -> None:
        self._ask("synchronize", self.clock)

    def query(self) -> bool:
        """Return whether the event is over, which chance decides unless the host knows it already."""
        known = self.recorder.host.clock
        is_over = all(known.get(stream, 0) >= number for stream, number in self.clock.items())
        is_over = is_over or self.recorder.chance.random() < 0.1
        self._ask("query", self.clock if is_over else Clock())
        return is_over

    def _ask(self, name: str, clock: Clock) -> None:
        if self.capture is not None:
            self.recorder.fault(f"{name} of an event that was captured")
        self.recorder.host_waits(name, clock)


class Capture:
    """A capture of streams into a graph. It begins in the first of the streams."""

    def __init__(self, stream: Stream):
        self.streams = [stream]


class Recorder:
    """All streams of one device, and the memory of the device and of the host.

    Args:
        seed: the seed of the chance that decides what queries of events return.

    Attributes:
        faults: descriptions of races, and of calls that CUDA forbids during a capture.
        current: the current stream.
        capture: the present `Capture`, or None.
        graphs: all captures. Their graphs may be replayed at any time.
    """

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.faults, self.streams = [], []
        self.host, self.default = Stream(self, "host"), Stream(self, "default")
        self.current = self.default
        self.capture, self.graphs = None, set()
        self._freed = {}  # {home: freed blocks for the next allocation}

    def fault(self, text: str) -> None:
        self.faults.append(text)

    # -- Operations --------------------------------------------------------------------------------------

    def issue(self, stream: Stream) -> None:
        """Begin an operation of a stream. It starts after everything for which the host has waited."""
        stream.clock.join(self.host.clock)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1

    def access(self, block: Block, stream: Stream, name: str, is_write: bool) -> None:
        """Let the operation that `issue` began read or write a block. Report the races with earlier accesses."""
        earlier = [("write", block.writes), *([("read", block.reads)] if is_write else [])]
        for what, accesses in earlier:
            for other, (number, other_name) in accesses.items():
                if number > max(stream.clock.get(other, 0), block.released.get(other, 0)):
                    self.fault(
                        f"{'write' if is_write else 'read'} by {name} in {stream} races with the {what} by "
                        f"{other_name} in {other}, of a block from {block.name} in {block.home}"
                    )
        accesses = block.writes if is_write else block.reads
        accesses[stream] = stream.clock[stream], name
        if stream.capture is not block.graph:
            block.graphs.add(stream.capture)

    def host_waits(self, name: str, clock: Clock) -> None:
        """Let the host wait until the operations of a clock are over."""
        if self.capture is not None:
            self.fault(f"{name} during a capture")
        self.host.clock.join(clock)

    def synchronize(self, device=None) -> None:
        """Let the host wait for all streams."""
        for stream in self.streams:
            self.host_waits("synchronize", stream.clock)

    # -- Memory ------------------------------------------------------------------------------------------

    def allocate(self, stream: Stream, name: str) -> Block:
        """Return a new block of a stream, or of the host."""
        self.issue(stream)
        for freed in self._freed.pop(stream, ()):
            self.access(freed, stream, f"reuse in {name}", True)
        block = Block(stream, name)
        self.access(block, stream, name, True)
        return block

    def free(self, block: Block) -> None:
        if not self.graphs.isdisjoint(block.graphs):
            self.fault(f"free of a block from {block.name} in {block.home}, which a graph uses")
        for stream in block.recorded:
            block.released.join(stream.clock)
        self._freed.setdefault(block.home, []).append(block)

    # -- Captures ----------------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        """Begin to capture the current stream into a graph."""
        self.capture = self.current.capture = Capture(self.current)
        self.graphs.add(self.capture)

    def end_capture(self) -> None:
        first, *others = self.capture.streams
        for stream in others:
            if stream.clock.get(stream, 0) > first.clock.get(stream, 0):
                self.fault(f"the capture ends before {first} has waited for {stream}")
        for stream in self.capture.streams:
            stream.capture = None
        self.capture = None
