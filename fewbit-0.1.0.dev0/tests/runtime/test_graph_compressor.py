"""Compression of what torch's own operations save (`everything`): gradients against torch's, and saved bytes."""

import copy
import gc
import math
import pickle
import threading

import pytest
import torch
from expectation import drawn, pooled_z
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.errors import GradientError
from fewbit.runtime.graph import packs, rules
from fewbit.runtime.interop import autograd_graph

SHAPE = 8, 16, 24  # each tensor has 3072 elements, more than `compressor.SMALL`


class Block(nn.Module):
    """A module that computes `function` of two tensors, which it computes from its input and its parameters."""

    def __init__(self, function):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.a = nn.Parameter(torch.randn(SHAPE[1:], generator=generator))
        self.b = nn.Parameter(torch.randn(SHAPE[1:], generator=generator))

    def forward(self, x):
        return self.function(x + self.a, x.flip(1) - self.b)


def rows(x):
    """Return x as a matrix that does not share its memory."""
    return (x + 0.0).flatten(0, 1)


def square(x):
    return torch.bmm(x.transpose(1, 2), x) / 16


def _index(x):
    return torch.arange(x.numel()).view(x.shape).flip(0) % x.shape[1]


# Arguments in which gradients are linear. Positive divisors keep gradients small.
LINEAR = {
    "mul": lambda x, y: x * y,
    "one tensor times itself": lambda x, y: x * x,
    "power": lambda x, y: x**2,
    "mm": lambda x, y: rows(x).t() @ rows(y),
    "bmm": lambda x, y: torch.bmm(x, y.transpose(1, 2)),
    "einsum": lambda x, y: torch.einsum("nij,nkj->nik", x, y),
    "addmm": lambda x, y: torch.addmm(torch.zeros(24), rows(x).t(), rows(y)),
    "baddbmm": lambda x, y: torch.baddbmm(square(x), x.transpose(1, 2), y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "variance": lambda x, y: x.var(-1),
    "deviation": lambda x, y: x.std(-1),
    "exponential": lambda x, y: (0.3 * x - 3).exp(),
    "sigmoid": lambda x, y: torch.special.expit(x),
    "gates": lambda x, y: torch.special.expit(x) * y,
    "convolution": lambda x, y: torch.convolution(
        x, torch.ones(4, 16, 3) / 7 * y.mean(), None, [1], [1], [1], False, [0], 1
    ),
}
# Arguments of which packed masks, indices and sizes are as good as the tensors.
EXACT = {
    "relu": lambda x, y: torch.ops.aten.relu(x),
    "clamp": lambda x, y: x.clamp(-0.5, 1),
    "clamp from below": lambda x, y: x.clamp(min=0.25),
    "clamp with an infinite end": lambda x, y: x.clamp(0, math.inf),
    "clamp from above": lambda x, y: torch.clamp_max(x, 0.25),
    "factor of dropout": lambda x, y: x * ((_index(x) % 3 > 0) * 1.25),
    "where": lambda x, y: torch.where(x > y, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 2.0),
    "gather": lambda x, y: x.gather(1, _index(x)),
    "sort": lambda x, y: x.sort(-1).values,
    "topk": lambda x, y: x.topk(12, -1).values,
    "scatter_add": lambda x, y: torch.zeros(SHAPE).scatter_add(1, _index(x), x),
    "masked_select": lambda x, y: x.masked_select(x > 0),
    "index_add": lambda x, y: torch.zeros(SHAPE).index_add(0, torch.arange(SHAPE[0]).flip(0), x),
}
# Arguments of which gradients depend in another way.
KEPT = {
    "factor without gradient": lambda x, y: x * (_index(x) % 3) / 3,
    "divisor": lambda x, y: 1 / (2 + x.abs()),
    "logarithm": lambda x, y: (2 + x.abs()).log(),
    "root": lambda x, y: (2 + x.abs()).sqrt(),
    "cube": lambda x, y: x**3,
    "power with a tensor": lambda x, y: x.abs() ** (y.cos() + 2),
    "large exponentials": lambda x, y: (5 * x).exp(),
    "cosine": lambda x, y: x.cos(),
    "log-sum-exp": lambda x, y: torch.logsumexp(x, -1),
    "product": lambda x, y: x.prod(-1),
    "largest": lambda x, y: torch.maximum(x, y),
}


def inputs():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def gradients(model, x, seed=None):
    """Return the gradients of the parameters and of x."""
    if seed is not None:
        torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    weights = torch.Generator().manual_seed(2)
    y = model(x)
    loss = (y * torch.randn(y.shape, generator=weights)).sum()
    return torch.autograd.grad(loss, [*model.parameters(), x], allow_unused=True)


def compressed(model, bits=8, **layers):
    model = copy.deepcopy(model)
    # Functions that the mode replaces would save copies before `everything` could.
    settings = {"everything": True, "functional": False, "activation_bits": bits, **layers}
    fewbit.compress_(model, bits=bits, layers=settings, verbose=False)
    return model


def flat(grads):
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def saved(model, x):
    """Return {kind: bytes} of what a forward saves besides parameters and the input."""
    found = {}
    for entry in fewbit.saved_bytes(model, x).entries:
        if entry.kind not in ("parameter", "buffer", "input"):
            found[entry.kind] = found.get(entry.kind, 0) + entry.bytes
    return found


@pytest.mark.parametrize("name", LINEAR)
def test_arguments_in_which_gradients_are_linear(name):
    model, x = Block(LINEAR[name]), inputs()
    exact = gradients(model, x)
    found = gradients(compressed(model), x)
    error = (flat(found) - flat(exact)).norm() / flat(exact).norm()
    assert 0 < error < 0.02
    before, after = saved(model, x), saved(compressed(model, 2), x)
    assert "packed" in after and after.get("activation", 0) < 2000  # small results stay
    # A tensor that several nodes save has a copy for each.
    assert sum(after.values()) * 4 < sum(before.values())


@pytest.mark.parametrize("name", [name for name in LINEAR if name != "deviation"])
def test_their_gradients_are_exact_in_the_mean(name):
    """Uniform copies are unbiased for every tensor, so the mean over draws is the exact gradient."""
    model, x = Block(LINEAR[name]), inputs()
    few = compressed(model, 2, quantizer="uniform")
    # Gradients of parameters are sums over samples. The input's gradient is no sum, and its entries hardly vary if an
    # element is close to a level.
    exact = [grad for grad in gradients(model, x)[:-1] if grad is not None]
    seeds = iter(range(100, 1000))
    samples = drawn(
        lambda: [grad for grad in gradients(few, x, next(seeds))[:-1] if grad is not None], 60
    )
    for found, grad in zip(samples, exact, strict=True):
        # Entries of a gradient depend on each other, as they share samples.
        assert abs(pooled_z(found, grad, 1e-5, independent=24)) < 5


@pytest.mark.parametrize("name", EXACT)
def test_masks_indices_and_sizes(name):
    model, x = Block(EXACT[name]), inputs()
    exact, found = gradients(model, x), gradients(compressed(model, 2, functional=False), x)
    assert all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(exact, found, strict=True)
    )
    before = sum(saved(model, x).values())
    assert sum(saved(compressed(model, 2, functional=False), x).values()) <= before / 1.9


