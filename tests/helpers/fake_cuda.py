"""A fake CUDA device in CPU memory: torch's operations and fewbit's kernels become entries of a `Recorder`.

Tensors of the fake device are ordinary CPU tensors that say that they are on device cuda:0, so fewbit runs the Python code
that it runs on a GPU. Results are computed at once. A dispatch mode sees each of torch's operations, also those in
backward passes, and records which memory they read and write in the current stream.
"""

from __future__ import annotations

import inspect
import weakref
from bisect import bisect
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
import torch._dynamo  # torch imports it in a dispatch mode, which must not see the changes of `_patch`
from fake_streams import Block, Clock, Event, Recorder, Stream
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fewbit.config import MASKED
from fewbit.runtime import backends
from fewbit.runtime.backends import reference
from fewbit.runtime.quantizers import normalized

with suppress(ImportError):  # without compiled kernels
    import fewbit.runtime.backends.native  # noqa: F401, gets torch's functions before `_patch` changes them

DEVICE = torch.device("cuda:0")
_CPU = torch.device("cpu")
_device, _to, _tolist = torch.Tensor.device.__get__, torch.Tensor.to, torch.Tensor.tolist
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class FakeCuda(TorchDispatchMode):
    """The fake device: a context manager. Tensors of the device are made and used only within it.

    Args:
        monkeypatch: pytest's fixture, which undoes the changes of torch in the end.
        seed: the seed of `Recorder`.

    Attributes:
        launches: the names of the kernels and transfers so far. An operation of torch counts as one kernel.
    """

    def __init__(self, monkeypatch, seed: int = 0):
        super().__init__()
        self.recorder = Recorder(seed)
        self.faults = self.recorder.faults
        self._blocks = {}  # {address of a storage: its block}
        self.launches = []
        self._is_in_kernel = False
        self._engine = None  # during a backward pass
        self._switches = [(0, self.recorder.default)]  # (number of the next node, current stream)
        normalized._constant.cache_clear()  # of another fake device
        self._patch(monkeypatch)

    def _patch(self, monkeypatch) -> None:
        recorder, generator, tensor = self.recorder, torch.Generator, torch.tensor
        cuda = {
            "_lazy_init": lambda: None,
            "is_initialized": lambda: True,
            "Stream": lambda device=None: Stream(recorder),
            "Event": lambda: Event(recorder),
            "current_stream": lambda device=None: recorder.current,
            "stream": self.stream,
            "synchronize": recorder.synchronize,
            "device": lambda device: nullcontext(),
            "is_current_stream_capturing": lambda: recorder.current.capture is not None,
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        number = "_cuda_getCurrentRawStream"
        monkeypatch.setattr(torch._C, number, lambda _: id(recorder.current), raising=False)
        monkeypatch.setattr(torch, "Generator", lambda device=_CPU: generator())
        monkeypatch.setattr(
            torch, "tensor", lambda *args, device=_CPU, **kw: tensor(*args, **kw).to(device)
        )
        methods = {
            "device": property(lambda x: DEVICE if self.has(x) else _device(x)),
            "is_cuda": property(lambda x: self.has(x)),
            "is_cpu": property(lambda x: not self.has(x)),
            "to": lambda x, *args, **kw: self._move(x, *args, **kw),
            "cpu": lambda x: x.to(_CPU),
            "tolist": lambda x: self._as_list(x),
            "record_stream": lambda x, stream: self.block(x).recorded.add(stream),
        }
        for name, value in methods.items():
            monkeypatch.setattr(torch.Tensor, name, value)
        monkeypatch.setitem(backends.on, DEVICE, _Kernels(self))

    # -- Streams -----------------------------------------------------------------------------------------

    @contextmanager
    def stream(self, stream: Stream):
        """Make a stream the current one within the block."""
        before = self.recorder.current
        self._switch(stream)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, stream: Stream) -> None:
        self.recorder.current = stream
        self._switches.append((torch.autograd._get_sequence_nr(), stream))

    def stream_of(self, node) -> Stream:
        """Return the stream that was the current one when an autograd node was made."""
        at = bisect(self._switches, node._sequence_nr(), key=lambda switch: switch[0])
        return self._switches[at - 1][1]

    @contextmanager
    def capture(self):
        """Capture the current stream into a graph within the block."""
        self.recorder.begin_capture()
        yield
        self.recorder.end_capture()

    def backward(self, output: torch.Tensor, **options) -> None:
        """Run the backward pass of `output.sum()` with torch's rules for streams (`_Engine`)."""
        caller = self.recorder.current
        loss = output.sum()
        engine = self._engine = _Engine(self, loss.grad_fn)
        try:
            loss.backward(**options)
        finally:
            engine.end()
            self._engine = None
            self._switch(caller)

    # -- Memory ------------------------------------------------------------------------------------------

    def block(self, x: torch.Tensor) -> Block | None:
        """Return the block of a tensor on the device or in pinned memory; None for any other tensor."""
        return self._blocks.get(x.untyped_storage()._cdata) if x.layout is torch.strided else None

    def has(self, x: torch.Tensor) -> bool:
        """Return whether a tensor is on the device. Kernels see all tensors on the CPU."""
        block = None if self._is_in_kernel else self.block(x)
        return block is not None and block.home is not self.recorder.host

    def _add(self, x: torch.Tensor, home: Stream, name: str) -> None:
        storage = x.untyped_storage()
        self._blocks[storage._cdata] = self.recorder.allocate(home, name)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, address: int) -> None:
        self.recorder.free(self._blocks.pop(address))

    # -- Operations --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device, is_pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if device is not None:
            kwargs["device"] = _CPU
        if self._is_in_kernel:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = _tensors((args, kwargs))
        is_here = any(map(self.has, inputs)) if device is None else device.type == "cuda"
        self._is_in_kernel = func.namespace == "prims"  # whose Python is one kernel on a device
        try:
            result = func(*args, **kwargs)
        finally:
            self._is_in_kernel = False
        if name in ("copy_", "_to_copy"):
            is_new = name == "_to_copy"
            target, source = (result, args[0]) if is_new else args[:2]
            to_device = is_here if is_new else self.has(target)
            if self.has(source) != to_device:
                if is_new and to_device:
                    self._add(target, self.recorder.current, name)
                self._transfer(source, target, args[2:] == (True,) or kwargs.get("non_blocking"))
                return result
        written = [
            x
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
        ]
        if torch.Tag.inplace_view not in func.tags and name != "set_":
            home = self.recorder.host if is_pinned else None
            self.run(name, inputs, written, result, is_here, home)
        # The host needs to know the number of true entries of a mask, but nothing of other indices.
        is_by_number = name == "index" and all(x.dtype != torch.bool for x in inputs)
        if is_here and not _WAITING.isdisjoint(func.tags) and not is_by_number:
            self.recorder.host_waits(name, self.recorder.current.clock)
        return result

    def kernel(self, name: str, function):
        """Return a function that computes what `function` does, in one kernel. The kernel may write an argument `out`."""

        def kernel(*args, **kwargs):
            self._is_in_kernel = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._is_in_kernel = False
            out = inspect.signature(function).bind(*args, **kwargs).arguments.get("out")
            self.run(name, _tensors((args, kwargs)), _tensors(out), result, True)
            return result

        return kernel

    def run(self, name: str, inputs, written, result, is_here: bool, home=None) -> None:
        """Record an operation.

        Args:
            name: the name, for messages.
            inputs: the tensors that it reads or writes.
            written: those that it writes.
            result: the result, tensors in containers. Those whose memory is not that of an input are new.
            is_here: whether the operation runs on the device; else it runs on the host.
            home: the host if the results are in pinned memory.
        """
        seen = {x.untyped_storage()._cdata for x in inputs}
        results = {x.untyped_storage()._cdata: x for x in _tensors(result)}
        new = [x for s, x in results.items() if s not in seen and s not in self._blocks]
        if results and not new and not written:
            return  # a view, or one of fewbit's torch ops, whose kernel has been recorded
        if is_here and not name.startswith(("empty", "new_empty")):
            self.launches.append(name)
        stream = self.recorder.host
        if is_here:
            stream = self._engine.stream_for(inputs) if self._engine else self.recorder.current
        for x in new:
            if is_here or home:
                self._add(x, home or stream, name)
        accessed = [(self.block(x), any(x is each for each in written)) for x in inputs]
        accessed = [(block, is_write) for block, is_write in accessed if block is not None]
        if accessed:
            self.recorder.issue(stream)
        for block, is_write in accessed:
            self.recorder.access(block, stream, name, is_write)

    def _transfer(self, source, target, non_blocking: bool) -> None:
        """Record a copy between the device and the host."""
        recorder, stream = self.recorder, self.recorder.current
        self.launches.append("transfer")
        recorder.issue(stream)
        for x, is_write in ((source, False), (target, True)):
            block = self.block(x)
            if block is not None:
                recorder.access(block, stream, "transfer", is_write)
                if block.home is recorder.host:
                    block.recorded.add(stream)  # as torch's allocator of pinned memory does
        # CUDA copies from other memory of the host into a buffer first, and waits for copies to it.
        is_pinned = self.block(source if self.has(target) else target) is not None
        if not non_blocking or not (is_pinned or self.has(target)):
            recorder.host_waits("a copy that blocks", stream.clock)
        if stream.capture is not None and not is_pinned:
            recorder.fault("a copy from or to memory that is not pinned, during a capture")

    def _move(self, x, *args, copy=False, **kwargs):
        if args and isinstance(args[0], torch.Tensor):
            args = args[0].device, args[0].dtype, *args[1:]
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        options = {"memory_format": layout} if layout else {}
        if device is None or device.type == x.device.type:
            return _to(x, dtype=dtype, copy=copy, **options)
        # On the CPU the two devices are one, so only `copy` makes a copy.
        return _to(x, device, dtype, non_blocking, copy=True, **options)

    def _as_list(self, x):
        if self.has(x):
            return x.cpu().tolist()
        if self.block(x) is not None and not self._is_in_kernel:
            self.run("tolist", [x], [], None, False)
        return _tolist(x)


