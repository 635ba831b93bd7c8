"""Races between CUDA streams: random schedules of training on a fake device, which knows what happens before what.

The schedules do what torch demands of users: a stream waits for another one before it uses its results, and tensors are
recorded for the streams that use them. All races that are left are fewbit's own.
"""

import gc
import random
from contextlib import nullcontext

import pytest
import torch
from composed import Composed
from fake_cuda import DEVICE, FakeCuda
from layers import saved_by
from torch import nn

import fewbit
from fewbit import checkpointing
from fewbit.runtime.interop import cuda_streams
from fewbit.runtime.quantizers import normalized
from fewbit.runtime.quantizers.copies import Kept
from fewbit.runtime.regions import runs
from fewbit.runtime.saved.offload import Offload


class Branches(nn.Module):
    """A model with a branch that runs in another stream. In each forward pass, chance decides in which, and when."""

    def __init__(self, chance: random.Random, streams: list):
        super().__init__()
        self.chance, self.streams = chance, streams
        self.stem = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        self.both = nn.Linear(64, 64)
        image = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        pooled = nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        self.left = nn.Sequential(nn.Linear(64, 64), *image, *pooled, self.both)
        self.right = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(), self.both)
        self.first, self.second = nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x):
        main, other = torch.cuda.current_stream(), self.chance.choice(self.streams)
        if self.chance.random() < 0.5:
            x = self.stem(x)
        other.wait_stream(main)
        x.record_stream(other)
        is_left_first = self.chance.random() < 0.5
        if is_left_first:
            left = self.left(x)
        with torch.cuda.stream(other):
            right = self.right(x)
            # fewbit replaces sigmoid, but not sigmoid_, so the graph's compressor replaces what the latter saves.
            gated = right * right.sin().sigmoid_()
        if not is_left_first:
            left = self.left(x)
        main.wait_stream(other)
        right.record_stream(main)
        gated.record_stream(main)
        return self.first(left + gated) + self.second(right)


