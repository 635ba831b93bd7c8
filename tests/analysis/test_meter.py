"""saved_bytes: hand-counted bytes, an independent walk over the graph, and what it must not disturb."""

import gc
import json
import warnings
from collections import UserDict
from contextlib import suppress
from functools import partial

import pytest
import torch
from composed import Composed
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.analysis import recorder
from fewbit.analysis.meter import saved_bytes
from fewbit.analysis.saved_bytes import MOST_BARS, rows
from fewbit.demo.small_transformer import CharTransformer
from fewbit.errors import FewbitError, OutputExistsError
from fewbit.render.terminal import plain


def walked(output, model):
    """The oracle: bytes of the storages in `_saved_*` of the graph's nodes, without the model's own."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found, nodes, seen = {}, [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                value = getattr(node, name)
                for tensor in value if isinstance(value, tuple | list) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        storage = tensor.untyped_storage()
                        found[storage.data_ptr()] = storage.nbytes()
    return sum(size for pointer, size in found.items() if pointer not in own)


def mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))


class Transformer(CharTransformer):
    """A language model with a gate, dropout and a tensor that is changed in place. It returns its loss."""

    def __init__(self):
        super().__init__(50, 12, width=32, depth=3, heads=4)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids):
        with sdpa_kernel(SDPBackend.MATH):  # of the same operations on every device
            y = self.drop(super().forward(ids))
        y = (F.silu(y) * y).add_(y)
        return F.cross_entropy(y.flatten(0, 1), ids.flatten())


def test_linear_keeps_its_input():
    (entry, *others) = saved_bytes(nn.Linear(3, 4), torch.randn(2, 3)).entries
    assert not others
    assert (entry.module, entry.module_type, entry.kind) == ("", "Linear", "input")
    assert (entry.shape, entry.dtype, entry.bytes, entry.saves) == ((2, 3), "float32", 24, 1)
    assert (entry.node, entry.device, entry.first_saver) == ("AddmmBackward0", "cpu", None)


def test_gelu_mlp():
    report = saved_bytes(mlp(), torch.randn(5, 4))
    assert report.by_kind() == {"activation": 640, "parameter": 256, "input": 80}
    assert report.by_module() == {"1": 320, "2": 320, "0": 80}
    assert report.by_module_type() == {"Linear": 400, "GELU": 320}
    assert (report.total, report.parameters, report.inputs, report.buffers) == (720, 256, 80, 0)


@pytest.mark.parametrize("inplace", [False, True])
def test_conv_batchnorm_relu(inplace):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=inplace)
    )
    report = saved_bytes(model, torch.randn(2, 3, 8, 8))
    plane = 2 * 8 * 8 * 4
    # The convolution's input; BatchNorm's input, mean and deviation; ReLU's output (also in place).
    assert report.by_module() == {"1": 8 * plane + 64, "2": 8 * plane, "0": 3 * plane}
    assert report.by_kind()["buffer"] == 64
    assert report.parameters == (3 * 8 * 9 + 8) * 4


def test_dropout_keeps_what_it_multiplies_with_only_while_training():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
    assert saved_bytes(model, torch.randn(5, 4)).by_module() == {"1": 120, "0": 80}
    assert saved_bytes(model.eval(), torch.randn(5, 4)).by_module() == {"0": 80}


def where():
    layer = nn.Linear(3, 5)
    return lambda x: torch.where(x > 0, layer(x).sum(), 0.0)


@pytest.mark.parametrize(
    ("make", "x", "by_kind"),
    [
        (lambda: nn.BatchNorm1d(8).eval(), torch.randn(4, 8), {"input": 128, "buffer": 64, "parameter": 32}),
        (lambda: nn.LayerNorm(6), torch.randn(5, 6), {"input": 120, "activation": 2 * 5 * 4, "parameter": 48}),
        (lambda: nn.Embedding(10, 6), torch.tensor([[1, 2, 3]]), {"input": 24}),
        (lambda: nn.MaxPool2d(2), torch.randn(1, 2, 4, 4, requires_grad=True), {"input": 128, "integer": 2 * 2 * 2 * 8}),
        (where, torch.randn(7, 3), {"input": 7 * 3 * 4, "mask": 7 * 3}),
    ],
    ids=["batch norm in evaluation", "layer norm", "embedding", "pooling", "where"],
)  # fmt: skip
def test_kinds_of_what_is_saved(make, x, by_kind):
    report = saved_bytes(make(), x)
    assert report.by_kind() == by_kind
    buffers, parameters = by_kind.get("buffer", 0), by_kind.get("parameter", 0)
    assert (report.buffers, report.parameters) == (buffers, parameters)
    assert report.total == sum(by_kind.values()) - buffers - parameters


def test_an_input_shared_by_two_is_counted_once():
    model = Composed(
        lambda model, x: model.a(x) + model.b(x.view(2, 2, 4)).view(4, 4),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
    )
    first, second = saved_bytes(model, torch.randn(4, 4)).entries
    assert (first.module, first.bytes, first.shared_with) == ("a", 64, ("b",))
    assert (second.module, second.bytes, second.first_saver) == ("b", 0, "a")


def test_frozen_parameters():
    model = mlp()
    model[0].requires_grad_(False)
    report = saved_bytes(model, torch.randn(5, 4))
    assert report.by_module() == {"2": 320}  # GELU's input needs no gradient
    model.requires_grad_(False)
    assert saved_bytes(model, torch.randn(5, 4)).entries == ()
    # A gradient for the input: the frozen weights are needed, and are parameters all the same.
    report = saved_bytes(model, torch.randn(5, 4, requires_grad=True))
    assert report.by_kind() == {"parameter": 512, "activation": 320}


def test_a_view_keeps_the_whole_storage():
    layer = nn.Linear(4, 4)
    (entry,) = saved_bytes(layer, torch.randn(100, 4)[10:12]).entries
    assert (entry.shape, entry.bytes, entry.viewed_bytes) == ((2, 4), 1600, 32)
    report = saved_bytes(layer, torch.randn(1, 4).expand(50, 4))
    assert report.total == 16 and report.entries[0].viewed_bytes == 16
    assert "keep alive without using it" not in str(report)
    # Three views that together are the whole leave nothing unused.
    wide = nn.Linear(4, 6)
    report = saved_bytes(
        lambda x: [part.exp() * part for part in wide(x).chunk(3, -1)], torch.randn(5, 4)
    )
    (storage,) = [entry for entry in report.entries if entry.bytes == 5 * 6 * 4]
    assert (storage.viewed_bytes, storage.saves) == (120, 3)


def test_memory_shared_by_two_storage_objects_is_counted_once():
    x = torch.randn(4, 4)
    alias = torch.from_numpy(x.numpy())
    assert alias.untyped_storage()._cdata != x.untyped_storage()._cdata
    layer = nn.Linear(4, 4)
    assert saved_bytes(lambda a, b: layer(a) + layer(b), x, alias).total == 64


def test_two_calls_of_a_module_and_a_module_with_two_names():
    layer = nn.Linear(4, 4)
    model = Composed(lambda model, x: model.again(model.first(x).relu()), first=layer, again=layer)
    report = saved_bytes(model, torch.randn(3, 4))
    # ReLU, in the outer module, saves its output first; the second call's input is the same storage.
    assert report.by_module() == {"first": 48, "": 48}
    activations = [entry for entry in report.entries if entry.kind == "activation"]
    found = [(entry.module, entry.bytes, entry.first_saver) for entry in activations]
    assert found == [("", 48, None), ("first", 0, "")]
    report = saved_bytes(model, torch.randn(3, 4, requires_grad=True))
    weights = [entry for entry in report.entries if entry.kind == "parameter"]
    assert [(entry.bytes, entry.saves) for entry in weights] == [(64, 2)]


def test_what_the_forward_throws_away_is_not_kept():
    layer = nn.Linear(4, 4)

    def model(x):
        for _ in range(3):
            layer(x).exp().mul(2).sigmoid()  # nobody uses it
        return layer(x)

    assert saved_bytes(model, torch.randn(3, 4)).total == 48


def test_autocast_copies_of_parameters_are_told_from_activations():
    with torch.autocast("cpu", torch.bfloat16):
        report = saved_bytes(mlp(), torch.randn(5, 4))
    assert report.by_kind() == {"activation": 40 + 160 + 160, "cast": 128}
    assert report.total == 488


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_keeps_what_its_graph_holds(training):
    model = Transformer().train(training)
    ids = torch.randint(0, 50, (2, 12))
    report = saved_bytes(model, ids)
    output = model(ids)
    assert report.total == walked(output, model) > 1e5
    assert sum(report.by_module().values()) == sum(report.by_module_type().values()) == report.total
    assert report.by_module(0) == {"": report.total}
    blocks = report.by_module(2)
    assert blocks["blocks.0"] == blocks["blocks.2"] > 0
    assert all(entry.node for entry in report.entries)
    assert report.inputs == 2 * 12 * 8


@pytest.mark.parametrize("make", [mlp, Transformer], ids=["mlp", "transformer"])
@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_models_without_memory_are_counted_alike(make, mode):
    def inputs():
        return torch.ones(2, 12, dtype=torch.int64) if make is Transformer else torch.ones(5, 4)

    from torch._subclasses.fake_tensor import FakeTensorMode

    real = saved_bytes(make().eval(), inputs())
    with torch.device("meta") if mode == "meta" else FakeTensorMode():
        other = saved_bytes(make().eval(), inputs())
    assert other.by_kind() == real.by_kind()
    assert other.by_module() == real.by_module()


def test_a_function_finds_the_modules_it_uses():
    net, head = mlp(), nn.Linear(4, 2)

    def step(x, target):
        return F.cross_entropy(head(net(x)), target)

    x, target = torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)
    report = saved_bytes(step, x, target)
    assert report.model == "step"
    assert report.by_module(1) == {"net": 720, "": 40 + 40 + 4, "head": 80}
    assert report.parameters == 256 + 32
    bound = partial(lambda model, x: model(x), net)
    assert saved_bytes(bound, x).by_module() == {
        "Sequential.1": 320,
        "Sequential.2": 320,
        "Sequential.0": 80,
    }
    assert saved_bytes(net.forward, x).total == 720


def test_keywords_and_mappings_are_inputs():
    layer = nn.Linear(3, 3)
    batch = {"x": torch.randn(2, 3)}
    assert saved_bytes(lambda batch: {"y": layer(batch["x"])}, batch).by_kind() == {"input": 24}
    assert saved_bytes(layer, input=torch.randn(2, 3)).by_kind() == {"input": 24}
    for batch in ({"input": torch.randn(2, 3)}, UserDict(input=torch.randn(2, 3))):
        assert saved_bytes(layer, batch).by_kind() == {"input": 24}


def test_a_mapping_is_one_argument_of_a_forward_that_lacks_a_name():
    class Model(nn.Linear):
        def forward(self, batch, y=None, **others):
            return super().forward(batch["x"])

    x = torch.randn(2, 3)
    for batch in ({"x": x}, {"x": x, "y": x}):
        assert saved_bytes(Model(3, 3), batch).by_kind() == {"input": 24}


class Wrapper(nn.Module):
    """A module such as those of peft, whose forward passes all arguments on."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_a_mapping_gives_keywords_to_a_forward_that_passes_all_on():
    assert saved_bytes(Wrapper(nn.Linear(3, 3)), {"input": torch.randn(2, 3)}).total == 24