@pytest.mark.parametrize("name", KEPT)
def test_other_arguments_stay_exact(name):
    model, x = Block(KEPT[name]), inputs()
    exact, found = gradients(model, x), gradients(compressed(model, 1, functional=False), x)
    assert all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(exact, found, strict=True)
    )


def test_tanh_and_sigmoid_restore_their_derivatives():
    derivative = torch.linspace(0, 0.25, 101, dtype=torch.float64)
    s = rules.SIGMOID.inverse(derivative)
    torch.testing.assert_close(s * (1 - s), derivative, rtol=0, atol=1e-15)
    t = rules.TANH.inverse(4 * derivative)
    torch.testing.assert_close(1 - t * t, 4 * derivative, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    model, x = Block(LINEAR["gates"]).to(dtype), inputs().to(dtype)
    exact, found = gradients(model, x), gradients(compressed(model), x)
    assert all(grad.dtype == dtype for grad in found)
    error = (flat(found).double() - flat(exact).double()).norm() / flat(exact).double().norm()
    assert error < 0.03


def test_the_memory_is_freed():
    """The tensors themselves are gone when the forward pass is over, and the meter counts what is there."""
    alive = []

    def function(x, y):
        alive.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (x, y))
        return x * y

    model = compressed(Block(function), 2)
    result = model(inputs())
    assert all(reference.expired() for reference in alive)
    del result
    packed = 2 * 4 * 2 * 3072 // 32
    assert saved(model, inputs())["packed"] == packed