class _Kernels:
    """The backend of the fake device: that of the CPU, each call of which counts as one kernel.

    The kernel reads the arguments, and writes the result and the argument `out`.
    """

    def __init__(self, cuda: FakeCuda):
        self._cuda, self._cpu, self.name = cuda, backends.on[torch.device("cpu")], "cuda"

    def can_quantize_result(self, function):
        return function == "relu"

    def forward_quantized(self, x, function, *args):
        if function != "relu" or args[-1] != MASKED:
            return None  # CUDA has no such kernel
        kernel = self._cuda.kernel("fewbit.relu_quantized", self._cpu.forward_quantized)
        return kernel(x, function, *args)

    def can_compute_batch_norm(self, bits, group_size, shape):
        return bits <= 4 and group_size == 256 and shape[1] % 8 == 0

    def batch_norm_backward(self, *args):
        name = "fewbit.batch_norm_backward"
        made = self._cuda.kernel(name, reference.batch_norm_backward)(*args)
        self._cuda.launches += [name] * (
            1 if made[0] is None else 2
        )  # there are two kernels, or three
        return made

    def __getattr__(self, name):
        return self._cuda.kernel(f"fewbit.{name}", getattr(self._cpu, name))


class _Engine:
    """The rules of torch's autograd engine for streams, in one backward pass.

    A node runs in the stream of its forward. It starts when the nodes are over whose gradients it gets, and the memory of
    gradients from other streams is recorded for its stream. Gradients for the same node are added in the node's stream.
    In the end the caller's stream waits for the nodes that have no successors.
    """

    def __init__(self, cuda: FakeCuda, root):
        self._cuda, self._caller = cuda, cuda.recorder.current
        self._over = {None: Clock(self._caller.clock)}  # {node: clock of its stream after the node}
        # {node: nodes whose gradients it gets}. None stands for the caller.
        self._producers = {root: [None]}
        self._consumers = {}  # {block of a gradient: nodes that get the gradient}
        self._adds = False  # whether the engine is between two nodes, and adds gradients
        self._handles, waiting = [], [root]
        while waiting:
            node = waiting.pop()
            self._handles += [
                node.register_prehook(partial(self._begin, node)),
                node.register_hook(partial(self._end, node)),
            ]
            for child in _successors(node):
                if child not in self._producers:
                    waiting.append(child)
                self._producers.setdefault(child, []).append(node)
        self._streams = {node: cuda.stream_of(self._first(node)) for node in self._producers}

    def _first(self, node):
        """Return a node itself; of a parameter's node, which has no number, the first node that uses the parameter."""
        is_parameter = type(node).__name__ == "AccumulateGrad"
        return min(self._producers[node], key=lambda n: n._sequence_nr()) if is_parameter else node

    def _begin(self, node, grads) -> None:
        self._adds = False
        self._cuda._switch(self._ready_stream(node))

    def _end(self, node, leaving, arriving) -> None:
        stream = self._streams[node]
        self._over[node], self._adds = Clock(stream.clock), True
        for grad, (child, _) in zip(leaving, node.next_functions, strict=False):
            block = None if grad is None or child is None else self._cuda.block(grad)
            if block is not None:
                self._consumers.setdefault(block, set()).add(child)
                if self._streams[child] is not stream:
                    block.recorded.add(self._streams[child])

    def _ready_stream(self, node) -> Stream:
        stream = self._streams[node]
        for producer in self._producers[node]:
            stream.clock.join(self._over.get(producer, {}))
        return stream

    def stream_for(self, inputs) -> Stream:
        """Return the stream of an operation with these inputs."""
        blocks = [self._cuda.block(x) for x in inputs]
        found = [self._consumers[block] for block in blocks if block in self._consumers]
        nodes = set.intersection(*found) if self._adds and found else ()
        return self._ready_stream(*nodes) if len(nodes) == 1 else self._cuda.recorder.current

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        for node, clock in self._over.items():
            if node is not None and not _successors(node):
                self._caller.clock.join(clock)


def _successors(node) -> list:
    return [child for child, _ in node.next_functions if child is not None]


def _tensors(values) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
