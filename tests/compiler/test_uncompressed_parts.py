"""Many compiled models in one process are all compressed, and a part of a model that is not compressed gives a warning."""

import copy
import inspect
import pickle
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from compiled_models import EXACT, MARKS
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fewbit
from fewbit.compiler.compiling import compile_in_place
from fewbit.compiler.partitioner import Partitioner

config = torch._dynamo.config
pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore:The .grad attribute"),
]


class Net(nn.Module):
    """A user's model, whose code torch.compile compiles again if `word` changes."""

    def __init__(self, middle=None):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.middle = nn.Identity() if middle is None else middle
        self.word = ""

    def forward(self, x):
        return self.middle(torch.tanh(self.first(x))) * len(self.word + "a")


class Summed(Net):
    """A model whose last operation, which saves nothing, is never compiled."""

    def forward(self, x):
        return total(super().forward(x))


@torch.compiler.disable
def total(x):
    return x.sum(-1)


class Breaking(nn.Module):
    """A module that breaks the graph, in code that torch.compile cannot resume or between compiled parts."""

    def __init__(self, is_resumed):
        super().__init__()
        self.is_resumed = is_resumed

    def forward(self, x):
        if self.is_resumed:
            torch._dynamo.graph_break()
            return torch.tanh(x)
        for _ in range(1):
            with torch.autograd.set_detect_anomaly(False):
                x = torch.sigmoid(x)
        return x


class Plain(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class Result:
    """An object that torch knows no members of."""

    __slots__ = ("y", "__dict__")


class InObjects(nn.Module):
    """A module whose result is in a slot or in an attribute of an object in a list."""

    def __init__(self, inner, name):
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, x):
        result = Result()
        setattr(result, self.name, self.inner(x))
        return [result]


def disabled(module):
    module.forward = torch.compiler.disable(module.forward)
    return module


def with_sigmoid():
    """Return a model of which torch.compile compiles nothing, because the graph breaks in the loop of nn.Sequential."""
    return nn.Sequential(nn.Linear(64, 64), disabled(nn.Sigmoid()))


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def compiled(model, bits=2, **options):
    return fewbit.compile(model, bits, backend="aot_eager", **options)


def train(model, x=X):
    model(x).sum().backward()


def saved(model, x=X):
    return fewbit.saved_bytes(model, x).total


def part():
    return torch.compile(Net(), backend="aot_eager")


def in_place(model):
    compile_in_place(model, 2, backend="aot_eager")
    return model


def train_twice_in_objects(name):
    net = compiled(InObjects(with_sigmoid(), name))
    for _ in range(2):
        getattr(net(X)[0], name).sum().backward()


def train_twice(net):
    train(net)
    train(net)


def within(*contexts, make=Net):
    """Train a model twice in each context, and check that ordinary calls are compressed afterwards."""
    net = compiled(make())
    for context in contexts:
        with context():
            train_twice(net)
    assert saved(net) < 0.6 * saved(Net())


def limited(name):
    """Compile a model a second time, with a limit of one compilation."""
    model = Net()
    net = compiled(model)
    with config.patch({name: 1}):
        train(net)
        model.word = "b"
        train_twice(net)


def failing(patch):
    def fail(*_, **__):
        raise RuntimeError("no graph")

    patch.setattr(Partitioner, "__call__", fail)
    with config.patch(suppress_errors=True):
        train_twice(compiled(Net()))


def transformed(transform):
    net = compiled(Net())
    for _ in range(2):
        transform(net)
    assert saved(net) < 0.6 * saved(Net())


def gradients(net):
    def loss(parameters):
        return torch.func.functional_call(net, parameters, (X,)).sum()

    torch.func.grad(loss)(dict(net.named_parameters()))


def vmap(net):
    torch.func.vmap(net)(X.expand(2, -1, -1))


def eager():
    return torch.compiler.set_stance("force_eager")


def flop_counter():
    return FlopCounterMode(display=False)