def test_a_tensor_that_is_needed_exactly_too_is_no_copy():
    """A copy would come on top of the tensor."""
    model = Block(lambda x, y: (x * x.detach().abs().add(1).log()).sum() + (3 + x).log().sum())
    both = Block(lambda x, y: (x * y).sum() + x.square().add(1).log().sum() + (x / x.abs()).sum())
    for each in (model, both):
        before, after = saved(each, inputs()), saved(compressed(each, 2), inputs())
        assert sum(after.values()) <= sum(before.values())


def test_parameters_and_small_tensors_stay():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return (x[:4] * x[4:8]).sum() + (self.w.t() @ self.w).sum()

    model = Small()
    few = compressed(model, 1, functional=False)
    for a, b in zip(
        gradients(model, torch.randn(8, 8)), gradients(few, torch.randn(8, 8)), strict=True
    ):
        assert a.shape == b.shape
    x = torch.randn(8, 8)
    assert all(map(torch.equal, gradients(model, x), gradients(few, x)))


def test_a_constant_of_many_layers_stays():
    """If all layers used one copy of a table, its error would be squared in the gradient of the first layer."""
    table = torch.randn(SHAPE)

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(lambda x, y: (x + y) * table) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Layers()
    few = compressed(model, 1, functional=False)
    assert all(map(torch.equal, gradients(model, inputs()), gradients(few, inputs())))


def test_overrides_exclude_and_restore():
    model, x = Block(LINEAR["bmm"]), inputs()
    exact = gradients(model, x)
    for settings in ({"overrides": {"": None}}, {"layers": {"functional": False}}):
        other = copy.deepcopy(model)
        fewbit.compress_(other, bits=2, verbose=False, **settings)
        assert all(map(torch.equal, gradients(other, x), exact))
    few = compressed(model, 2)
    assert not torch.equal(flat(gradients(few, x)), flat(exact))
    few.eval()
    assert all(map(torch.equal, gradients(few, x), exact))
    few.train()
    fewbit.restore_(few)
    assert all(map(torch.equal, gradients(few, x), exact))


@pytest.mark.parametrize(
    "settings", [{"exclude": "1"}, {"overrides": {"1": None}}, {"include": "0"}]
)
def test_a_layer_without_children_is_left_out(settings):
    """The weight's gradient shows whether the layer's input is exact."""
    model, x = nn.Sequential(Block(LINEAR["exponential"]), nn.Linear(24, 24)), inputs()
    exact = gradients(model, x)
    layers = {"everything": True}
    fewbit.compress_(model, bits=1, layers=layers, verbose=False, **settings)
    found = gradients(model, x)
    assert torch.equal(found[2], exact[2]) and not torch.equal(found[0], exact[0])
    fewbit.restore_(model)
    assert type(model[1]) is nn.Linear


def test_overrides_of_one_module():
    model = nn.Sequential(Block(LINEAR["mul"]), Block(LINEAR["mul"]))
    few = copy.deepcopy(model)
    fewbit.compress_(few, bits=2, overrides={"1": {"everything": True}}, verbose=False)
    paths = {e.module for e in fewbit.saved_bytes(few, inputs()).entries if e.kind == "packed"}
    assert paths == {"0", "1"}  # `mul` of computed tensors is among the functions that are replaced
    bare = nn.Sequential(Block(LINEAR["sigmoid"]), Block(LINEAR["sigmoid"]))
    fewbit.compress_(bare, bits=2, overrides={"1": {"everything": True}}, verbose=False)
    paths = {e.module for e in fewbit.saved_bytes(bare, inputs()).entries if e.kind == "packed"}
    assert paths == {"1"}