def test_a_forward_without_a_signature():
    class Model(nn.Module):
        forward = staticmethod(torch.relu)

    with pytest.raises(TypeError, match="relu"):
        saved_bytes(Model(), {"input": torch.randn(2, 3)})


@pytest.mark.parametrize("name", ["place", "compiled", "self_"])
def test_names_of_arguments_of_compiled_modules(name):
    class Model(nn.Linear):
        def forward(self, **inputs):
            return super().forward(inputs[name])

    model = nn.ModuleList([Model(3, 3)])
    model[0].compile(backend="eager")
    x = torch.randn(2, 3)
    assert saved_bytes(lambda: model[0](**{name: x})).total == 24


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_its_inputs(reentrant):
    model, head = mlp(), nn.Linear(4, 4)

    def forward(x):
        return checkpoint(model, head(x), use_reentrant=reentrant).exp()

    report = saved_bytes(forward, torch.randn(5, 4))
    # The input of head, the input of the region, the output of exp; nothing of the inside.
    assert report.total == 3 * 80
    assert report.by_module() == {"": 160, "head": 80}


def test_what_save_on_cpu_moves_away_is_not_counted():
    model = mlp()

    def forward(x):
        with torch.autograd.graph.save_on_cpu():
            hidden = model(x)
        return hidden.exp()

    assert saved_bytes(forward, torch.randn(5, 4)).by_kind() == {"activation": 80}


