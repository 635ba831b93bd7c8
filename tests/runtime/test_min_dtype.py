"""The choice of float32 minimums: by the tensor itself on the CPU, by an earlier tensor on a GPU."""

import copy
import math
import pickle
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from samples import normal

import fewbit
from fewbit.analysis.meter import saved_bytes
from fewbit.nn.linear import Linear
from fewbit.runtime.format.groups import quantized_bytes
from fewbit.runtime.quantizers import quantizer as quantizer
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved import min_dtype as offset
from fewbit.runtime.saved.min_dtype import MinDtypeSelector

EIGHT_STEPS = {1000.0: 32.0, -1000.0: 32.0, 1.0: 0.0625, -1.0: 0.0625, 1023.0: 32.0, 1024.0: 64.0}
STARTS = pytest.mark.parametrize("start", EIGHT_STEPS)


def spread(start, extent, shape=(4, 100), dtype=torch.float32):
    """Return elements from start to start + extent. Every sample contains both."""
    x = start + extent * torch.rand(shape, generator=torch.Generator().manual_seed(1))
    x[:, 0], x[:, 1] = start, start + extent
    return x.to(dtype)


def just_below(start):
    """Return the greatest range below 8 steps for which start + range is a float32."""
    end = torch.tensor(start + EIGHT_STEPS[start])
    return float(end.nextafter(torch.tensor(-math.inf)).double() - start)


def is_wide(kept):
    """Return whether minimums are float32."""
    return {2: False, 3: True}[kept.tensors[1].shape[1]]


# -- each tensor for itself ------------------------------------------------------------------------


@STARTS
def test_below_eight_steps_minimums_are_float32(start):
    limit = EIGHT_STEPS[start]
    for extent, expected in (
        (0.0, True),
        (1e-3 * limit, True),
        (just_below(start), True),
        (limit, False),
        (1.01 * limit, False),
        (100 * limit, False),
    ):
        x = spread(start, extent)
        kept = Quantizer(2).quantize(x)
        assert is_wide(kept) == expected, extent
        assert sum(tensor.nbytes for tensor in kept.tensors) == quantized_bytes(
            x.shape, 2, fp32_min=expected
        )


def test_a_constant_whose_steps_no_float32_holds():
    assert is_wide(Quantizer(2).quantize(torch.full((4, 100), 2.0**-140)))


