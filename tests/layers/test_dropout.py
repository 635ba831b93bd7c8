"""Dropout: torch's values, draws and gradients to the bit, and a mask of 1 bit an element."""

from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import ceil, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, LAYOUTS, laid_out, name_of, normal, same
from torch import nn
from torch.nn import functional as torch_f

import fewbit.nn.dropout as fewbit_nn
from fewbit.errors import GradientError

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)
F = import_module("fewbit.functional.dropout")  # not the function of that name


@dataclass(frozen=True)
class Sample:
    """A function, its module, an input's shape, and how many of its dimensions the mask has."""

    name: str
    module: str
    shape: tuple[int, ...]
    features: int | None = None

    @property
    def id(self):
        return f"{self.name} {self.shape}"

    @property
    def bytes(self):
        return 4 * ceil(prod(self.shape[: self.features]) / 32)

    def theirs(self, *arguments, **options):
        return getattr(nn, self.module)(*arguments, **options)

    def ours(self, *arguments, **options):
        return getattr(fewbit_nn, self.module)(*arguments, **options)


SAMPLES = [
    Sample("dropout", "Dropout", (7, 33)),
    Sample("dropout", "Dropout", (40, 50, 60)),
    Sample("dropout", "Dropout", (2, 3, 4, 5)),
    Sample("dropout1d", "Dropout1d", (4, 5, 6), 2),
    Sample("dropout1d", "Dropout1d", (40, 6), 1),
    Sample("dropout2d", "Dropout2d", (4, 9, 5, 6), 2),
    Sample("dropout3d", "Dropout3d", (4, 5, 2, 3, 3), 2),
    Sample("dropout3d", "Dropout3d", (5, 4, 3, 3), 1),
    Sample("alpha_dropout", "AlphaDropout", (7, 33)),
    Sample("feature_alpha_dropout", "FeatureAlphaDropout", (4, 9, 5, 6), 2),
    Sample("feature_alpha_dropout", "FeatureAlphaDropout", (4, 9), 2),
]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
KINDS = {sample.name: sample for sample in SAMPLES}
EACH_KIND = pytest.mark.parametrize("sample", KINDS.values(), ids=lambda sample: sample.name)
PROBABILITIES = (0.0, 0.1, 0.5, 0.77, 0.999, 1.0)


def state_of(device):
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def step(function, x, seed=3):
    """(result, gradient, the generator's state after it) of x, a leaf with its own strides."""
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    y = function(x)
    state = state_of(x.device.type)
    (grad,) = torch.autograd.grad(y, x, normal(y.shape, y.dtype, y.device, seed=6))
    return y, grad, state


def check(ours, theirs, x, seed=3):
    (y, grad, state), theirs = step(ours, x, seed), step(theirs, x, seed)
    assert same(y, theirs[0]) and y.stride() == theirs[0].stride()
    assert same(grad, theirs[1])
    assert torch.equal(state, theirs[2])


def kept_by(function, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        y = function(x)
    return y, saved


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_equals_torch(device, sample, dtype):
    x = normal(sample.shape, dtype, device)
    x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, 0.0, -0.0])
    for p in PROBABILITIES:
        check(sample.ours(p), sample.theirs(p), x)


@EACH
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_inplace(device, sample, p):
    def call(function):
        return lambda x: function(x * 2.0, p, True, True)

    x = normal(sample.shape, device=device)
    ours, theirs = getattr(F, sample.name), getattr(torch_f, sample.name)
    check(call(ours), call(theirs), x)
    doubled = (x.detach().requires_grad_()) * 2.0
    assert ours(doubled, p, True, True) is doubled or p in (0.0, 1.0)


def test_inplace_on_views_and_leaves(device):
    def call(function):
        def on_a_view(x):
            y = x * 2.0
            function(y[1:, ::2], 0.3, True, True)
            return y

        return on_a_view

    x = normal((5, 8), device=device)
    check(call(F.dropout), call(torch_f.dropout), x)
    leaf = x.clone().requires_grad_()
    for wrong in (leaf, leaf[1:], (leaf * 1.0).chunk(2)[0], (leaf[:1] * 1.0).expand(3, 8)):
        with pytest.raises(RuntimeError):
            torch_f.dropout(wrong, 0.3, True, True)
        with pytest.raises(RuntimeError):
            F.dropout(wrong, 0.3, True, True)
    assert same(leaf, x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout):
    x = laid_out(layout, device=device)
    check(lambda x: F.dropout(x, 0.3), lambda x: torch_f.dropout(x, 0.3), x)
    check(lambda x: F.alpha_dropout(x, 0.3, True), lambda x: torch_f.alpha_dropout(x, 0.3, True), x)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_bytes(device, sample, dtype):
    x = normal(sample.shape, dtype, device).requires_grad_()
    assert bytes_of(kept_by(sample.ours(0.3), x)[1]) == sample.bytes
    assert bytes_of(kept_by(sample.ours(0.0), x)[1]) == 0
    assert bytes_of(kept_by(sample.ours(1.0), x)[1]) <= 16
    assert bytes_of(kept_by(sample.ours(0.3).eval(), x)[1]) == 0
    assert bytes_of(kept_by(sample.ours(0.3), x.detach())[1]) == 0
    with torch.no_grad():
        assert bytes_of(kept_by(sample.ours(0.3), x)[1]) == 0