class Training:
    """A training of one model, whose parts run in streams that chance chooses."""

    def __init__(self, cuda, chance, streams, settings):
        settings = dict(settings)
        self.cuda, self.chance, self.streams = cuda, chance, streams
        self.has_numbers = settings.pop("numbers", False)
        self.captures = settings.pop("captures", False)
        ahead, is_checkpointed = settings.pop("ahead", None), settings.pop("boundaries", False)
        self.around = nullcontext() if ahead is None else Offload(least=1, ahead=ahead)
        self.model = Branches(chance, streams).to(DEVICE)
        if is_checkpointed:
            fewbit.checkpoint_(self.model, include=["stem", "left", "right"], offload=True)
        self.controller = fewbit.compress_(self.model, verbose=False, **settings)
        self.x = torch.randn(32, 64, device=DEVICE)
        self.outputs = []
        self.last = cuda.recorder.default  # the stream of the latest action
        self.is_warm = False  # a capture needs constants that fewbit makes in the first pass

    def act(self) -> None:
        """Do something in some stream, after what was done before."""
        stream = self.chance.choice(self.streams)
        stream.wait_stream(self.last)
        self.last = stream
        actions = [self.forward, self.forward, self.backward, self.backward]
        actions += [self.look, self.drop, self.update, self.save]
        if self.captures and self.is_warm:
            actions += [self.captured, self.captured]
        with torch.cuda.stream(stream):
            self.chance.choice(actions)(stream)

    def forward(self, stream) -> None:
        if len(self.outputs) == 3:
            return
        if self.has_numbers:
            self.controller.number_samples(torch.arange(32))
        self.x.record_stream(stream)
        with self.around:
            self.outputs.append(self.model(self.x))

    def _pop(self, stream):
        y = self.outputs.pop(self.chance.randrange(len(self.outputs)))
        y.record_stream(stream)
        return y

    def backward(self, stream) -> None:
        if self.outputs:
            self.cuda.backward(self._pop(stream))
            self.is_warm = True

    def drop(self, stream) -> None:
        if self.outputs:
            self._pop(stream)

    def look(self, stream) -> None:
        """Read what a layer has saved, in a stream that is not the layer's."""
        if self.outputs and isinstance(self.around, Offload):
            node = self.chance.choice(self.outputs).grad_fn.next_functions[0][0]
            for tensor in node.saved_tensors:
                if tensor.dtype == torch.int32:  # packed codes
                    tensor.clone()

    def update(self, stream) -> None:
        if self.outputs:
            return
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.record_stream(stream)
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-3)
                    parameter.grad.record_stream(stream)
                    parameter.grad = None

    def end(self) -> None:
        """Drop everything, and let the default stream wait, so that the parameters can be freed."""
        self.outputs.clear()
        self.cuda.recorder.graphs.clear()
        self.cuda.recorder.default.wait_stream(self.last)
        with torch.cuda.stream(self.last):
            self.update(self.last)

    def save(self, stream) -> None:
        """Wait for measurements that are not on the host yet, or forget them."""
        state = self.controller.state_dict()
        if self.chance.random() < 0.5:
            self.controller.load_state_dict(state)

    def captured(self, stream) -> None:
        """Capture a forward and a backward pass, and drop what an earlier forward pass has saved."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.record_stream(stream)
                parameter.grad = None  # the graph makes gradients in its own memory
        with self.cuda.capture():
            if self.outputs:
                self.outputs.pop()
            with self.around:
                y = self.model(self.x)
            self.cuda.backward(y)


def faults_of(seed: int, steps: int, **settings) -> list[str]:
    """Return the faults in a schedule of two trainings that share streams, but do not wait for one another."""
    with pytest.MonkeyPatch.context() as patch:
        cuda, chance = FakeCuda(patch, seed), random.Random(seed)
        with cuda:
            torch.manual_seed(seed)
            patch.setattr(checkpointing, "BOUNDARIES", Offload(least=1, ahead=1))
            for module in (checkpointing, runs):  # the fake device is a dispatch mode too
                patch.setattr(module, "outside_dispatch_modes", nullcontext)
            streams = [torch.cuda.Stream() for _ in range(3)]
            trainings = [Training(cuda, chance, streams, settings) for _ in range(2)]
            for _ in range(steps):
                chance.choice(trainings).act()
            for training in trainings:
                training.end()
            moved = checkpointing.BOUNDARIES.bytes_out
            assert bool(moved) == settings.get("boundaries", False)
            del training
            trainings.clear()
            # The latest region's tensors stay until the next pass.
            checkpointing.BOUNDARIES._local.forward = None
            gc.collect()
            for stream in streams:  # these allocations may get what was freed
                with torch.cuda.stream(stream):
                    torch.empty(1, device=DEVICE)
        return cuda.faults


ADAPTIVE = {"bits": fewbit.AdaptiveBits(2, interval=1)}
SETTINGS = {
    "fixed": {},
    "everything": {"layers": fewbit.LayerSettings(everything=True)},
    "samples": {"bits": fewbit.SampleBits(2), "numbers": True},
    "adaptive": ADAPTIVE,
    "bound": {"bits": fewbit.ErrorBound(interval=1, by_channel=True)},
    "codec": {"bits": fewbit.ErrorBound(interval=1, codec="jpeg")},
    "offload": {"ahead": 2},
    "offload at once": {"ahead": 0},
    "boundaries": {"boundaries": True},
    "captures": {"captures": True},
    "all": ADAPTIVE | {"layers": fewbit.LayerSettings(everything=True), "numbers": True, "ahead": 1, "captures": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_no_races_in_long_schedules(name):
    assert faults_of(0, 100, **SETTINGS[name]) == []


# -- Single rules ------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    with FakeCuda(monkeypatch) as cuda:
        yield cuda


def zeros():
    return torch.zeros(8, device=DEVICE)


@pytest.mark.parametrize("holds", [True, False])
def test_a_copy_to_the_host_that_is_dropped(cuda, monkeypatch, holds):
    """Numbers of another stream are read until the copy is complete, even if nobody waits for it."""
    if not holds:
        monkeypatch.setattr(cuda_streams, "hold_for_stream", lambda tensors: None)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        numbers = zeros()
    torch.cuda.current_stream().wait_stream(side)
    copy = cuda_streams.AsyncHostCopy([numbers])
    del numbers, copy
    with torch.cuda.stream(side):
        zeros()
    assert (cuda.faults == []) == holds


@pytest.mark.parametrize("by_stream", [True, False])
def test_constants_that_backward_passes_share(cuda, monkeypatch, by_stream):
    if not by_stream:
        monkeypatch.setattr(normalized, "stream_of", lambda x: 0)
    found = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            found += [normalized.constant_like(zeros(), 1.0) for _ in range(2)]
            found[-1].clone()
    assert found[0] is found[1] and (found[1] is not found[2]) == by_stream
    assert (cuda.faults == []) == by_stream


def test_large_constants_are_not_shared(cuda):
    x = torch.zeros(normalized.MOST_SHARED + 1, device=DEVICE)
    assert normalized.constant_like(x, 1.0) is not normalized.constant_like(x, 1.0)


def test_a_capture_gets_constants_of_its_own(cuda):
    x = zeros()
    shared = normalized.constant_like(x, 1.0)
    with cuda.capture():
        own = normalized.constant_like(x, 1.0)
    assert own is not shared and normalized.constant_like(x, 1.0) is shared
    assert own.tolist() == shared.tolist() == [1.0] * 8


@pytest.mark.parametrize("is_same", [True, False])
def test_layers_share_a_copy_and_a_mask_only_in_one_stream(cuda, is_same):
    def forward(model, x):
        y = torch.relu(x)
        first = model.first(y)
        stream = cuda.recorder.current if is_same else torch.cuda.Stream()
        stream.wait_stream(cuda.recorder.current)
        with torch.cuda.stream(stream):
            second = model.second(y)
        model.specs = [Kept(z.grad_fn).copy("x")[0] for z in (first, second)]
        return first, second

    model = Composed(forward, first=nn.Linear(64, 8), second=nn.Linear(64, 8)).to(DEVICE)
    fewbit.compress_(model, bits=2, verbose=False)
    x = torch.randn(32, 64, device=DEVICE).requires_grad_()
    codes = [tensor for tensor in saved_by(model, x)[1] if tensor.dtype == torch.int32]
    assert len(codes) == (2 if is_same else 3)  # the mask, and a copy in each stream
    masked = [getattr(spec, "inner", spec).has_mask for spec in model.specs]
    assert masked == [True, is_same]


def test_a_capture_does_not_query_events(cuda):
    numbers = torch.arange(3.0, device=DEVICE)
    copy = cuda_streams.AsyncHostCopy([numbers])
    with cuda.capture():
        assert not copy.is_there()
    torch.cuda.synchronize()
    assert copy.is_there() and copy.values() == {id(numbers): [0.0, 1.0, 2.0]}
    assert cuda.faults == []