def inside(compile, **options):
    """Call a compiled model in a function or model that is compiled too."""
    train_twice(compile(nn.Sequential(compiled(Net()), nn.Tanh()), backend="aot_eager", **options))


LOOP = nn.Sequential(nn.Linear(64, 64), Breaking(False))
FALLBACKS = {
    "recompile limit": (lambda _: limited("recompile_limit"), r"reached .*config\.recompile_limit"),
    "accumulated limit": (lambda _: limited("accumulated_recompile_limit"), r"reached .*config\.accumulated_recompile_limit"),
    "suppressed error": (failing, "failed, and .*suppress_errors hides the error"),
    "loop that breaks": (lambda _: train_twice(compiled(LOOP)), "Sequential: .* cannot compile some code"),
    "disabled module": (lambda _: train_twice(compiled(with_sigmoid())), r"SigmoidBackward0.*torch\.compiler\.disable"),
    "result in a slot": (lambda _: train_twice_in_objects("y"), "SigmoidBackward0"),
    "result in an attribute": (lambda _: train_twice_in_objects("z"), "SigmoidBackward0"),
    "recurrent module": (lambda _: train_twice(compiled(Recurrent(64, 64, batch_first=True))), "cannot compile some code: .*LSTM"),
    "dispatch mode": (lambda _: within(flop_counter), "FlopCounterMode"),
    "vmap": (lambda _: transformed(vmap), r"torch\.func"),
    "func.grad": (lambda _: transformed(gradients), r"torch\.func"),
    "stance": (lambda _: within(eager), r"switched off, .*set_stance"),
    "stance later": (lambda _: within(nullcontext, eager), r"switched off, .*set_stance"),
    "stance later, beside eager code": (lambda _: within(nullcontext, eager, make=Summed), r"switched off, .*set_stance"),
    "switched off": (lambda _: within(lambda: config.patch(disable=True)), r"config\.disable is set"),
    "disable=True": (lambda _: compiled(Net(), disable=True), r"torch\.compile is disabled"),
    "compiled caller": (lambda _: inside(torch.compile), "compiles a function that calls the model"),
    "compiled caller in one graph": (lambda _: inside(torch.compile, fullgraph=True), "compiles a function that calls the model"),
    "compiled part": (lambda _: train_twice(compiled(Net(disabled(nn.Sequential(part()))))), r"has compiled middle\.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLBACKS)
def test_an_uncompressed_part_warns_once(name, monkeypatch):
    run, message = FALLBACKS[name]
    with pytest.warns(fewbit.CompileWarning, match=message) as found:
        run(monkeypatch)
    assert [one.category for one in found].count(fewbit.CompileWarning) == 1


def changed(change):
    """Train a model, and again after a change for which torch.compile compiles it anew."""
    net = compiled(Net())
    train(net)
    change(net)


def without_gradients(net):
    for context in (torch.no_grad(), torch.inference_mode(), flop_counter()):
        with context, torch.no_grad():
            assert torch.equal(net(X), net._orig_mod(X))


def cast(net):
    with torch.autocast("cpu", torch.bfloat16):
        train(net)


def concurrent():
    nets = [compiled(Net()) for _ in range(2)]
    threads = [threading.Thread(target=train, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(saved(net) < 0.6 * saved(Net()) for net in nets)


def beside_a_mode():
    """Train in this thread while another thread is in a dispatch mode."""
    is_in, may_leave = threading.Event(), threading.Event()

    def other():
        with flop_counter():
            is_in.set()
            may_leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    is_in.wait(60)
    try:
        net = compiled(Net())
        train(net)
        assert saved(net) < 0.6 * saved(Net())
    finally:
        may_leave.set()
        thread.join()


FEW_BIT = disabled(fewbit.nn.Linear(64, 64, bits=2))
COMPRESSED = {
    "evaluation mode": lambda: changed(lambda net: train(net.eval())),
    "no gradients": lambda: changed(without_gradients),
    "gradient of the input": lambda: changed(lambda net: train(net, X.clone().requires_grad_())),
    "another size": lambda: changed(lambda net: train(net, X[:20])),
    "another dtype": lambda: changed(lambda net: train(net.double(), X.double())),
    "autocast": lambda: changed(cast),
    "threads": concurrent,
    "dispatch mode in another thread": beside_a_mode,
    "break between parts": lambda: train_twice(compiled(Net(Breaking(True)))),
    "small tensors": lambda: train(compiled(with_sigmoid()), X[:2]),
    "exact on purpose": lambda: train_twice(compiled(with_sigmoid(), overrides=EXACT)),
    "model in a compiled model": lambda: inside(fewbit.compile, bits=2, fullgraph=True),
    "compiled part": lambda: train(compiled(Net(part()))),
    "few-bit layer": lambda: train_twice(compiled(nn.Sequential(FEW_BIT))),
    "called in uncompiled code": lambda: torch.compiler.disable(train)(compiled(Net())),
}


SLOW = ["no gradients", "another size", "another dtype", "autocast"]
SLOW += ["break between parts", "gradient of the input"]
SLOW += ["threads", "dispatch mode in another thread"]
"""The names of those that compile twice."""


def test_a_part_that_saves_tensors_only_in_later_calls_warns_too():
    """Nothing is compiled in that call, and compiled code makes its result."""
    saves = [False]

    @torch.compiler.disable
    def between(x):
        return torch.tanh(x).sin() if saves[0] else x

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.last(between(self.first(x))).relu()

    compiled, x = fewbit.compile(Broken(), 2, backend="aot_eager"), torch.randn(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fewbit.CompileWarning)
        for _ in range(2):
            compiled(x)
    saves[0] = True
    with pytest.warns(fewbit.CompileWarning, match="exact tensors are saved"):
        compiled(x)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in COMPRESSED],
)
def test_a_compressed_model_does_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", fewbit.CompileWarning)
        COMPRESSED[name]()


COMPILE_OPTIONS = inspect.signature(torch.compile).parameters
KINDS = {
    "Sequential": lambda _: nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
    "torch's class": lambda _: nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True),
    "user's class": lambda _: Plain(64, 64),
    "user's class of several sizes": lambda number: Plain(64, 64 + 8 * number),
    "broken graph": lambda _: Net(Breaking(True)),
}


@pytest.mark.inductor
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [compiled, pytest.param(in_place, marks=pytest.mark.slow)])
def test_all_models_of_a_class_are_compressed(kind, call):
    """torch.compile compiles the code of a class only `recompile_limit` times.

    In torch 2.11, models whose graph is broken share that number. Those that exceed it give a warning.
    """
    is_shared = kind == "broken graph" and "isolate_recompiles" not in COMPILE_OPTIONS
    x = X.expand(2, -1, -1) if kind == "torch's class" else X
    with config.patch(recompile_limit=1):
        for number in range(3):
            exact = saved(KINDS[kind](number), x)
            model = call(KINDS[kind](number))
            if number and is_shared:
                with pytest.warns(fewbit.CompileWarning, match="exact tensors are saved"):
                    saved(model, x)
                continue
            assert saved(model, x) < 0.6 * exact


@pytest.mark.inductor
def test_each_model_is_compiled_once_and_with_its_own_sizes():
    counters = torch._dynamo.utils.counters
    counters.clear()
    for rows in (32, 24):
        net = compiled(Plain(64, 64))
        train(net, X[:rows])
        train(net, X[:rows])
        # After a change of sizes, torch.compile would compile one graph for all sizes.
        assert all(
            isinstance(size, int) for row in net.partitioner.report.rows for size in row.shape
        )
    assert counters["stats"]["unique_graphs"] == 2


def pickled(net):
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, pickled])
def test_a_copy_of_a_compiled_model_is_compressed_too(again):
    net = compiled(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()), overrides={"1": {"activation_bits": 4}}
    )
    other = again(net)
    assert saved(other) < 0.6 * saved(net._orig_mod)
    assert {row.bits for row in other.partitioner.report.rows if row.module == "1"} == {4}
    assert not net.partitioner.report.rows
