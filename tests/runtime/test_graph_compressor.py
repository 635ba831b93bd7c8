"""Compression of what torch's own operations save (`everything`): gradients against torch's, and saved bytes."""

import copy
import gc
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from composed import Composed
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
        x, y[:4, :, :3] / 7, None, [1], [1], [1], False, [0], 1
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


def equal(found, exact):
    """Return whether gradients are equal to the bit; None stands for no gradient."""
    pairs = zip(found, exact, strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


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
    few = compressed(model, 2)
    assert equal(gradients(few, x), gradients(model, x))
    assert sum(saved(few, x).values()) <= sum(saved(model, x).values()) / 1.9


@pytest.mark.parametrize("name", KEPT)
def test_other_arguments_stay_exact(name):
    model, x = Block(KEPT[name]), inputs()
    assert equal(gradients(compressed(model, 1), x), gradients(model, x))


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
    def forward(model, x):
        return (x[:4] * x[4:8]).sum() + (model.w.t() @ model.w).sum()

    model, x = Composed(forward, w=nn.Parameter(torch.randn(64, 64))), torch.randn(8, 8)
    assert equal(gradients(compressed(model, 1), x), gradients(model, x))


def test_a_constant_of_many_layers_stays():
    """If all layers used one copy of a table, its error would be squared in the gradient of the first layer."""
    table = torch.randn(SHAPE)
    model = nn.Sequential(*(Block(lambda x, y: (x + y) * table) for _ in range(3)))
    assert equal(gradients(compressed(model, 1), inputs()), gradients(model, inputs()))


def test_overrides_exclude_and_restore():
    model, x = Block(LINEAR["bmm"]), inputs()
    exact = gradients(model, x)
    for settings in ({"overrides": {"": None}}, {"layers": {"functional": False}}):
        other = copy.deepcopy(model)
        fewbit.compress_(other, bits=2, verbose=False, **settings)
        assert equal(gradients(other, x), exact)
    few = compressed(model, 2)
    assert not equal(gradients(few, x), exact)
    few.eval()
    assert equal(gradients(few, x), exact)
    few.train()
    fewbit.restore_(few)
    assert equal(gradients(few, x), exact)


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


def test_copies_of_the_model():
    model, x = compressed(Block(torch.mul), 2), inputs()
    expected = gradients(model, x, seed=7)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(gradients(other, x, seed=7), expected)
    assert not torch.equal(flat(gradients(model, x, seed=8)), flat(expected))


def test_several_backward_passes_use_one_copy():
    model, x = compressed(Block(LINEAR["mul"]), 2), inputs().requires_grad_()
    y = model(x).sum()
    first = torch.autograd.grad(y, model.parameters(), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, model.parameters())))


def test_checkpointed_regions_stay_exact():
    def forward(model, x):
        return checkpoint(model.inner, x, use_reentrant=False)

    model = Composed(forward, inner=Block(LINEAR["exponential"]))
    assert equal(gradients(compressed(model, 1), inputs()), gradients(model, inputs()))


EVERYTHING = {"everything": True, "functional": False}
OWN_SETTINGS = {  # {which modules: (settings, whether the module stays exact)}
    "all": ({"layers": EVERYTHING}, False),
    "without the other": ({"layers": EVERYTHING, "exclude": "child"}, False),
    "the other": ({"layers": {"functional": False}, "overrides": {"child": {"everything": True}}}, True),
    "not the first": (
        {"layers": {"functional": False}, "overrides": {"": None, "child": {"everything": True}}}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", OWN_SETTINGS)
def test_a_module_has_its_own_settings_before_it_calls_another(which):
    def forward(model, x):
        return model.child((x + model.a).cos() * (x - model.a))

    child = Composed(lambda model, x: x + model.w, w=nn.Parameter(torch.zeros(SHAPE[1:])))
    model = Composed(forward, a=nn.Parameter(torch.ones(SHAPE[1:])), child=child)
    settings, is_exact = OWN_SETTINGS[which]
    exact = gradients(model, inputs())
    fewbit.compress_(model, bits=1, verbose=False, **settings)
    assert equal(gradients(model, inputs()), exact) == is_exact


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

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, models, (20, 27)))
    assert torch._C._get_mkldnn_enabled()


def test_tensors_that_other_hooks_hold_stay():
    """The hooks of torch's save_on_cpu, and hooks that hold a tensor in place of the saved one."""
    model, x = Block(LINEAR["exponential"]), inputs()
    few, exact = compressed(model, 1), gradients(Block(LINEAR["exponential"]), inputs())
    same = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    for hooks in (same, torch.autograd.graph.save_on_cpu()):
        with hooks:
            assert equal(gradients(few, x), exact)


@pytest.mark.parametrize("is_thread", [False, True])
def test_the_graph_before_the_model_stays(is_thread):
    """Its nodes have larger sequence numbers than those of another thread that runs the model."""
    waste = [torch.randn(3, requires_grad=True).exp() for _ in range(300)]
    stem, head = Block(LINEAR["exponential"]), compressed(Block(lambda x, y: x + y), 1)
    y = stem(inputs())
    with ThreadPoolExecutor() as pool:
        result = pool.submit(head, y).result() if is_thread else head(y)
    found = torch.autograd.grad(result.sum(), stem.a)[0]
    expected = torch.autograd.grad((stem(inputs()) + stem(inputs()).flip(1)).sum(), stem.a)[0]
    torch.testing.assert_close(found, expected)
    assert len(waste) == 300


class Recurrent(nn.Module):
    """A recurrent layer and a linear layer."""

    def __init__(self, cls, **kwargs):
        super().__init__()
        self.layer = cls(32, 64, 2, **{"batch_first": True} | kwargs)
        self.head = nn.Linear(64 * (1 + self.layer.bidirectional), 5)

    def forward(self, x):
        return self.head(self.layer(x)[0])