def test_a_child_that_raises_and_is_caught_does_not_keep_the_blame():
    def forward(model, x):
        with suppress(RuntimeError):
            model.fails(x)
        return model.layer(x).exp()

    model = Composed(forward, fails=nn.Linear(7, 7), layer=nn.Linear(4, 4))
    assert saved_bytes(model, torch.randn(3, 4)).by_module() == {"layer": 48, "": 48}


class Codes(torch.autograd.Function):
    """A function that saves a 1-D int32 tensor, as fewbit's functions do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.zeros(3, dtype=torch.int32))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_payloads_are_known_by_the_node_or_the_module_that_saves_them(monkeypatch):
    layer = nn.Linear(4, 4)
    assert saved_bytes(lambda x: Codes.apply(layer(x)), torch.randn(3, 4)).by_kind() == {
        "input": 48,
        "integer": 12,
    }

    class Act(nn.Module):
        def forward(self, x):
            return Codes.apply(x)

    for own in (Codes, Act):
        with monkeypatch.context() as patch:
            patch.setattr(own, "__module__", "fewbit.runtime.ops")
            report = saved_bytes(nn.Sequential(nn.Linear(4, 4), Act()), torch.randn(3, 4))
        assert report.by_kind() == {"input": 48, "packed": 12}
        assert report.entries[-1].node == "CodesBackward"


@pytest.fixture
def compiler():
    """A backend that counts how often it compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        from torch._dynamo.backends.debugging import aot_eager

        def backend(graph, inputs):
            backend.count += 1
            return aot_eager(graph, inputs)

        backend.count = 0
        torch.compiler.reset()
        yield backend
        torch.compiler.reset()