def test_copies_of_the_model():
    model, x = compressed(Block(torch.mul), 2), inputs()
    expected = gradients(model, x, seed=7)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, gradients(other, x, seed=7), expected))
    assert not torch.equal(flat(gradients(model, x, seed=8)), flat(expected))


def test_several_backward_passes_use_one_copy():
    model, x = compressed(Block(LINEAR["mul"]), 2), inputs().requires_grad_()
    y = model(x).sum()
    first = torch.autograd.grad(y, model.parameters(), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, model.parameters())))


def test_checkpointed_regions_stay_exact():
    inner = Block(LINEAR["exponential"])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Outer()
    few = compressed(model, 1)
    assert torch.equal(flat(gradients(few, inputs())), flat(gradients(model, inputs())))


class Child(nn.Module):
    """A module that adds a parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SHAPE[1:]))

    def forward(self, x):
        return x + self.w


class Parent(nn.Module):
    """A module that computes a product before it calls another module."""

    def __init__(self):
        super().__init__()
        self.a, self.child = nn.Parameter(torch.ones(SHAPE[1:])), Child()

    def forward(self, x):
        return self.child((x + self.a).cos() * (x - self.a))


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [
        ({"layers": {"everything": True, "functional": False}}, False),
        ({"layers": {"everything": True, "functional": False}, "exclude": "child"}, False),
        (
            {
                "layers": {"functional": False},
                "overrides": {"": None, "child": {"everything": True}},
            },
            True,
        ),
        (
            {"layers": {"functional": False}, "overrides": {"child": {"everything": True}}},
            True,
        ),
    ],
)
def test_a_module_has_its_own_settings_before_it_calls_another(settings, is_exact):
    model, x = Parent(), inputs()
    exact = gradients(model, x)
    fewbit.compress_(model, bits=1, verbose=False, **settings)
    assert torch.equal(flat(gradients(model, x)), flat(exact)) == is_exact


@pytest.mark.parametrize("name", ["sigmoid", "mul", "exponential"])
def test_second_derivatives_are_refused(name):
    model = compressed(Block(LINEAR[name]), functional=False)
    x = inputs().requires_grad_()
    with pytest.raises(GradientError):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_change_in_place_raises_as_in_torch():
    model = compressed(Block(lambda x, y: x.exp().add_(1)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(inputs()).sum().backward()


def test_a_tensor_of_many_nodes_is_not_saved_more_often_than_it_gains():
    def function(x, y):
        return sum(x * y[i % 8, i % 16, 0] for i in range(32))

    model = Block(function)
    before, after = saved(model, inputs()), saved(compressed(model), inputs())
    assert sum(after.values()) <= sum(before.values())


def test_one_dnn_is_on_again_after_lstms_in_two_threads():
    torch.manual_seed(0)
    models = [compressed(nn.LSTM(24, 32)) for _ in range(2)]

    def run(model, count):
        for _ in range(count):
            model(torch.randn(4, 16, 24))

    threads = [
        threading.Thread(target=run, args=arguments)
        for arguments in zip(models, (20, 27), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch._C._get_mkldnn_enabled()


def test_another_threads_graph_stays():
    """The nodes of the main thread have larger sequence numbers than those of the thread that runs the model."""
    waste = [torch.randn(3, requires_grad=True).exp() for _ in range(300)]
    stem, head = Block(LINEAR["exponential"]), compressed(Block(lambda x, y: x + y), 1)
    y, results = stem(inputs()), []
    thread = threading.Thread(target=lambda: results.append(head(y)))
    thread.start()
    thread.join()
    found = torch.autograd.grad(results[0].sum(), stem.a)[0]
    expected = torch.autograd.grad((stem(inputs()) + stem(inputs()).flip(1)).sum(), stem.a)[0]
    torch.testing.assert_close(found, expected)
    assert len(waste) == 300


def test_tensors_that_other_hooks_hold_stay():
    """The hooks of torch's save_on_cpu, and hooks that hold a tensor in place of the saved one."""
    model, x = Block(LINEAR["exponential"]), inputs()
    few, exact = compressed(model, 1), gradients(Block(LINEAR["exponential"]), inputs())
    same = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    for hooks in (same, torch.autograd.graph.save_on_cpu()):
        with hooks:
            assert torch.equal(flat(gradients(few, x)), flat(exact))