@pytest.mark.parametrize("extent", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("start", [0.0, -0.0])
def test_from_zero_minimums_are_bfloat16(start, extent):
    assert not is_wide(Quantizer(2).quantize(spread(start, extent)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    for start in (1000.0, -1000.0):
        assert is_wide(Quantizer(2).quantize(spread(start, 24.0, dtype=dtype)))
        assert not is_wide(Quantizer(2).quantize(spread(start, 40.0, dtype=dtype)))


def test_all_groups_decide_together():
    """The range of each sample is below 8 steps of its minimum, but that of the tensor is not."""
    x = spread(1000.0, 4.0)
    assert is_wide(Quantizer(2).quantize(x))
    x[2] += 1000
    assert not is_wide(Quantizer(2).quantize(x))


def test_not_finite():
    x = spread(1000.0, 1.0)
    x[1, 5] = math.nan
    kept = Quantizer(2).quantize(x)
    restored = kept.spec.dequantize(kept.tensors)
    assert not is_wide(kept) and restored[1].isnan().all() and restored[0].isfinite().all()


@STARTS
def test_fixed_settings_are_obeyed(start):
    x = spread(start, EIGHT_STEPS[start])
    for dtype in ("bfloat16", "float32"):
        assert is_wide(Quantizer(2, min_dtype=dtype).quantize(x)) == (dtype == "float32")


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec")
@pytest.mark.parametrize("minimum, columns", [("auto", 2), ("bfloat16", 2), ("float32", 3)])
def test_compiled(minimum, columns):
    """A tracer cannot read the tensor, so auto means bfloat16."""
    torch.compiler.reset()
    layer = Linear(70, 5)
    layer.quantizer = Quantizer(2, min_dtype=minimum)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        compiled(spread(1000.0, 1.0, (6, 70)))
    assert [x.shape[1] for x in saved if x.dtype == torch.bfloat16] == [columns]


# -- an earlier tensor's answer --------------------------------------------------------------------


class Device:
    """A stand-in for torch in `offset`, with a device that answers when `finish` is called."""

    def __init__(self):
        self.capturing = False
        self.events = []
        device = self

        class Event:
            """An event that has nothing to wait with and cannot be copied."""

            def __init__(self):
                self.lock = threading.Lock()
                self.is_recorded = self.is_done = False

            def record(self):
                self.is_recorded = True
                device.events.append(self)

            def query(self):
                assert self.is_recorded and not device.capturing
                return self.is_done

        self.cuda = SimpleNamespace(
            Event=Event,
            device=nullcontext,
            is_current_stream_capturing=lambda: self.capturing,
        )

    def empty(self, *size, pin_memory, **options):
        assert pin_memory  # else the copy to the host waits
        return torch.empty(*size, **options)

    def finish(self):
        for event in self.events:
            event.is_done = True

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def fake(monkeypatch):
    device = Device()
    monkeypatch.setattr(offset, "torch", device)
    return device


def ranges_of(x, minimum="float32", kind="uniform"):
    return Quantizer(2, min_dtype=minimum, kind=kind).quantize(x).tensors[1]


def is_large(ranges, kind):
    return offset.is_large(offset.extremes_of(ranges, kind), kind)


KIND = "uniform"
LARGE, SMALL = spread(1000.0, 1.0), spread(0.0, 1.0)


def test_an_answer_that_has_not_arrived_is_not_waited_for(fake):
    asked = MinDtypeSelector()
    assert asked.poll() is False
    asked.ask(ranges_of(LARGE), KIND)
    assert asked.poll() is False
    fake.finish()
    assert asked.poll() is True and asked.poll() is True
    asked.ask(ranges_of(SMALL), KIND)
    assert asked.poll() is True
    fake.finish()
    assert asked.poll() is False


def test_a_later_question_takes_the_place_of_one_without_an_answer(fake):
    asked = MinDtypeSelector()
    asked.ask(ranges_of(LARGE), KIND)
    asked.ask(ranges_of(SMALL), KIND)
    fake.events[0].is_done = True
    assert asked.poll() is False
    asked.ask(ranges_of(SMALL), KIND)  # the third is not asked
    fake.events[1].is_done = True
    assert asked.poll() is False and len(fake.events) == 2


def test_which_tensors_are_asked(fake):
    asked, ranges, numbers = MinDtypeSelector(), ranges_of(LARGE), []
    for number in range(1, 1100):
        before = len(fake.events)
        asked.ask(ranges, KIND)
        numbers += [number] * (len(fake.events) - before)
    assert numbers == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


def test_nothing_is_asked_of_empty_tensors(fake):
    asked = MinDtypeSelector()
    for _ in range(3):
        asked.ask(torch.empty(0, 2, dtype=torch.bfloat16), KIND)
    assert not fake.events
    asked.ask(ranges_of(LARGE), KIND)  # still the first
    assert len(fake.events) == 1


def test_in_a_capture_nothing_is_asked_and_nothing_changes(fake):
    asked = MinDtypeSelector()
    asked.ask(ranges_of(LARGE), KIND)
    fake.finish()
    fake.capturing = True
    assert asked.poll() is False
    asked.ask(ranges_of(SMALL), KIND)
    assert len(fake.events) == 1
    fake.capturing = False
    assert asked.poll() is True
    asked.ask(ranges_of(SMALL), KIND)  # the second, as the one in the capture does not count
    assert len(fake.events) == 2


def pickled(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_copies_keep_the_answer_but_no_event(fake, again):
    asked = MinDtypeSelector()
    asked.ask(ranges_of(LARGE), KIND)
    fake.finish()
    asked.poll()
    asked.ask(ranges_of(SMALL), KIND)  # on its way
    other = again(asked)
    fake.finish()
    assert other.poll() is True and asked.poll() is False
    other.ask(ranges_of(SMALL), KIND)
    assert len(fake.events) == 2  # the third is not asked
    other.ask(ranges_of(SMALL), KIND)
    fake.finish()
    assert len(fake.events) == 3 and other.poll() is False


class OnDevice(torch.Tensor):
    """A tensor that its layer must not read."""

    is_cuda = True


@pytest.fixture
def layer(fake, monkeypatch):
    """Return whether minimums are float32 when a layer on the device saves x."""
    monkeypatch.setattr(quantizer, "is_plain", lambda x: True)
    one = Quantizer(2)

    def keep(x, one=one):
        kept = one.quantize(x.as_subclass(OnDevice))
        values = kept.spec.dequantize(kept.tensors).as_subclass(torch.Tensor)
        assert float((values - x).abs().max()) < 6  # a bfloat16 step of 1000 and one of the range
        return is_wide(kept)

    keep.quantizer = one
    return keep


def test_a_layer_goes_by_its_earlier_tensors(fake, layer):
    assert layer(LARGE) is False
    assert layer(LARGE) is False
    fake.finish()
    assert layer(LARGE) is True  # number 3
    assert layer(SMALL) is True  # number 4
    assert layer(SMALL) is True
    fake.finish()
    assert layer(SMALL) is False
    assert layer(SMALL, Quantizer(2, min_dtype="float32")) is True
    assert layer(LARGE, Quantizer(2, min_dtype="bfloat16")) is False
    assert len(fake.events) == 3


@pytest.mark.parametrize("kind, part", [("uniform", 0.85), ("rotated", 0.2)])
@pytest.mark.parametrize("minimum", ["bfloat16", "float32"])
@STARTS
def test_from_ranges_as_from_the_tensor(start, minimum, kind, part):
    """Near 8 steps they may differ, as ranges are rounded; 5 scales of a rotated copy are 1.7 times the range here."""
    for share, expected in ((0.0, True), (0.05, True), (part, True), (1.01, False), (9.0, False)):
        x = spread(start, share * EIGHT_STEPS[start])
        is_lowered = kind == "uniform" and minimum == "bfloat16" and x.min() < 0
        if is_lowered and torch.frexp(x.min())[0] < -0.99:
            continue  # rounded down to the next power of two, whose steps are twice as large
        assert is_large(ranges_of(x, minimum, kind), kind) == expected, share
        assert is_wide(Quantizer(2).quantize(x)) == expected, share
    for x in (torch.zeros(3, 70), spread(0.0, 1.0), spread(-1.0, 2.0), LARGE * math.nan):
        assert not is_large(ranges_of(x, minimum, kind), kind)


def test_groups_that_differ():
    """The greatest range is added to the greatest minimum, even if they belong to two groups."""
    x = spread(1000.0, 1.0)
    for shift, extent, expected in ((0, 1, True), (0, 40, False), (40, 1, False), (20, 20, False)):
        x[1] = spread(1000.0, float(extent))[1]
        x[2] = spread(1000.0, 1.0)[2] + shift
        assert is_large(ranges_of(x), KIND) == expected, (shift, extent)


def test_a_layer_on_every_device(device):
    """The answer is right from the second tensor on at the latest, without a wait for the device."""
    one, x = Quantizer(2), LARGE.to(device)
    if device == "cuda":
        one.quantize(x)  # whatever is built or allocated once
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        kept = one.quantize(x)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert is_wide(kept)
    assert (
        kept.spec.dequantize(kept.tensors) - x
    ).abs().max() < 0.6  # numbers of bfloat16 are 4 apart there


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["quant+zvc", "jpeg"])
def test_the_tensors_of_codecs_are_not_examined(monkeypatch, codec):
    """On a GPU, the ranges of a tensor are examined if the group quantizer has saved it."""
    asked = []
    monkeypatch.setattr(MinDtypeSelector, "ask", lambda self, ranges, kind: asked.append(ranges))
    with FakeCuda(monkeypatch) as cuda:
        x = normal((4, 4, 16, 16)).relu().to(DEVICE)
        model = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3) for _ in range(2))).to(DEVICE)
        fewbit.compress_(model, fewbit.ErrorBound(interval=1, codec=codec), verbose=False)
        counts = []
        for _ in range(8):
            asked.clear()
            cuda.backward(model(x))
            counts.append(len(asked))
            torch.cuda.synchronize()  # so that the policy gets its measurements
        assert all(ranges.dtype == torch.bfloat16 for ranges in asked)
    assert counts[0] == 2 and counts[-1] == 0