@pytest.mark.inductor
@pytest.mark.parametrize("measured_first", [True, False])
@pytest.mark.parametrize("how", ["method", "part", "function"])
def test_a_compiled_model_is_measured_and_stays_compiled(compiler, how, measured_first):
    net = Composed(lambda model, x: model.inner(x), inner=mlp())
    x = torch.randn(5, 4)
    before = [p.clone() for p in net.parameters()]
    if how == "method":
        net.compile(backend=compiler)
        model, where = net, ""
    elif how == "function":
        model, where = torch.compile(lambda x: net(x), backend=compiler), ""
    else:
        model = nn.Sequential(torch.compile(net, backend=compiler), nn.Linear(4, 4))
        where = "0"
    if not measured_first:
        model(x).sum().backward()
    impl = net._compiled_call_impl
    report = saved_bytes(model, x)
    assert report.by_module()[where] == 80 + 320 + 320
    assert report.parameters >= 256
    assert {entry.node for entry in report.entries if entry.module == where} == {
        "CompiledFunctionBackward"
    }
    assert net._compiled_call_impl is impl
    model(x).sum().backward()
    assert compiler.count == 1
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, old) and parameter.grad.abs().sum() > 0


def hooks_of(model):
    return [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_always_called))
        for m in model.modules()
    ]


def tokens():
    return [item for item in gc.get_objects() if type(item) is recorder.Token]


def noisy():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_changes(fails):
    before = tokens()  # those of interrupted measurements in other tests
    model = noisy()
    if fails:
        model[3] = nn.Linear(7, 2)  # the shapes do not fit: the forward raises after BatchNorm
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers, random, hooks = list(model.buffers()), torch.get_rng_state(), hooks_of(model)
    if fails:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            saved_bytes(model, torch.ones(5, 4))
    else:
        saved_bytes(model, torch.ones(5, 4))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert hooks_of(model) == hooks
    assert model.training and all(p.grad is None for p in model.parameters())
    assert len(tokens()) == len(before)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert len(saved) == 1  # the meter's hooks are gone


def test_a_graph_built_before_can_still_run_backward():
    model = noisy().eval()
    loss = model(torch.ones(5, 4)).sum()
    saved_bytes(model, torch.ones(5, 4))
    loss.backward()
    assert model[0].weight.grad is not None


def test_replaced_buffers_come_back():
    """A sparse buffer is no obstacle."""

    def forward(model, x):
        model.count = model.count + 1
        return model.layer(x)

    model = Composed(forward, layer=nn.Linear(3, 3))
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("mask", torch.eye(3).to_sparse())
    assert saved_bytes(model, torch.ones(2, 3)).total == 24
    assert model.count == 0


