"""Masked copies: layers after a ReLU leave its zeros out of their copies, and restore them from the ReLU's own codes."""

import contextlib
import copy
from functools import partial

import numpy as np
import pytest
import torch
from composed import Composed
from expectation import drawn, pooled_z
from layers import bytes_by, relative, saved_by
from quantized import quantized_bytes
from samples import normal
from torch import nn
from torch.nn import functional as torch_f
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.ops import activation_ops
from fewbit.runtime.ops.activation_ops import is_masking
from fewbit.runtime.quantizers.copies import Kept
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import QuantizationRecord
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.sharing import SharedCopies


class Layers(nn.Module):
    """A ReLU, a function of its result, and layers that save the function's result; `nodes` have what they saved last."""

    def __init__(self, *layers, relu=torch_f.relu, between=None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.relu, self.between = relu, between

    def forward(self, x):
        y = self.relu(x)
        y = self.between(y, x) if self.between else y
        self.inputs, results = [], []
        for layer in self.layers:
            self.inputs.append(y.detach().clone())
            results.append(layer(y))
        # Before torch 2.13, a node whose result is gone has no saved tensors.
        self.results, self.nodes = results, [result.grad_fn for result in results]
        return tuple(results)


RELUS = {
    "module": nn.ReLU(),
    "module in place": nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)),
    "F.relu": torch_f.relu,
    "F.relu in place": lambda x: torch_f.relu(x, inplace=True),
    "torch.relu": torch.relu,
    "method": lambda x: x.relu(),
}


def compressed(model, bits=2, **options):
    fewbit.compress_(model, bits, verbose=False, **options)
    return model


def run(model, x):
    """Run the model, whose input is a tensor with a gradient that may be overwritten. Return its results."""
    return model(x.clone().requires_grad_() * 1.0)


def is_masked(node) -> bool:
    spec, _ = Kept(node).copy("x")
    return getattr(spec, "inner", spec).has_mask


def restored(node, dtype=torch.float32):
    """Return the values that the backward of a linear layer or a convolution dequantizes."""
    return Kept(node).values("x", dtype)


def check(model, limit, expected=True, dtype=torch.float32):
    """Check whether all layers have masked copies, with zeros where the ReLU's results have them and nowhere else."""
    for node, x in zip(model.nodes, model.inputs, strict=True):
        values = restored(node, dtype)
        assert is_masked(node) == expected
        assert values.shape == x.shape
        assert relative(values, x) < limit
        assert not expected or not values[x == 0].any()


def data(shape, dtype=torch.float32):
    """Return normal numbers with zeros of both signs and tiny numbers among them."""
    x = normal(shape, dtype, scale=1.0)
    flat = x.view(-1)
    flat[::7], flat[3::11], flat[5::23] = 0.0, -0.0, torch.finfo(dtype).tiny
    return x


# -- which layers have masked copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relu", RELUS)
def test_zeros_are_exact(relu, dtype):
    """In the first forward the layer makes its copy. In later ones the ReLU makes it, unless it works in place."""
    model = Layers(nn.Linear(300, 4), relu=copy.deepcopy(RELUS[relu]))
    compressed(model.to(dtype), 4)
    for _ in range(2):
        run(model, data((6, 300), dtype))
        check(model, 0.1, dtype=dtype)


LAST = torch.channels_last
ORDERS = {  # {how a ReLU's input lies in memory: (shape, view of a tensor of this shape, whether there is a mask)}
    "contiguous": ((4, 6, 8, 5), lambda x: x, True),
    "channels last": ((4, 6, 8, 5), lambda x: x.contiguous(memory_format=LAST), True),
    "one pixel": ((4, 6, 1, 1), lambda x: x.contiguous(memory_format=LAST), True),
    "one sample": ((1, 6, 8, 5), lambda x: x.contiguous(memory_format=LAST), True),
    "samples not outermost": ((6, 4, 8, 5), lambda x: x.permute(1, 0, 2, 3), True),
    "reversed": ((5, 8, 6, 4), lambda x: x.permute(3, 2, 1, 0), True),
    "rows": ((9, 6, 8, 5), lambda x: x[2:6], True),
    "columns": ((4, 6, 8, 9), lambda x: x[..., 2:7], False),
    "every second row": ((8, 6, 8, 5), lambda x: x[::2], False),
    "columns, transposed": ((4, 6, 9, 8), lambda x: x[..., 2:7, :].mT, False),
    "expanded": ((1, 6, 1, 5), lambda x: x.expand(4, 6, 8, 5), False),
}


