"""Offload: the gradients are those without it, bytes are those that a meter counts, nothing is relied on too early.

Without a GPU the copies are those of `emulated_transfers`, which are late and check who relies on them.
"""

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composed import Composed
from conftest import CUDA
from emulated_transfers import (
    EagerTransfers,
    EmulatedTransfers,
    FitfulTransfers,
)
from probed_models import transformer
from quantized import quantized_bytes
from regions import Regions
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fewbit
from fewbit import checkpointing
from fewbit.errors import InputError
from fewbit.runtime.quantizers import integers
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.offload import Offload

KEPT = {"packed", "range", "mask", "integer"}  # the meter's kinds of what fewbit makes
EMULATIONS = {"late": EmulatedTransfers, "eager": EagerTransfers, "fitful": FitfulTransfers}


@pytest.fixture(params=[*EMULATIONS, pytest.param("cuda", marks=CUDA)])
def place(request, choice):
    """Return a device, and Offloads with its transfers. After the test no memory may have been freed too early."""
    if request.param == "cuda":
        torch.zeros(0, device="cuda")
        yield SimpleNamespace(device="cuda", offload=Offload, finish=torch.cuda.synchronize)
        torch.cuda.synchronize()
    else:
        yield from emulated(EMULATIONS[request.param])


@pytest.fixture
def late():
    """Return the emulation alone, with its class of transfers: .kind."""
    yield from emulated(EmulatedTransfers)


def emulated(transfers):
    kind = type("Transfers", (transfers,), {})

    def finish():
        if kind.made is not None:
            kind.made.finish()

    def make(**settings):
        return Offload(**settings, transfers={"cpu": kind})

    yield SimpleNamespace(device="cpu", offload=make, finish=finish, kind=kind)
    finish()


def mlp(width=64, depth=6):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers)


def images():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 8 * 8, 5),
    )  # fmt: skip


MODELS = {
    "mlp": (mlp, lambda: torch.randn(32, 64)),
    "images": (images, lambda: torch.randn(4, 3, 16, 16)),
    "attention": (
        lambda: nn.Sequential(nn.Embedding(300, 32), transformer()),
        lambda: torch.randint(300, (4, 16)),
    ),
}


def converted(name, device, **settings):
    """Return (model, input)."""
    torch.manual_seed(0)
    make, sample = MODELS[name]
    model = make().to(device).train()
    fewbit.compress_(model, **{"bits": 2, "verbose": False, **settings})
    return model, sample().to(device)


def forward(model, x, context=None):
    torch.manual_seed(1)
    with context or contextlib.nullcontext():
        return model(x)


def backward(model, *outputs, **kw):
    model.zero_grad()
    for output in outputs:
        output.square().sum().backward(**kw)
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def check_gradients(model, x, around):
    """Compare the gradients of a step with an Offload around its forward with those of one without."""
    exact = backward(model, forward(model, x))
    assert equal(backward(model, forward(model, x, around)), exact)


# -- Values and bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
def test_gradients_are_the_same(place, name, ahead):
    model, x = converted(name, place.device)
    around = place.offload(least=1, ahead=ahead)
    check_gradients(model, x, around)
    assert around.bytes_out > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("least", [1, 300, 10**9])
def test_what_leaves_is_what_the_meter_counts(place, name, least):
    model, x = converted(name, place.device)
    report = forward(lambda x: fewbit.saved_bytes(model, x), x)
    expected = sum(e.bytes for e in report.entries if e.kind in KEPT and e.bytes >= least)
    around = place.offload(least=least, ahead=0)
    y = forward(model, x, around)
    assert around.bytes_out == around.bytes_on_host == expected
    assert (expected == 0) == (least == 10**9)
    backward(model, y)
    assert around.bytes_back == expected  # ahead=0: each storage once, however many layers share it
    assert around.bytes_on_host == 0