def test_gradients_may_be_switched_off_outside():
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert saved_bytes(mlp(), x).total == 720
        assert not torch.is_grad_enabled()
    model = noisy()
    total = saved_bytes(model, x).total
    with torch.inference_mode():
        assert saved_bytes(model, x).total == total > 0
        assert torch.is_inference_mode_enabled()
    assert model[1].num_batches_tracked == 0
    assert saved_bytes(model, x).total == total  # its tensors are still ordinary ones


def test_a_backward_inside_the_forward_works_and_leaves_nothing():
    layer = nn.Linear(4, 4)

    def model(x):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(layer(x).exp().sum(), x)
        return grad

    report = saved_bytes(model, torch.randn(3, 4))
    assert report.total == 0


@pytest.mark.slow
def test_no_tensor_outlives_the_measurement():
    x = torch.randn(64, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Softmax(-1), nn.Tanh())
    gc.collect()
    gc.disable()  # a cycle would have to wait for the collector
    try:
        before = sum(type(item) is torch.Tensor for item in gc.get_objects())
        saved_bytes(model, x)
        assert sum(type(item) is torch.Tensor for item in gc.get_objects()) == before
    finally:
        gc.enable()


def test_refusals():
    with pytest.raises(FewbitError, match="model: expected a torch.nn.Module .* got int"):
        saved_bytes(3, torch.ones(1))
    report = saved_bytes(mlp(), torch.randn(5, 4))
    with pytest.raises(FewbitError, match="depth: expected None or an integer >= 0, got -1"):
        report.by_module(-1)
    with pytest.raises(FewbitError, match="by: expected module_type or module, got 'kind'"):
        report.plot(by="kind")
    with pytest.raises(FewbitError, match="ends in .png or .svg"):
        report.plot("a.pdf")


@pytest.mark.slow
def test_nothing_saved_says_so(tmp_path):
    layer = nn.Linear(4, 4)

    def off(x):
        with torch.no_grad():
            return layer(x)

    for model in (nn.Identity(), off):
        report = saved_bytes(model, torch.randn(3, 4))
        assert report.total == 0 and report.entries == ()
        assert "Nothing is saved for backward" in str(report)
        assert "Nothing is saved for backward" in report._repr_html_()
        (axes,) = report.plot(tmp_path / "none.png", force=True).axes
        assert [text.get_text() for text in axes.texts] == ["nothing is saved"]


def test_the_report_is_a_table():
    lines = str(saved_bytes(mlp(), torch.randn(5, 4))).splitlines()
    assert lines[0] == "Sequential: 720 B saved for backward, in 3 storages"
    assert lines[2].split() == ["module", "type", "×", "kind", "shape", "dtype", "B", "share"]
    assert lines[4].split() == ["1", "GELU", "activation", "5×16", "float32", "320", "44.4%"]
    assert lines[6].split() == ["0", "Linear", "input", "5×4", "float32", "80", "11.1%"]
    assert lines[8].split() == ["total", "720", "100.0%"]
    assert lines[10] == "by kind: activation 640 B (88.9%), input 80 B (11.1%)"
    assert lines[11] == "not in the total: parameters 256 B, saved but existing anyway"


def test_alike_blocks_share_a_row_and_a_narrow_terminal_keeps_names():
    report = saved_bytes(Transformer(), torch.randint(0, 50, (2, 12)))
    text = plain(report, 60)
    assert "blocks.*.norm1" in text and text.endswith("columns left out: type, dtype")
    found = rows(report.kept)
    assert sum(row.bytes for row in found) == report.total
    assert [row.bytes for row in found] == sorted((row.bytes for row in found), reverse=True)


def test_a_long_model_is_cut():
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in range(1, 61)))
    report = saved_bytes(model, torch.randn(2, 1))
    lines = str(report).splitlines()
    (cut,) = [line for line in lines if line.startswith("… and")]
    assert cut.startswith("… and 40 more")
    rest = sum(2 * 4 * n for n in range(1, 41))
    assert cut.split()[-2:] == [f"{rest / 1024:.2f}", f"{100 * rest / report.total:.1f}%"]
    assert report._repr_html_().count("<tr>") == 1 + 60 + 1