def test_the_graph_before_the_model_stays():
    """Nodes of another model that made the input are not touched."""
    other, x = Block(LINEAR["exponential"]), inputs()
    few = compressed(Block(lambda x, y: x + y), 1)
    exact = torch.autograd.grad(other(x).sum(), other.parameters(), allow_unused=True)
    found = torch.autograd.grad(few(other(x)).sum(), other.parameters(), allow_unused=True)
    double = torch.autograd.grad(
        (other(x) + other(x).flip(1)).sum(), other.parameters(), allow_unused=True
    )
    assert found[1] is None and exact[1] is None and double[1] is None
    torch.testing.assert_close(found[0], double[0])


class Recurrent(nn.Module):
    """A recurrent layer and a linear layer."""

    def __init__(self, cls, **kwargs):
        super().__init__()
        self.layer = cls(32, 64, 2, **{"batch_first": True} | kwargs)
        self.head = nn.Linear(64 * (1 + self.layer.bidirectional), 5)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize("cls", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_recurrent_layers(cls, dropout):
    torch.manual_seed(3)
    model, x = Recurrent(cls, dropout=dropout), torch.randn(32, 12, 32)
    exact = gradients(model, x, seed=4)
    found = gradients(compressed(model), x, seed=4)
    error = (flat(found) - flat(exact)).norm() / flat(exact).norm()
    assert 0 < error < 0.02
    before, after = saved(model, x), saved(compressed(model, 2), x)
    assert sum(after.values()) * 8 < sum(before.values())


SHORT = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "steps first": {"batch_first": False},
    "dropout": {"dropout": 0.25},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", SHORT.values(), ids=SHORT)
@pytest.mark.parametrize(("cls", "least"), [(nn.RNN, 5), (nn.GRU, 8), (nn.LSTM, 8)])
def test_small_tensors_of_steps_are_packed_together(cls, least, options):
    """Each step saves tensors of 3 x 64 elements, far fewer than a tensor needs for a copy of its own."""
    torch.manual_seed(3)
    model = Recurrent(cls, **{"batch_first": True} | options)
    x = torch.randn(3, 24, 32).transpose(0, 1 - model.layer.batch_first)
    exact = gradients(model, x, seed=4)
    for bits, most in ((2, 0.6), (4, 0.2), (8, 0.02)):
        found = gradients(compressed(model, bits), x, seed=4)
        assert 0 < (flat(found) - flat(exact)).norm() < most * flat(exact).norm()
    few = compressed(model, 2)
    assert sum(saved(few, x).values()) * least < sum(saved(model, x).values())
    storages = [entry for entry in fewbit.saved_bytes(few, x).entries if entry.kind == "packed"]
    assert len({entry.shape for entry in storages if entry.bytes}) < 20


@pytest.mark.parametrize("cls", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences(cls):
    torch.manual_seed(3)
    layer, x = cls(32, 64), torch.randn(20, 3, 32)

    def run(layer):
        sequence = nn.utils.rnn.pack_padded_sequence(x, [20, 11, 5])
        torch.manual_seed(4)
        y = layer(sequence)[0].data
        return torch.autograd.grad(y.square().sum(), [*layer.parameters()])

    exact, found = flat(run(layer)), flat(run(compressed(layer)))
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()


class Steps(nn.Module):
    """A loop over a cell, whose results go through a linear layer one by one."""

    def __init__(self, cell, size, **options):
        super().__init__()
        self.cell, self.head = cell(size, size, **options), nn.Linear(size, 4)

    def forward(self, x):
        state, results = None, []
        for step in x:
            state = self.cell(step, state)
            results.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(results)


CELLS = {
    "RNNCell": (nn.RNNCell, {}),
    "RNNCell relu": (nn.RNNCell, {"nonlinearity": "relu"}),
    "GRUCell": (nn.GRUCell, {}),
    "LSTMCell": (nn.LSTMCell, {"bias": False}),
}


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("size, batch", [(16, 2), (64, 4), (128, 8)])
@pytest.mark.parametrize(("cell", "options"), CELLS.values(), ids=CELLS)
def test_a_loop_over_a_cell_saves_less_than_exact(cell, options, size, batch, everything):
    """The linear layer copies each state, which the cell would keep in full if it were not compressed."""
    torch.manual_seed(3)
    model, x = Steps(cell, size, **options), torch.randn(8, batch, size)
    few = copy.deepcopy(model)
    report = fewbit.compress_(few, 2, layers={"everything": everything}, verbose=False).report
    assert sum(saved(few, x).values()) < 0.8 * sum(saved(model, x).values())
    ((path, reason),) = [(row.path, row.reason) for row in report.left_alone if row.path]
    assert path == "cell" and reason.endswith("what its operations save is compressed")
    exact = flat(gradients(model, x))
    fewbit.compress_(few, 8, layers={"everything": everything}, verbose=False)
    assert 0 < (flat(gradients(few, x, seed=4)) - exact).norm() < 0.02 * exact.norm()


def test_an_excluded_cell_stays_exact():
    torch.manual_seed(3)
    model, x = Steps(nn.GRUCell, 64), torch.randn(8, 4, 64)
    few = copy.deepcopy(model)
    fewbit.compress_(few, 2, exclude=["cell", "head"], verbose=False)
    assert all(map(torch.equal, gradients(few, x), gradients(model, x)))


@pytest.mark.slow
def test_a_pack_is_freed_when_all_its_tensors_were_needed():
    """The tensors of one pack are restored once for each backward pass, and not kept afterwards."""
    model, x = compressed(nn.GRU(32, 64)), torch.randn(20, 3, 32)
    y = model(x)[0].square().sum()
    first, second = (
        torch.autograd.grad(y, [*model.parameters()], retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    found = [one for one in gc.get_objects() if type(one) is packs.PackedCopy]
    assert found and all(one._values is None for one in found)


@pytest.mark.parametrize("changed", ["x", "y"])
def test_a_packed_tensor_that_is_changed_in_place_raises_as_in_torch(changed):
    """A tensor that waits in a pack may still be changed before the forward pass ends."""

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(Block(lambda x, y: x[0] * y[0]) for _ in range(8))

        def forward(self, x):
            results = [block(x) for block in self.inner]
            if changed == "y":
                return sum(y.sigmoid_() for y in results)
            z = torch.special.expit(results[0] * 2)
            total = sum(results) * z
            z.add_(1.0)
            return total

    model = Changing()
    few = compressed(model, 8, functional=False)
    if changed == "y":
        assert len(gradients(few, inputs())) == len(gradients(model, inputs()))
        return
    for each in (model, few):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(each, inputs())


def test_factors_that_are_repeated_stay_exact():
    """An error of a row's deviation would be one of the whole row."""

    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(24))

        def forward(self, x):
            for _ in range(12):
                x = x * (x * self.scale).square().mean(-1, keepdim=True).add(1).rsqrt()
            return x

    few = compressed(Norms(), 2, functional=False)
    entries = fewbit.saved_bytes(few, inputs()).entries
    assert [entry.kind for entry in entries if entry.shape == (8, 16, 1)].count("activation") >= 12


def test_the_report_says_with_how_many_bits_an_lstm_saves():
    controller = fewbit.compress_(Recurrent(nn.LSTM), 2, layers={"everything": True}, verbose=False)
    bits = {row.path: row.bits for row in controller.report.converted}
    assert bits == {"layer": 2, "head": 2}


class Einsum(nn.Module):
    """A module that calls einsum."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 24))

    def forward(self, x):
        return torch.einsum("nij,jk->nik", x, self.w)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            Einsum(),
            "no few-bit version; what its operations save is compressed",
        ),
        (nn.GRU(24, 24), "no few-bit version; on the CPU, what its operations save is compressed"),
    ],
)
def test_the_report_says_what_happens_to_a_module_without_few_bit_version(module, reason):
    model = nn.Sequential(module)
    report = fewbit.compress_(model, layers={"everything": True}, verbose=False).report
    assert [(row.path, row.reason) for row in report.left_alone] == [("0", reason)]
    off = fewbit.compress_(model, layers={"functional": False}, verbose=False).report
    assert "compressed" not in off.left_alone[0].reason


@pytest.mark.parametrize(
    ("min_dtype", "near", "far"), [("bfloat16", 2, 2), ("float32", 3, 3), ("auto", 2, 3)]
)
@pytest.mark.parametrize("quantizer", ["rotated", "uniform"])
def test_min_dtype(min_dtype, near, far, quantizer):
    """Ranges have a third column if minimums or means are float32. With "auto", tensors far from 0 get float32."""
    for shift, columns in ((0, near), (1000, far)):
        model = Block(lambda x, y, shift=shift: (x + shift) * (y + shift))
        few = compressed(model, 2, min_dtype=min_dtype, quantizer=quantizer, functional=False)
        ranges = [e for e in fewbit.saved_bytes(few, inputs()).entries if e.kind == "range"]
        assert {entry.shape[1] for entry in ranges} == {columns}


def test_a_masked_input_is_no_division():
    """The rule for masks does not apply to numbers: a float in place of a mask stays exact."""
    assert rules.MASK.compress(torch.ones(4), None) is None
    assert math.isnan(rules.Inside(0.0, None).compress(torch.ones(40), None).spec.zero)


class View:
    """A stand-in for an autograd node of a view, which counts how often the way to its leaf is followed."""

    visits = 0

    def __init__(self, before):
        self.before, self.metadata = before, {}

    def name(self):
        return "ViewBackward0"

    @property
    def next_functions(self):
        View.visits += 1
        return ((self.before, 0),)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_chain_of_views_is_followed_once(is_leaf):
    x = torch.randn(3, requires_grad=True)
    node = x.view(3).grad_fn.next_functions[0][0] if is_leaf else x.exp().grad_fn
    chain = []
    for _ in range(1000):
        node = View(node)
        chain.append(node)
    View.visits = 0
    assert all(autograd_graph._leads_to_leaf(each) == is_leaf for each in chain)
    assert View.visits <= 4 * len(chain)


class Attention(nn.Module):
    """Attention that multiplies a view of the softmax's result, by torch.bmm or by einsum."""

    def __init__(self, product, is_view):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.product, self.is_view = product, is_view

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        p = torch.softmax(scores.view(4, 2, 32, 32), -1)
        return self.product((p if self.is_view else p + 0).flatten(0, 1), self.v(x))


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_a_product_uses_the_copy_of_softmax(everything):
    product = (lambda p, v: torch.einsum("nqk,nkd->nqd", p, v)) if everything else torch.bmm
    torch.manual_seed(5)
    model, x = Attention(product, False), torch.randn(8, 32, 16)
    few = compressed(model, 4, everything=everything, functional=True)
    few.is_view = True
    alone = compressed(model, 4, everything=everything, functional=True)
    before, after = (saved(each, x)["packed"] for each in (alone, few))
    assert before - after == 8 * 32 * 32 * 4 // 8
    names = [name for name, _ in model.named_parameters()]
    places, seeds = [names.index("q.weight"), names.index("v.weight")], iter(range(100, 1000))
    exact = gradients(model, x)

    def draw():
        grads = gradients(few, x, next(seeds))
        return [grads[place] for place in places]

    for place, samples in zip(places, drawn(draw, 60), strict=True):
        assert abs(pooled_z(samples, exact[place], 1e-5, independent=16)) < 5