SHORT = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "steps first": {"batch_first": False},
    "dropout": {"dropout": 0.25},
}


@pytest.mark.fast(4)
@pytest.mark.parametrize("options", SHORT.values(), ids=SHORT)
@pytest.mark.parametrize(("cls", "least"), [(nn.RNN, 5), (nn.GRU, 8), (nn.LSTM, 8)])
def test_small_tensors_of_steps_are_packed_together(cls, least, options):
    """Each step saves tensors of 3 x 64 elements, far fewer than a tensor needs for a copy of its own."""
    torch.manual_seed(3)
    model = Recurrent(cls, **{"batch_first": True} | options)
    x = torch.randn(3, 12, 32).transpose(0, 1 - model.layer.batch_first)
    exact = gradients(model, x, seed=4)
    for bits, most in ((2, 0.6), (8, 0.02)):
        found = gradients(compressed(model, bits), x, seed=4)
        assert 0 < (flat(found) - flat(exact)).norm() < most * flat(exact).norm()
    few = compressed(model, 2)
    assert sum(saved(few, x).values()) * least < sum(saved(model, x).values())
    storages = [entry for entry in fewbit.saved_bytes(few, x).entries if entry.kind == "packed"]
    assert len({entry.shape for entry in storages if entry.bytes}) < 20


def test_packed_sequences():
    torch.manual_seed(3)
    layer, x = nn.LSTM(32, 64), torch.randn(20, 3, 32)

    def run(layer, x):
        sequence = nn.utils.rnn.pack_padded_sequence(x, [20, 11, 5])
        return layer(sequence)[0].data

    few = compressed(layer)
    exact, found = (
        flat(gradients(Composed(lambda model, x: run(model.layer, x), layer=each), x))
        for each in (layer, few)
    )
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

    def forward(model, x):
        results = [block(x) for block in model.inner]
        if changed == "y":
            return sum(y.sigmoid_() for y in results)
        z = torch.special.expit(results[0] * 2)
        total = sum(results) * z
        z.add_(1.0)
        return total

    model = Composed(
        forward, inner=nn.ModuleList(Block(lambda x, y: x[0] * y[0]) for _ in range(8))
    )
    few = compressed(model, 8)
    if changed == "y":
        assert len(gradients(few, inputs())) == len(gradients(model, inputs()))
        return
    for each in (model, few):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(each, inputs())


def test_factors_that_are_repeated_stay_exact():
    """An error of a row's deviation would be one of the whole row."""

    def forward(model, x):
        for _ in range(12):
            x = x * (x * model.scale).square().mean(-1, keepdim=True).add(1).rsqrt()
        return x

    few = compressed(Composed(forward, scale=nn.Parameter(torch.ones(24))), 2)
    entries = fewbit.saved_bytes(few, inputs()).entries
    assert [entry.kind for entry in entries if entry.shape == (8, 16, 1)].count("activation") >= 12


@pytest.mark.parametrize(
    ("module", "where"),
    [
        (Composed(lambda model, x: x @ model.w, w=nn.Parameter(torch.randn(24, 24))), ""),
        (nn.GRU(24, 24), "on the CPU, "),
    ],
    ids=["product", "GRU"],
)
def test_the_report_says_what_happens_to_a_module_without_few_bit_version(module, where):
    reason = f"no few-bit version; {where}what its operations save is compressed"
    model = nn.Sequential(module)
    report = fewbit.compress_(model, layers={"everything": True}, verbose=False).report
    assert [(row.path, row.reason) for row in report.left_alone] == [("0", reason)]
    off = fewbit.compress_(model, layers={"functional": False}, verbose=False).report
    assert "compressed" not in off.left_alone[0].reason


def test_a_masked_input_is_no_division():
    """The rule for masks does not apply to numbers: a float in place of a mask stays exact."""
    assert rules.MASK.compress(torch.ones(4), None, None) is None
    copy = rules.inside_rule(0.0, None).compress(-torch.ones(40), None, None)
    assert copy.spec.dequantize(copy.tensors).isnan().all()


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


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_a_product_uses_the_copy_of_softmax(everything):
    """Attention multiplies a view of the softmax's result, by torch.bmm or by einsum."""
    product = (lambda p, v: torch.einsum("nqk,nkd->nqd", p, v)) if everything else torch.bmm

    def forward(model, x):
        scores = model.q(x) @ model.k(x).transpose(1, 2)
        p = torch.softmax(scores.view(4, 2, 32, 32), -1)
        return product((p if model.is_view else p + 0).flatten(0, 1), model.v(x))

    torch.manual_seed(5)
    layers = {name: nn.Linear(16, 16) for name in "qkv"}
    model, x = Composed(forward, is_view=False, **layers), torch.randn(8, 32, 16)
    few = compressed(model, 4, everything=everything, functional=True)
    few.is_view = True
    alone = compressed(model, 4, everything=everything, functional=True)
    before, after = (saved(each, x)["packed"] for each in (alone, few))
    # A product without a shared copy keeps each of its inputs with the average bits of attention, 2 more.
    assert before - after == 8 * 32 * 32 * 6 // 8
    names = [name for name, _ in model.named_parameters()]
    places, seeds = [names.index("q.weight"), names.index("v.weight")], iter(range(100, 1000))
    exact = gradients(model, x)

    def draw():
        grads = gradients(few, x, next(seeds))
        return [grads[place] for place in places]

    for place, samples in zip(places, drawn(draw, 60), strict=True):
        assert abs(pooled_z(samples, exact[place], 1e-5, independent=16)) < 5