def test_a_view_comes_back_as_it_was(place):
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *views):
            ctx.save_for_backward(*views)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found.extend(ctx.saved_tensors)
            return grad, None, None

    found = []
    x = torch.zeros((), device=place.device, requires_grad=True)
    kept = torch.arange(24, dtype=torch.int16, device=place.device)
    views = kept[3:11], kept.view(4, 6).t()
    expected = [view.clone() for view in views]
    around = place.offload(least=48, ahead=0)
    with around:
        offload.mark(kept)
        y = Keep.apply(x, *views)
    assert around.bytes_out == 48
    del kept
    y.backward()
    for view, value in zip(found, expected, strict=True):
        assert torch.equal(view, value) and view.dtype == torch.int16
    assert [view.stride() for view in found] == [(1,), (1, 6)]


def test_the_tensors_of_others_stay(place):
    torch.manual_seed(0)
    model, x = mlp().to(place.device), torch.randn(32, 64, device=place.device)
    around = place.offload(least=1)
    check_gradients(model, x, around)
    assert around.bytes_out == 0


# -- Order and memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_layers_come_back_before_they_are_asked_for(late, ahead):
    """The last `ahead` of n layers stay. At layer i the layers down to i - ahead are on their way back."""
    n, sizes, seen = 7, [], {}
    around = late.offload(least=1, ahead=ahead)
    x = torch.ones(8, requires_grad=True)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, i):
            keep = integers.pack(torch.arange(64 * (i + 1)) % 4, 4)
            sizes.append(len(keep.tensors[0]) * 4)
            ctx.i, ctx.spec = i, keep.spec
            ctx.save_for_backward(*keep.tensors)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            before = list(late.kind.made.log)
            values = ctx.spec.dequantize(ctx.saved_tensors)
            assert torch.equal(values, (torch.arange(64 * (ctx.i + 1)) % 4).to(values.dtype))
            seen[ctx.i] = before, list(late.kind.made.log)
            return grad, None

    with around:
        y = x
        for i in range(n):
            y = Layer.apply(y, i)
    assert late.kind.made.log == [("out", size) for size in sizes]
    y.sum().backward()
    for i in range(n):
        before, after = (
            {sizes.index(size) for way, size in log if way == "back"} for log in seen[i]
        )
        stayed = set(range(n - ahead, n))
        assert before | stayed == set(range(max(i + 1 - ahead, 0) if i < n - 1 else n - ahead, n))
        assert after | stayed == set(range(max(i - ahead, 0), n))
    back = [size for way, size in late.kind.made.log if way == "back"]
    assert back == sizes[: n - ahead][::-1]


@pytest.fixture
def marked(monkeypatch):
    """Return weak references to all marked memory. .most: the largest number that existed at once."""
    found = SimpleNamespace(all=[], most=0)
    original = offload.mark

    def mark(*tensors):
        found.all += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        found.most = max(found.most, alive(found.all))
        original(*tensors)

    monkeypatch.setattr(offload, "mark", mark)
    return found


def alive(storages):
    return sum(not storage.expired() for storage in storages)


def test_memory_is_free_while_the_forward_goes_on(place, marked):
    """This includes copies that layers of a converted model share, which the cache holds."""
    model, x = converted("mlp", place.device, layers={"activation_bits": 1})
    around = place.offload(least=1, ahead=1)
    y = forward(model, x, around)
    layers = 2 * 6  # linear layers with packed and ranges, activations with packed
    assert len(marked.all) == 6 * 3
    # The layer that leaves, the one that is made, and one whose input is still there: 3 tensors each at most.
    assert marked.most <= 9 < layers + 6
    assert alive(marked.all) <= 3
    backward(model, y)
    assert alive(marked.all) == 0


def test_a_graph_that_is_dropped_frees_everything(place, marked):
    model, x = converted("attention", place.device)
    forward(model, x)  # what an activation's result is offered to is known from here on
    marked.all.clear()
    gc.disable()
    try:
        around = place.offload(least=1, ahead=2)
        y = forward(model, x, around)
        assert around.bytes_on_host > 0
        del y
        assert around.bytes_on_host == 0
        place.finish()  # what was on its way is held until it is there
        assert alive(marked.all) == 0
    finally:
        gc.enable()