# -- the meter -------------------------------------------------------------------------------------


def layers(count):
    """Return consecutive linear layers whose inputs are around 1000."""
    model = torch.nn.Sequential(*(torch.nn.Linear(70, 70) for _ in range(count)))
    for layer in model:
        torch.nn.init.normal_(layer.weight, std=1e-5)
        torch.nn.init.constant_(layer.bias, 1000.0)
    return fewbit.compress_(model, bits=2, verbose=False) and model


@pytest.mark.parametrize("count, names", [(1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2, ...")])
def test_the_meter_tells_of_float32_minimums(count, names):
    report = saved_bytes(layers(count), spread(1000.0, 1.0, (8, 70)))
    said = f"{count} quantized with float32 minimums, as their offset is large against their range: {names}"
    assert " ".join(str(report).split()).endswith(said)
    assert report.by_kind()["range"] == count * (8 + 2) * 6  # 8 groups, and two rows for the seed
    first, other = (quantized_bytes((8, 70), bits, fp32_min=True) for bits in (3, 2))
    assert report.total == first + (count - 1) * other


def test_the_meter_tells_of_the_model_itself_but_not_of_others():
    assert str(saved_bytes(Linear(70, 5, bits=2), LARGE[:, :70])).endswith("(model)")
    assert "minimums" not in str(saved_bytes(layers(2)[:1], normal((8, 70))))
