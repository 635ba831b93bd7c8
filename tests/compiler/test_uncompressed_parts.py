"""Many compiled models in one process are all compressed, and a part of a model that is not compressed gives a warning."""

import copy
import pickle
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from compiled_gradients import EXACT, MARKS
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

    def __init__(self, middle=None, width=64):
        super().__init__()
        self.first, self.middle = nn.Linear(64, width), middle or nn.Identity()
        self.word = ""

    def forward(self, x):
        y = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return y * len(self.word + "a")


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


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def disabled():
    module = nn.Sigmoid()
    module.forward = torch.compiler.disable(module.forward)
    return module


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def compiled(model, bits=2, **options):
    return fewbit.compile(model, bits, backend="aot_eager", **options)


def train(model, x=X):
    model(x).sum().backward()


def saved(model, x=X):
    return fewbit.saved_bytes(model, x).total


def in_place(model):
    compile_in_place(model, 2, backend="aot_eager")
    return model


def limited(name):
    """Compile a model a second time, with a limit of one compilation."""
    model = Net()
    net = compiled(model)
    with config.patch({name: 1}):
        train(net)
        model.word = "b"
        train(net)
        train(net)


def failing(patch):
    def fail(*_, **__):
        raise RuntimeError("no graph")

    patch.setattr(Partitioner, "__call__", fail)
    net = compiled(Net())
    with config.patch(suppress_errors=True):
        train(net)
        train(net)


def within(*contexts):
    """Run a model twice within each context, and say whether ordinary calls are compressed afterwards."""
    net = compiled(Net())
    for context in contexts:
        with context():
            train(net)
            train(net)
    assert saved(net) < saved(Net()) / 2


def transformed(transform):
    net = compiled(Net())
    for _ in range(2):
        transform(net)
    assert saved(net) < saved(Net()) / 2


def gradients(net):
    torch.func.grad(lambda p: torch.func.functional_call(net, p, (X,)).sum())(
        dict(net.named_parameters())
    )


def eager():
    return torch.compiler.set_stance("force_eager")


def inside(compile, **options):
    """Call a compiled model in a function or model that is compiled too."""
    inner = compiled(Net())
    outer = compile(nn.Sequential(inner, nn.Tanh()), backend="aot_eager", **options)
    train(outer)
    train(outer)
    assert saved(inner) < saved(Net()) / 2


def parts(middle, **options):
    net = compiled(Net(middle), **options)
    train(net)
    train(net)


FALLBACKS = {
    "recompile limit": (lambda _: limited("recompile_limit"), r"reached .*config\.recompile_limit"),
    "accumulated limit": (
        lambda _: limited("accumulated_recompile_limit"),
        r"reached .*config\.accumulated_recompile_limit",
    ),
    "suppressed error": (failing, "failed, and .*suppress_errors hides the error"),
    "loop that breaks": (lambda _: parts(Breaking(False)), "Net: .* cannot compile some code"),
    "disabled module": (lambda _: parts(disabled()), r"SigmoidBackward0.*torch\.compiler\.disable"),
    "recurrent module": (
        lambda _: parts(Recurrent(64, 64, batch_first=True)),
        "cannot compile some code: .*LSTM",
    ),
    "dispatch mode": (lambda _: within(lambda: FlopCounterMode(display=False)), "FlopCounterMode"),
    "vmap": (
        lambda _: transformed(lambda net: torch.func.vmap(net)(X.expand(2, -1, -1))),
        r"torch\.func",
    ),
    "func.grad": (lambda _: transformed(gradients), r"torch\.func"),
    "stance": (lambda _: within(eager), r"switched off, .*set_stance"),
    "stance later": (lambda _: within(nullcontext, eager), r"switched off, .*set_stance"),
    "switched off": (
        lambda _: within(lambda: config.patch(disable=True)),
        r"config\.disable is set",
    ),
    "disable=True": (lambda _: compiled(Net(), disable=True), r"torch\.compile is disabled"),
    "compiled caller": (
        lambda _: inside(torch.compile),
        "compiles a function that calls the model",
    ),
    "compiled caller in one graph": (
        lambda _: inside(torch.compile, fullgraph=True),
        "compiles a function that calls the model",
    ),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_an_uncompressed_part_warns_once(name, monkeypatch):
    run, message = FALLBACKS[name]
    with pytest.warns(fewbit.CompileWarning, match=message) as found:
        run(monkeypatch)
    assert [one.category for one in found].count(fewbit.CompileWarning) == 1


def rounds():
    """Change what torch.compile may have to compile again."""
    model = Net()
    net = compiled(model)
    train(net.eval())
    train(net.train())
    for context in (torch.no_grad(), torch.inference_mode(), FlopCounterMode(display=False)):
        with context, torch.no_grad():
            net(X)
    train(net, X.clone().requires_grad_())
    train(net, X[:20])
    with torch.autocast("cpu", torch.bfloat16):
        train(net)
    train(net.double(), X.double())


def concurrent():
    nets = [compiled(Net()) for _ in range(2)]
    threads = [threading.Thread(target=train, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(net.partitioner.report.rows for net in nets)


def converted():
    model = Net(disabled())
    fewbit.compress_(model, bits=2, layers={"everything": True}, verbose=False)
    train(compiled(nn.Sequential(model.first, nn.Tanh())))


COMPRESSED = {
    "changes": rounds,
    "threads": concurrent,
    "break between parts": lambda: parts(Breaking(True)),
    "small tensors": lambda: train(compiled(Net(disabled())), X[:2]),
    "exact on purpose": lambda: parts(disabled(), overrides=EXACT),
    "model in a compiled model": lambda: inside(fewbit.compile, bits=2, fullgraph=True),
    "converted": converted,
    "called in uncompiled code": lambda: torch.compiler.disable(train)(compiled(Net())),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_compressed_model_does_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", fewbit.CompileWarning)
        COMPRESSED[name]()


def encoder():
    return nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True)


KINDS = {
    "Sequential": lambda _: nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
    "torch's class": lambda _: encoder(),
    "user's class": lambda _: Net(),
    "user's class of several sizes": lambda number: Net(width=64 + 8 * number),
    "broken graph": lambda _: Net(Breaking(True)),
}


@pytest.mark.parametrize("call", [compiled, in_place])
@pytest.mark.parametrize(
    "count", [2, pytest.param(30, marks=pytest.mark.slow)], ids="{} models".format
)
@pytest.mark.parametrize("kind", KINDS)
def test_all_models_of_a_class_are_compressed(kind, count, call):
    """torch.compile compiles the code of a class only `recompile_limit` times."""
    x = X.expand(2, -1, -1) if kind == "torch's class" else X
    with config.patch(recompile_limit=count - 1):
        for number in range(count):
            exact = saved(KINDS[kind](number), x)
            assert saved(call(KINDS[kind](number)), x) < exact / 2


def test_each_model_is_compiled_once_and_with_its_own_sizes():
    counters = torch._dynamo.utils.counters
    counters.clear()
    for rows in (32, 24, 16):
        net = compiled(Net())
        train(net, X[:rows])
        train(net, X[:rows])
        # After a change of sizes, torch.compile would compile one graph for all sizes.
        assert all(
            isinstance(size, int) for row in net.partitioner.report.rows for size in row.shape
        )
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda net: pickle.loads(pickle.dumps(net))]
)
def test_a_copy_of_a_compiled_model_is_compressed_too(again):
    net = compiled(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), overrides={"1": 4})
    net(X)
    other = again(net)
    assert saved(other) == saved(net)
    assert other.partitioner is not net.partitioner
    assert other.partitioner.report.rows == net.partitioner.report.rows