def test_no_cycle_through_what_stays(place):
    """Otherwise a node that saves its own result (exp) would be kept alive by it."""
    x = torch.ones(8, device=place.device, requires_grad=True)
    gc.disable()
    try:
        with place.offload(least=1):
            y = x.exp()
        gone = weakref.ref(y)
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert gone() is None and storage.expired()
    finally:
        gc.enable()


# -- Uses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_backward_twice(place, name):
    model, x = converted(name, place.device)
    exact = backward(model, forward(model, x))
    around = place.offload(least=1)
    y = forward(model, x, around)
    held = around.bytes_on_host
    assert equal(backward(model, y, retain_graph=True), exact)
    assert around.bytes_on_host == held
    assert equal(backward(model, y), exact)
    assert around.bytes_on_host == 0


def test_what_backward_passes_by_is_not_left_on_the_device(late):
    """Layers of a branch that is not differentiated are fetched, and are freed after the backward pass has passed it."""
    around = late.offload(least=1, ahead=1)
    x = torch.ones(64, 64, requires_grad=True)
    with around:
        trunk = fewbit.functional.gelu(x)
        branch = trunk
        for _ in range(3):
            branch = fewbit.functional.gelu(branch)
        y = fewbit.functional.gelu(trunk)
        z = fewbit.functional.gelu(y)
    (lane,) = [running for running in _lanes(around)]
    z.sum().backward(retain_graph=True)
    assert len(lane._present) == 0
    branch.sum().backward()
    assert x.grad.isfinite().all()


def _lanes(around):
    return {handle().lane for copy in around._on_host for handle in copy.handles if handle()}


def test_several_forwards_before_a_backward(place):
    model, x = converted("images", place.device)

    def run(*context):
        around = context[0] if context else None
        ys = [forward(model, x + i, around) for i in range(3)]
        return backward(model, ys[1], ys[0], ys[2])

    around = place.offload(least=1)
    exact = run()
    fresh, x = converted("images", place.device)  # running statistics as before
    model = fresh
    assert equal(run(around), exact)
    assert around.bytes_on_host == 0


def test_threads(place):
    """Two threads run a forward each, and each runs the other's backward."""
    # (Two threads that round would draw from one generator; codes of activations draw nothing.)
    only = {
        "include": lambda path, module: isinstance(module, nn.GELU),
        "layers": {"functional": False, "activation_bits": 3},
    }
    models = [converted("mlp", place.device, **only) for _ in range(2)]
    exact = [backward(model, forward(model, x)) for model, x in models]
    around = place.offload(least=1)
    outputs, gradients = [None, None], [None, None]
    both = threading.Barrier(2)

    def work(i):
        both.wait()
        with around:
            torch.manual_seed(1)
            outputs[i] = models[i][0](models[i][1])
        both.wait()
        gradients[1 - i] = backward(models[1 - i][0], outputs[1 - i])

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(2)))
    assert around.bytes_on_host == 0 and around.bytes_out > 0
    assert all(map(equal, gradients, exact))


def test_within_the_session(place):
    """A converted model's own hooks enter and leave the Offload, only in training with gradients."""
    model, x = converted("images", place.device)
    exact = backward(model, forward(model, x))
    model, x = converted("images", place.device)
    context = next(m for m in model.modules() if isinstance(m, nn.Linear)).quantizer.context
    around = place.offload(least=1)
    context.contexts = (around,)
    y = forward(model, x)
    out = around.bytes_out
    assert out > 0 and offload.running.forward() is None
    assert equal(backward(model, y), exact)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert around.bytes_out == out


def test_the_documentation_has_the_defaults():
    text = (Path(__file__).parents[2] / "docs/guides/offload.md").read_text(encoding="utf-8")
    assert f"Offload(least={offload.LEAST_BYTES}, ahead={offload.AHEAD})" in text


# -- cases in which nothing leaves -------------------------------------------------------------------------