def test_json_round_trips(tmp_path):
    report = saved_bytes(Transformer(), torch.randint(0, 50, (2, 12)))
    path = tmp_path / "saved.json"
    document = json.loads(report.to_json(path))
    assert document == report.to_dict() == json.loads(path.read_text())
    assert document["total"] + document["parameters"] + document["buffers"] == sum(
        entry["bytes"] for entry in document["entries"]
    )
    with pytest.raises(OutputExistsError):
        report.to_json(path)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path, suffix):
    report = saved_bytes(Transformer(), torch.randint(0, 50, (2, 12)))
    path = tmp_path / f"saved.{suffix}"
    figure = report.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    (axes,) = figure.axes
    assert "nothing is saved" not in [text.get_text() for text in axes.texts]
    widths = sum(bar.get_width() for bar in axes.patches)
    assert widths == pytest.approx(report.total / 2**10)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [name or "(model)" for name, size in report.by_module_type().items() if size]
    with pytest.raises(OutputExistsError):
        report.plot(path)
    (axes,) = report.plot(by="module").axes
    assert len(axes.get_yticklabels()) == MOST_BARS
    assert axes.get_yticklabels()[-1].get_text().endswith(" others")
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(widths)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 1)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Reasons(nn.Module):
    """Each part saves a tensor of 64 by 64 numbers in full for another reason."""

    def __init__(self, part):
        super().__init__()
        self.converted, self.excluded, self.part = nn.Linear(64, 64), nn.Linear(64, 64), part

    def forward(self, x):
        x = self.converted(x)
        if self.part == "excluded":
            return self.excluded(x)
        if self.part == "checkpoint":
            return checkpoint(torch.sin, x, use_reentrant=False)
        parts = {
            "operation": lambda x: x.var(1),
            "not linear": lambda x: (1 + x.abs()).log(),
            "own": _Identity.apply,
        }
        return parts[self.part](x)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("excluded", "the module is not converted: see include, exclude and overrides"),
        ("checkpoint", "an input of torch.utils.checkpoint, or held by no node: use fewbit.checkpoint"),
        ("operation", 'saved by Var: layers={"everything": True} compresses it'),
        ("not linear", "the gradient of Log is not linear in it, or has no rule"),
        ("own", "saved by _Identity, a Function of another library"),
    ],
)  # fmt: skip
def test_reasons_for_tensors_in_full(part, reason):
    """The exact model gives no reasons, and the largest tensor of the compressed one has this reason."""
    model, x = _Reasons(part), torch.randn(64, 64)
    assert not fewbit.saved_bytes(model, x).left_in_full()
    fewbit.compress_(model, 2, exclude="excluded", verbose=False)
    report = fewbit.saved_bytes(model, x)
    found = {entry.reason for entry in report.left_in_full() if entry.bytes == 4 * 64 * 64}
    assert reason in found
    place = "excluded" if part == "excluded" else "(model)"
    assert f"in full, 16.00 KiB in {place}: {reason}" in " ".join(plain(report).split())


def test_the_reason_for_an_lstm_names_the_setting():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64)), torch.randn(8, 4, 64)
    fewbit.compress_(model, 2, verbose=False)
    reasons = {entry.reason for entry in fewbit.saved_bytes(model, x).left_in_full()}
    setting = 'one operation over all steps: layers={"everything": True} compresses it on the CPU'
    assert setting in reasons


def test_the_loss_outside_of_the_model_is_named_first():
    model, target = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 500)), torch.randint(500, (64,))
    x = torch.randn(64, 64)
    fewbit.compress_(model, 2, verbose=False)
    report = fewbit.saved_bytes(lambda x: nn.functional.cross_entropy(model(x), target), x)
    first, *_ = report.left_in_full()
    assert first.bytes == 4 * 64 * 500
    assert first.reason == (
        "the loss is outside of the model: call fewbit.functional.cross_entropy"
    )
    few = fewbit.saved_bytes(lambda x: fewbit.functional.cross_entropy(model(x), target), x)
    assert all(entry.bytes < first.bytes for entry in few.left_in_full())


def test_everything_leaves_nothing_that_a_rule_holds_for():
    model, x = _Reasons("operation"), torch.randn(64, 64)
    fewbit.compress_(model, 2, layers={"everything": True}, verbose=False)
    assert not fewbit.saved_bytes(model, x).left_in_full()


def test_narrowed_indices_are_not_in_full():
    model, ids = nn.Embedding(500, 8), torch.randint(500, (64, 64))
    fewbit.compress_(model, 2, verbose=False)
    report = fewbit.saved_bytes(model, ids)
    assert report.by_kind()["integer"] == 2 * 64 * 64
    assert not report.left_in_full()