@EACH_KIND
def test_modules(device, sample):
    ours, theirs = sample.ours(0.3), sample.theirs(0.3)
    assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
    x = normal(sample.shape, device=device)
    check(ours.eval(), theirs.eval(), x)


@pytest.mark.filterwarnings("ignore:dropout[23]d")
def test_sizes_that_torch_warns_of(device):
    for name, shape in (("dropout2d", (4, 5, 6)), ("dropout2d", (4, 5)), ("dropout3d", (4, 5, 6))):
        ours, theirs = (partial(getattr(each, name), p=0.3) for each in (F, torch_f))
        check(ours, theirs, normal(shape, device=device))


def test_what_torch_refuses(device):
    x = normal((2, 3, 4, 5), device=device).requires_grad_()
    for name in KINDS:
        with pytest.raises(ValueError, match="between 0 and 1"):
            getattr(F, name)(x, 1.5, True)
    with pytest.raises(RuntimeError, match="Expected 2D or 3D"):
        F.dropout1d(x, 0.3)


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_autocast(device, sample, dtype):
    def cast(module):
        def call(x):
            with torch.autocast(device, torch.bfloat16):
                return module(x)

        return call

    check(cast(sample.ours(0.3)), cast(sample.theirs(0.3)), normal(sample.shape, dtype, device))


@pytest.mark.fast(3)
@EACH_KIND
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled(device, sample, inplace):
    """The compiler draws its own mask: one for result and gradient, and nothing else is kept."""
    torch.compiler.reset()
    sample = replace(sample, shape=(30 * sample.shape[0], *sample.shape[1:]))
    torch.manual_seed(4)
    function, p = getattr(F, sample.name), 0.3
    compiled = torch.compile(
        lambda x: function(x * 1.0, p, True, inplace) * 1.0,
        fullgraph=True,
        backend="aot_eager_decomp_partition",
    )
    x = normal(sample.shape, device=device).abs().add_(1.0).requires_grad_()
    y, saved = kept_by(compiled, x)
    assert bytes_of(saved) <= sample.bytes
    (grad,) = torch.autograd.grad(y.sum(), x)
    if "alpha" in sample.name:
        slope = grad.max()
        dropped = y[grad == 0]
        assert (dropped == dropped[0]).all() and torch.isin(
            grad, torch.stack((0 * slope, slope))
        ).all()
        shift = y[grad != 0] - (x * slope)[grad != 0]
        torch.testing.assert_close(shift, shift[:1].expand_as(shift))
    else:
        torch.testing.assert_close(grad * x, y)
    assert 0.15 < (grad == 0).float().mean() < 0.45
    torch.manual_seed(5)
    first = compiled(x)
    assert not same(compiled(x), first)
    torch.manual_seed(5)
    assert same(compiled(x), first)


@EACH_KIND
def test_a_second_derivative_is_refused(device, sample):
    x = normal(sample.shape, device=device).requires_grad_()
    y = sample.ours(0.3)(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="no second derivative"):
        grad.sum().backward()


@EACH_KIND
def test_a_batch_of_gradients(device, sample):
    x = normal(sample.shape, device=device).requires_grad_()
    y = sample.ours(0.3)(x)
    grads = normal((3, *y.shape), device=device, seed=7)
    together = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)[0]
    for grad, one in zip(grads, together, strict=True):
        assert same(torch.autograd.grad(y, x, grad, retain_graph=True)[0], one)


def test_transforms_see_torch(device):
    x = normal((5, 7), device=device)
    torch.manual_seed(3)
    ours = torch.func.grad(lambda x: F.dropout(x, 0.3).sum())(x)
    torch.manual_seed(3)
    theirs = torch.func.grad(lambda x: torch_f.dropout(x, 0.3).sum())(x)
    assert same(ours, theirs)


def test_checkpointing(device):
    """The region that is made again draws the same mask."""
    x = normal((50, 7), device=device)

    def region(x):
        return F.dropout(x.sin(), 0.5)

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)

    check(checkpointed, region, x)


@settings(max_examples=150)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.integers(0, 7), min_size=5, max_size=5),
    st.sampled_from(DTYPES),
    st.floats(0.0, 1.0),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_any_configuration(sample, sizes, dtype, p, inplace, channels_last, seed):
    x = normal(tuple(sizes[: len(sample.shape)]), dtype, seed=seed)
    if channels_last and x.dim() == 4 and x.numel():
        x = x.to(memory_format=torch.channels_last)

    def call(function):
        return lambda x: function(x * 1.0, p, True, inplace)

    check(call(getattr(F, sample.name)), call(getattr(torch_f, sample.name)), x, seed)