def test_a_meter_sees_what_is_kept(place):
    model, x = converted("mlp", place.device)
    around = place.offload(least=1)

    def offloaded(x):
        with around:
            return model(x)

    assert fewbit.saved_bytes(offloaded, x).total == fewbit.saved_bytes(model, x).total
    assert around.bytes_out == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_regions_keep_to_themselves(place, use_reentrant):
    """Tensors saved outside the regions leave; tensors recomputed within them stay."""
    model, x = Regions(use_reentrant).to(place.device), torch.randn(32, 64, device=place.device)
    fewbit.compress_(model, bits=2, verbose=False)
    outside = fewbit.saved_bytes(model.first, x)
    # (From its second forward on a model makes some copies in another pass, with other seeds.)
    backward(model, forward(model, x))
    exact = backward(model, forward(model, x))
    context = model.first.quantizer.context
    around = place.offload(least=1)
    context.contexts = (around,)
    y = forward(model, x)
    expected = sum(entry.bytes for entry in outside.entries if entry.kind in KEPT)
    assert around.bytes_out == expected
    assert equal(backward(model, y), exact)
    assert around.bytes_out == expected


def test_while_a_graph_is_captured(late):
    model, x = converted("mlp", "cpu")
    around = late.offload(least=1)
    late.kind.capturing = True
    check_gradients(model, x, around)
    assert around.bytes_out == 0


def test_within_torch_func(late):
    """torch.func forbids hooks, so nothing leaves."""
    around = late.offload(least=1)

    def run(x):
        with around:
            assert offload.running.forward() is None
            return x.sin().sum()

    x = torch.ones(3)
    assert torch.equal(torch.func.grad(run)(x), x.cos())


# -- Errors ------------------------------------------------------------------------------------------------


def test_a_change_in_place_is_found(late):
    """The check works as without hooks, under which autograd does not make it."""
    x = torch.ones(8, requires_grad=True)
    with late.offload(least=1):
        y = x * 2
        z = y.square()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(
        RuntimeError, match="modified by an inplace operation.*at version 1; expected version 0"
    ):
        z.sum().backward()


@pytest.mark.parametrize("name", ["least", "ahead"])
@pytest.mark.parametrize("value", [-1, 2.0, "2", True, None])
def test_bad_settings(name, value):
    with pytest.raises(
        InputError, match=f"{name}: expected an integer of at least 0, got {value!r}"
    ):
        Offload(**{name: value})


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_the_settings_and_no_bytes(again):
    around = Offload(least=1, ahead=5, transfers={"cpu": EmulatedTransfers})
    model, x = converted("mlp", "cpu")
    y = forward(model, x, around)
    other = again(around)
    assert repr(other) == repr(around) == "Offload(least=1, ahead=5)"
    assert (other.bytes_out, other.bytes_on_host) == (0, 0)
    z = forward(model, x, other)
    assert other.bytes_out == around.bytes_out
    assert equal(backward(model, y), backward(model, z))


def test_within_another(place):
    """The inner Offload takes the tensors that are saved in it, the outer one the others."""
    model, x = converted("mlp", place.device)
    alone = place.offload(least=1)
    exact = backward(model, forward(model, x, alone))
    outer, inner = place.offload(least=1), place.offload(least=1)
    torch.manual_seed(1)
    with outer:
        first = model(x)
        with inner:
            second = model(x.clone())
        third = model(x.clone())
    assert outer.bytes_out == 2 * inner.bytes_out == 2 * alone.bytes_out
    assert equal(backward(model, first), exact)
    backward(model, second, third)
    assert outer.bytes_on_host == inner.bytes_on_host == 0


def broken(model, x):
    """Compute a forward that the compiler leaves to the interpreter, while it compiles the functions called there."""
    for _ in range(1):
        torch._dynamo.graph_break()
        x = x.exp()
    return x


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore:The .grad attribute")
def test_with_a_compiled_part(late):
    """The hooks run for tensors that a compiled part saves, and are not compiled themselves."""

    def run(*context):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(
            mlp(16, 1), nn.Sequential(nn.Linear(16, 16), Composed(broken)), mlp(16, 1)
        )
        fewbit.compress_(model, bits=2, verbose=False)
        model[1].compile(backend="aot_eager")
        gradients = backward(model, forward(model, torch.randn(8, 16), *context))
        return gradients, torch._dynamo.utils.counters["frames"]["total"]

    exact, frames = run()
    around = late.offload(least=1)
    gradients, frames_with = run(around)
    assert around.bytes_out > 0
    assert frames_with == frames > 0
    assert equal(gradients, exact)
    torch._dynamo.reset()