@pytest.mark.parametrize("is_in_place", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_the_mask_is_that_of_the_copy(order, is_in_place):
    """The codes are in the order of the input's memory, if the input is dense. Otherwise there is no mask."""
    shape, view, expected = ORDERS[order]
    if order == "expanded" and is_in_place:
        pytest.skip("elements that share memory must not be overwritten")
    x = view(data(shape))
    layers = nn.Conv2d(x.shape[1], 3, 1), nn.Linear(x.shape[-1], 3)
    model = Layers(*layers, relu=lambda x: torch_f.relu(view(x), inplace=is_in_place))
    compressed(model, 8, overrides={"layers.1": 6})
    for _ in range(2):
        run(model, data(shape))
        check(model, 0.05, expected)


VIEWS = {  # {what is between a ReLU and a layer: (function of the result of shape (8, 4, 64), whether there is a mask)}
    "view": (lambda y, x: y.view(4, 8, 64), True),
    "flatten": (lambda y, x: y.flatten(1), True),
    "reshape": (lambda y, x: y.reshape(-1, 32), True),
    "unflatten": (lambda y, x: y.unflatten(2, (2, 32)), True),
    "short samples": (lambda y, x: y.reshape(-1, 8), True),
    "one row": (lambda y, x: y.view(-1), True),
    "transpose": (lambda y, x: y.transpose(0, 1), True),
    "unsqueeze": (lambda y, x: y.unsqueeze(0), True),
    "detach": (lambda y, x: y.detach(), True),
    "a reshape that copies": (lambda y, x: y.transpose(0, 1).reshape(4, 512), False),
    "clone": (lambda y, x: y.clone(), False),
    "a part": (lambda y, x: y[1:], False),
    "all but the last row": (lambda y, x: y[:-1], False),
    "sum": (lambda y, x: y + x, False),
    "sum in place": (lambda y, x: y.add_(x), False),
    "shift in place": (lambda y, x: y.sub_(0.25), False),
    "shift of a view": (lambda y, x: (y.view(-1).sub_(0.25), y)[1], False),
    "dropout": (lambda y, x: torch_f.dropout(y, 0.5), False),
    "pooling": (lambda y, x: torch_f.max_pool1d(y, 2), False),
}


@pytest.mark.parametrize("is_in_place", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("between", VIEWS)
def test_between_the_relu_and_the_layer(between, is_in_place):
    function, expected = VIEWS[between]
    relu = partial(torch_f.relu, inplace=is_in_place)
    width = function(data((8, 4, 64)), data((8, 4, 64))).shape[-1]
    model = compressed(Layers(nn.Linear(width, 3), relu=relu, between=function), 4)
    for _ in range(2):
        run(model, data((8, 4, 64)))
        check(model, 0.12 if expected else 0.25, expected)


def data_(y, x):
    y.data.sub_(0.5)
    return y


def numpy_(y, x):
    array = y.detach().numpy()
    array -= 0.5
    return y


def roll_(y, x):
    y.data.copy_(y.data.roll(1, 0))
    return y


@pytest.mark.parametrize("write", [data_, numpy_, roll_], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_in_place", [False, True], ids=["", "in place"])
def test_a_write_that_autograd_does_not_see(write, is_in_place):
    """The mode that replaces functions sees it."""
    model = Layers(nn.Linear(64, 3), relu=nn.ReLU(inplace=is_in_place), between=write)
    compressed(model, 8, layers={"functional": True})
    for _ in range(2):
        run(model, data((8, 64)))
        check(model, 0.05, False)


# -- the gradients -------------------------------------------------------------------------------------------


def weight_gradients(kind, bits, x, grad, draws):
    """Return draws of the gradient of a layer's weight, stacked, and the exact gradient."""
    layer = nn.Linear(x.shape[1], grad.shape[1])
    model = compressed(Layers(layer), bits, layers={"quantizer": kind})
    torch.manual_seed(0)
    (found,) = drawn(lambda: list(torch.autograd.grad(run(model, x), [layer.weight], grad)), draws)
    return found, grad.t().double() @ x.relu().double()


@pytest.mark.parametrize("shape", [(8, 200), (30, 48)], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_gradients_are_exact_in_expectation(bits, shape):
    """Also for groups that cross samples, and for an element that has much of the energy."""
    x = data(shape)
    x[3, 5] = 12.0
    found, exact = weight_gradients("rotated", bits, x, normal((shape[0], 3), seed=1), 150)
    # A gradient's entries have only as many independent errors as there are groups, times the rank.
    assert abs(pooled_z(found.flatten(1), exact.flatten(), 1e-6)) < 5
    assert not found[:, :, (x <= 0).all(0)].any()


@pytest.mark.parametrize(("bits", "factor"), [(1, 12.0), (2, 5.0), (4, 2.0)])
def test_the_error_beside_that_of_a_uniform_copy(bits, factor):
    """The mean squared error is many times smaller."""
    x, grad, errors = normal((64, 512), scale=1.0), normal((64, 3), seed=1), []
    for kind in ("rotated", "uniform"):
        found, exact = weight_gradients(kind, bits, x, grad, 8)
        errors.append(float((found - exact).square().sum()))
    assert errors[0] * factor < errors[1]


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 300), (8, 4, 40), (30, 7)], ids=str)
def test_the_mask_takes_no_bytes(shape):
    x = data(shape)
    model = compressed(Layers(nn.Linear(shape[-1], 3), between=lambda y, x: y.flatten(0, -2)))
    codes = 4 * (-(-x.numel() // 32))
    copied = quantized_bytes(x.flatten(0, -2).shape, 2, kind="rotated")
    x.requires_grad_()
    for _ in range(2):
        assert bytes_by(model, x) == codes + copied
        assert fewbit.saved_bytes(model, x).total == codes + copied


def test_consumers_share_copies_and_the_mask():
    x = data((8, 300)).requires_grad_()
    model = Layers(*(nn.Linear(300, 3) for _ in range(4)))
    compressed(model, 2, overrides={"layers.2": 4, "layers.3": {"quantizer": "uniform"}})
    sizes = [quantized_bytes(x.shape, bits, kind="rotated") for bits in (2, 4)]
    uniform = quantized_bytes(x.shape, 2, kind="uniform")
    for _ in range(2):
        assert bytes_by(model, x) == 4 * 75 + sum(sizes) + uniform
        model(x)
        assert [is_masked(node) for node in model.nodes] == [True, True, True, False]
        for node, exact in zip(model.nodes[:3], model.inputs, strict=False):
            assert not restored(node)[exact == 0].any()
        masks = [node.saved_tensors[-1].data_ptr() for node in model.nodes[:3]]
        assert len(set(masks)) == 1


def test_an_offload_does_not_leave_masks_on_the_device(monkeypatch):
    """While tensors move to the host, the masks of results that no longer exist are dropped."""
    monkeypatch.setattr(offload.running, "entered", [(None, None)])
    copies = SharedCopies()
    results = [data((8, 64)).relu() for _ in range(3)]
    for y in results:
        copies.put_mask(y, torch.zeros(16, dtype=torch.int32), 0)
    assert all(copies.get_mask(y) is not None for y in results)
    kept, more = results[1], torch.ones(5)
    del results, y
    copies.put_mask(more, torch.zeros(1, dtype=torch.int32), 0)
    assert len(copies.masks) == 2
    assert copies.get_mask(kept) is not None
    assert copies.get_mask(more) is not None


# -- tables and dtypes without masks -------------------------------------------------------------------------

STEP = Encoding(1, np.array([0.0, 1.0]), np.zeros(1), np.array([0, 1]), ("right",))
OTHERS = {
    "one level": Encoding(1, np.array([1.0]), np.zeros(0), np.array([0]), ()),
    "0 belongs to the right": Encoding(1, STEP.levels, STEP.breaks, STEP.codes, ("left",)),
    "another break": Encoding(1, STEP.levels, np.array([0.5]), STEP.codes, ("right",)),
    "other levels": Encoding(1, np.array([0.1, 0.9]), STEP.breaks, STEP.codes, ("right",)),
    "falling": Encoding(1, STEP.levels, STEP.breaks, np.array([1, 0]), ("right",)),
    "a code of 1 stands for 0": Encoding(
        1, np.array([1.0, 0.0]), STEP.breaks, np.array([1, 0]), ("right",)
    ),
}


def test_only_a_step_at_zero_is_a_mask():
    assert STEP.is_step_at_zero
    assert not any(other.is_step_at_zero for other in OTHERS.values())
    for text in ("relu", "leaky_relu"):
        assert is_masking(text, STEP, torch.float32) == (text == "relu")


USES = {  # {what makes the mask or uses it: (a ReLU, settings of layers, dtype, whether there is a mask)}
    "table of 3 bits": (lambda: fewbit.ReLU(bits=3), {}, torch.float32, True),
    "table of one level": (lambda: _with_table(domain=(1, 10)), {}, torch.float32, False),
    "unbiased table": (lambda: _with_table(objective="unbiased"), {}, torch.float32, False),
    # torch's own functions, which save their results and no codes
    "torch.relu_": (lambda: torch.relu_, {}, torch.float32, False),
    "method in place": (lambda: torch.Tensor.relu_, {}, torch.float32, False),
    "relu6": (lambda: torch_f.relu6, {}, torch.float32, False),
    "leaky_relu": (lambda: torch_f.leaky_relu, {}, torch.float32, False),
    # Positive numbers that are 0 in float32 would be left out, but not restored as 0.
    "float64": (lambda: torch_f.relu, {}, torch.float64, False),
    "uniform copies": (lambda: torch_f.relu, {"quantizer": "uniform"}, torch.float32, False),
    "groups too large for rotations": (
        lambda: torch_f.relu,
        {"group_size": 512},
        torch.float32,
        False,
    ),
}


def _with_table(**settings):
    return fewbit.ReLU(table=fewbit.solve("relu", bits=1, **settings))


@pytest.mark.parametrize("name", USES)
def test_which_tables_copies_and_dtypes_have_masks(name):
    make, settings, dtype, expected = USES[name]
    model = compressed(Layers(nn.Linear(64, 3), relu=make()).to(dtype), 4, layers=settings)
    for _ in range(2):
        run(model, data((8, 64), dtype))
        check(model, 0.2, expected, dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_nan(value):
    model = compressed(Layers(nn.Linear(64, 3)))
    for _ in range(2):
        x = data((8, 64))
        x[2, 5] = value
        run(model, x)
        assert is_masked(model.nodes[0])
        values = restored(model.nodes[0])
        assert values[2, 5].isnan() and values[[0, 1, *range(3, 8)]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 64), (8, 0, 64), (8, 64)], ids=str)
def test_no_elements_or_none_that_is_positive(shape):
    model = compressed(Layers(nn.Linear(64, 3)))
    for _ in range(2):
        (y,) = run(model, -data(shape).abs())
        values = restored(model.nodes[0])
        assert values.shape == shape and not values.any()
        y.sum().backward()


# -- modes ---------------------------------------------------------------------------------------------------


def test_autocast():
    model = compressed(Layers(nn.Linear(300, 3), relu=nn.Sequential(nn.Linear(8, 300), nn.ReLU())))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            (y,) = run(model, data((6, 8)))
        assert model.inputs[0].dtype == torch.bfloat16
        check(model, 0.3, dtype=torch.bfloat16)
        y.float().square().sum().backward()


def checkpointed(reentrant, region):
    """Return a model of a ReLU between linear layers, of which some are in a checkpointed region."""

    def forward(model, x):
        run = partial(checkpoint, use_reentrant=reentrant)
        if region == "both":
            return run(lambda x: model.after(model.before(x).relu()), x)
        if region == "layer":
            return run(model.after, model.before(x).relu())
        if region == "relu":
            return model.after(run(lambda x: model.before(x).relu(), x))
        return model.after(model.before(x).relu())

    torch.manual_seed(0)
    return Composed(forward, before=nn.Linear(64, 300), after=nn.Linear(300, 3))


def check_gradients(model, exact, x):
    for tested in (model, exact):
        tested.zero_grad()
        tested(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < 0.02


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("region", ["both", "layer", "relu"])
def test_checkpoints(reentrant, region):
    """The gradients are about those without a checkpoint, in every step."""
    model, exact = checkpointed(reentrant, region), checkpointed(reentrant, None)
    compressed(model, 8)
    for _ in range(2):
        check_gradients(model, exact, data((8, 64)).requires_grad_())


TORCHS_OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:The .grad attribute"
)


@pytest.mark.inductor
@TORCHS_OWN_WARNINGS
def test_compiled_layers_have_no_masks():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 3))
    exact = copy.deepcopy(model)
    compressed(model, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = data((8, 64))
    for _ in range(2):
        check_gradients(compiled, exact, x)
    words = [8 * -(-8 * size // 32) for size in (64, 300)]
    mask = -(-8 * 300 // 32)
    codes = [tensor.numel() for tensor in saved_by(compiled, x)[1] if tensor.dtype == torch.int32]
    assert sorted(codes) == sorted([*words, mask])


@pytest.mark.inductor
@TORCHS_OWN_WARNINGS
def test_a_compiled_layer_after_an_eager_relu_has_no_mask():
    torch.compiler.reset()
    model = compressed(nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 3)), 8)
    model[2].compile(backend="aot_eager")
    x = data((8, 64))
    hidden = model[0](x).relu().detach()
    (found,) = torch.autograd.grad(model(x).sum(), model[2].weight)
    assert relative(found[0], hidden.sum(0)) < 0.02


def test_hooks_on_saved_tensors():
    model, x = compressed(Layers(nn.Linear(300, 3))), data((8, 300))

    def gradient(context):
        torch.manual_seed(1)
        with context:
            (y,) = run(model, x)
        return torch.autograd.grad(y.square().sum(), model.layers[0].weight)[0]

    hooked = gradient(torch.autograd.graph.save_on_cpu())
    assert torch.equal(hooked, gradient(contextlib.nullcontext()))


def test_batched_gradients():
    model = compressed(Layers(nn.Linear(64, 3)), 4)
    (y,) = run(model, data((8, 64)))
    weight, grads = model.layers[0].weight, normal((5, 8, 3))
    (found,) = torch.autograd.grad(y, weight, grads, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(y, weight, grad, retain_graph=True)[0])


# -- policies ------------------------------------------------------------------------------------------------


CONFIGS = {
    "samples": fewbit.SampleBits(2.5),
    "adaptive": fewbit.AdaptiveBits(2),
    "error bound": fewbit.ErrorBound(e2=0.3),
}


@pytest.mark.parametrize("shape", [(16, 128), (40, 24)], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_policies(config, shape):
    """Copies are masked in all steps: in observed ones, in others, and if groups cross samples of several widths."""
    torch.manual_seed(0)
    width = shape[1]
    before = nn.Sequential(nn.Linear(8, width), nn.ReLU())
    model = Layers(nn.Linear(width, width), nn.Linear(width, 3), relu=before)
    compressed(model, CONFIGS[config])
    for step in range(5):
        torch.manual_seed(step)
        first, second = model(normal((shape[0], 8), seed=step))
        check(model, 0.8)
        (first.square().sum() + second.square().sum()).backward()


@pytest.mark.parametrize("bits", [1, 2])
def test_the_variance_that_probes_expect(bits):
    """A record's variance is that of the restored values, whose zeros have none."""
    x = data((16, 512)).relu()
    x[:4, 100:] = 0.0
    quantizer = Quantizer(bits)
    mask = activation_ops.encode(x, STEP, None)
    how = x.dtype, bits, "masked"
    saved = [quantizer._by_kernel(x, *how, seed, 0, None, mask) for seed in range(200)]
    values = torch.stack([copy.spec.dequantize(copy.tensors) for copy in saved])
    record = QuantizationRecord(x, saved[0].tensors, saved[0].spec, 256, None)
    found = (values - x).square().mean((0, 2))
    expected = record.variance(bits, None)
    torch.testing.assert_close(found, expected, rtol=0.12, atol=0.0)


def test_the_variance_profile():
    """Deferred copies are masked too: the profile of the layer after the ReLU has the error of masked copies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256, bias=False), nn.ReLU(), nn.Linear(256, 3))
    x = normal((32, 16), scale=1.0)
    share = {}
    for kind in ("rotated", "uniform"):
        settings = {"layers": {"quantizer": kind}, "draws": 20, "chunks": 4}
        profile = fewbit.variance_profile(
            model, x, lambda m, x: m(x).square().mean(), bits=1, **settings
        )
        share[kind] = float(profile.quantization[-1])
    assert share["rotated"] * 8 < share["uniform"]