# -- Inputs of checkpointed regions ------------------------------------------------------------------------


WIDE = 128


def boundary_model(device, dtype, events):
    """Return blocks whose forward passes are recorded in `events`, and an input."""

    def block(model, x):
        events.append(model.number)
        return x + model.body(x)

    torch.manual_seed(0)
    blocks = []
    for number in range(5):
        body = nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.GELU())
        blocks.append(Composed(block, body=body))
        blocks[-1].number = number
    model = nn.Sequential(nn.Linear(WIDE, WIDE), *blocks).to(device, dtype).train()
    return model, torch.randn(256, WIDE, device=device, dtype=dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_boundaries_on_the_host(place, monkeypatch, bits, dtype):
    """Gradients are those without offload; each boundary crosses the bus twice, but for the last; bytes fall with the bits."""
    boundaries = place.offload(least=1, ahead=1)
    monkeypatch.setattr(checkpointing, "BOUNDARIES", boundaries)
    model, x = boundary_model(place.device, dtype, [])
    found = []
    for offload_ in (False, True, True):
        fewbit.checkpoint_(model, bits, include=[str(n) for n in range(1, 6)], offload=offload_)
        torch.manual_seed(1)
        found.append(backward(model, model(x)))
    assert equal(found[0], found[1]) and equal(found[0], found[2])
    one = quantized_bytes(x.shape, bits) + 4 * WIDE  # and two numbers for each channel
    assert boundaries.bytes_out == 2 * 5 * one and boundaries.bytes_back == 2 * 4 * one
    assert boundaries.bytes_on_host == 0
    assert one < 2 * x.numel() * bits / 16 * 1.1  # of the bytes of bfloat16


def test_boundaries_come_back_one_region_ahead(late, monkeypatch):
    """When region i runs again, the input of region i - 1 is on its way back, and nothing waits for it."""
    boundaries = late.offload(least=1, ahead=1)
    monkeypatch.setattr(checkpointing, "BOUNDARIES", boundaries)
    events, seen = [], []

    class Events(list):
        def append(self, number):
            transfers = late.kind.made
            log = transfers.log if transfers is not None else []
            seen.append((number, [way for way, _ in log].count("back")))
            super().append(number)

    events = Events()
    model, x = boundary_model("cpu", torch.float32, events)
    fewbit.checkpoint_(model, 8, include=[str(n) for n in range(1, 6)], offload=True)
    y = model(x)
    seen.clear()
    parts = 3  # codes, ranges and numbers of channels
    y.square().sum().backward()
    assert seen == [(4, parts), (3, 2 * parts), (2, 3 * parts), (1, 4 * parts), (0, 4 * parts)]


def test_abandoned_and_overlapping_passes(late, monkeypatch):
    """A pass without a backward pass frees the host's memory; two passes before their backward passes both work."""
    boundaries = late.offload(least=1, ahead=1)
    monkeypatch.setattr(checkpointing, "BOUNDARIES", boundaries)
    model, x = boundary_model("cpu", torch.float32, [])
    torch.manual_seed(1)
    fewbit.checkpoint_(model, 8, include=[str(n) for n in range(1, 6)])
    exact = backward(model, model(x), model(x))
    fewbit.checkpoint_(model, 8, include=[str(n) for n in range(1, 6)], offload=True)
    model(x)
    gc.collect()
    assert (
        boundaries.bytes_on_host == boundaries.bytes_out / 5
    )  # of the last region, until the next pass begins
    torch.manual_seed(1)
    assert equal(backward(model, model(x), model(x)), exact)
    assert boundaries.bytes_on_host == 0
