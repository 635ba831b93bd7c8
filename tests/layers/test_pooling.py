"""Pooling: torch's values and gradients to the bit, and how little is kept for them."""

from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, name_of, normal, same
from torch import nn
from torch.nn import functional as torch_f

import fewbit.functional.pooling as F
import fewbit.nn.pooling as fewbit_nn
from fewbit.errors import GradientError
from fewbit.runtime.format.windows import Windows
from fewbit.runtime.quantizers import integers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Sample:
    """A module of torch's, what it is called with, and the bits that a maximum's place takes."""

    name: str
    shape: tuple[int, ...]
    arguments: tuple
    bits: int = 0
    options: dict = field(default_factory=dict)

    @property
    def id(self):
        text = " ".join(map(str, (*self.arguments, *self.options)))
        return f"{self.name} {text} {self.shape}".replace("(", "").replace(")", "")

    def theirs(self):
        return getattr(nn, self.name)(*self.arguments, **self.options)

    def ours(self):
        return getattr(fewbit_nn, self.name)(*self.arguments, **self.options)

    def bytes(self, outputs):
        if self.bits > 8:
            return self.bits // 8 * outputs
        return 4 * self.bits * ceil(outputs / 32)


CEIL, INDICES = {"ceil_mode": True}, {"return_indices": True}
SAMPLES = [
    Sample("MaxPool1d", (2, 3, 17), (2,), 1),
    Sample("MaxPool1d", (2, 3, 17), (5, 2, 1, 2), 3, CEIL),
    Sample("MaxPool1d", (3, 17), (3, 2), 2),
    Sample("MaxPool1d", (2, 1, 700), (300, 100), 16),
    Sample("MaxPool2d", (2, 3, 8, 9), (2,), 2),
    Sample("MaxPool2d", (2, 3, 8, 9), (3, 2, 1), 4),
    Sample("MaxPool2d", (2, 3, 8, 9), (3, 2, 1, 1), 4, CEIL | INDICES),
    Sample("MaxPool2d", (2, 3, 8, 9), ((1, 2), (2, 1), 0, (1, 3)), 1),
    Sample("MaxPool2d", (2, 3, 8, 9), (1, 2), 0),
    Sample("MaxPool2d", (3, 8, 9), (3, 1, 1), 4),
    Sample("MaxPool2d", (1, 2, 16, 16), (16,), 8),
    Sample("MaxPool2d", (1, 2, 17, 17), (17,), 16),
    Sample("MaxPool2d", (1, 1, 182, 182), (182,), 32),
    Sample("MaxPool2d", (0, 3, 8, 9), (2,), 2),
    Sample("MaxPool3d", (2, 3, 4, 5, 6), (2,), 3),
    Sample("MaxPool3d", (2, 3, 4, 5, 6), (3, 2, 1), 5, CEIL),
    Sample("MaxPool3d", (3, 4, 5, 6), ((1, 3, 2), 1), 3, INDICES),
    Sample("AdaptiveMaxPool1d", (2, 3, 17), (5,), 3),
    Sample("AdaptiveMaxPool1d", (3, 17), (20,), 1),
    Sample("AdaptiveMaxPool2d", (2, 3, 8, 9), (1,), 7),
    Sample("AdaptiveMaxPool2d", (2, 3, 8, 9), ((3, None),), 2, INDICES),
    Sample("AdaptiveMaxPool2d", (2, 3, 8, 9), ((8, 9),), 0),
    Sample("AdaptiveMaxPool2d", (3, 8, 9), ((4, 3),), 3),
    Sample("AdaptiveMaxPool2d", (1, 2, 20, 30), (1,), 16),
    Sample("AdaptiveMaxPool3d", (2, 3, 4, 5, 6), ((2, 3, 4),), 4),
    Sample("AdaptiveMaxPool3d", (3, 4, 5, 6), ((None, 5, None),), 0),
    Sample("AvgPool1d", (2, 3, 17), (3, 2, 1)),
    Sample("AvgPool1d", (3, 17), (4,)),
    Sample("AvgPool2d", (2, 3, 8, 9), (2,)),
    Sample("AvgPool2d", (2, 3, 8, 9), (3, 2, 1, True, False)),
    Sample("AvgPool2d", (3, 8, 9), ((2, 3), 1, 0, False, True, 5)),
    Sample("AvgPool3d", (2, 3, 4, 5, 6), (2,)),
    Sample("AvgPool3d", (3, 4, 5, 6), (3, (1, 2, 2), 1, True, False, 7)),
    Sample("AdaptiveAvgPool1d", (2, 3, 17), (5,)),
    Sample("AdaptiveAvgPool1d", (3, 17), (1,)),
    Sample("AdaptiveAvgPool2d", (2, 3, 8, 9), (1,)),
    Sample("AdaptiveAvgPool2d", (2, 3, 8, 9), ((3, None),)),
    Sample("AdaptiveAvgPool2d", (3, 8, 9), ((1, 2),)),
    Sample("AdaptiveAvgPool3d", (2, 3, 4, 5, 6), ((2, 3, 4),)),
    Sample("AdaptiveAvgPool3d", (2, 3, 4, 5, 6), (1,)),
]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
DIFFERENT = {sample.name: sample for sample in reversed(SAMPLES)}.values()
EACH_KIND = pytest.mark.parametrize("sample", DIFFERENT, ids=lambda sample: sample.name)


def step(function, x):
    """(results, gradient) of x, a leaf with its own strides."""
    x = x.detach().requires_grad_()
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    y = results[0]
    (grad,) = torch.autograd.grad(y, x, normal(y.shape, y.dtype, y.device, seed=6))
    return results, grad


def check(ours, theirs, x):
    """The same results and gradient to the bit, or the same refusal."""
    try:
        theirs, theirs_grad = step(theirs, x)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            step(ours, x)
        return
    ours, ours_grad = step(ours, x)
    assert len(ours) == len(theirs)
    assert same(ours[0], theirs[0]) and ours[0].stride() == theirs[0].stride()
    assert same(ours_grad, theirs_grad)
    if len(ours) > 1:
        assert torch.equal(ours[1], theirs[1]) and ours[1].stride() == theirs[1].stride()


def kept_by(function, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        y = function(x)
    return y[0] if isinstance(y, tuple) else y, saved


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_equals_torch(device, sample, dtype):
    check(sample.ours(), sample.theirs(), normal(sample.shape, dtype, device))


@EACH
def test_channels_last(device, sample):
    if len(sample.shape) not in CHANNELS_LAST:
        return
    x = normal(sample.shape, device=device).to(memory_format=CHANNELS_LAST[len(sample.shape)])
    check(sample.ours(), sample.theirs(), x)


@EACH_KIND
def test_strided(device, sample):
    doubled = normal((*sample.shape[:-1], 2 * sample.shape[-1]), device=device)
    check(sample.ours(), sample.theirs(), doubled[..., ::2])
    check(sample.ours(), sample.theirs(), normal(sample.shape[::-1], device=device).permute(
        *reversed(range(len(sample.shape)))
    ))  # fmt: skip


@EACH
def test_ties_nan_and_infinities(device, sample):
    x = normal(sample.shape, device=device, scale=1.0).round()
    x[x == 2] = torch.nan
    x[x == 1] = torch.inf
    check(sample.ours(), sample.theirs(), x)
    check(sample.ours(), sample.theirs(), torch.zeros_like(x))
    check(sample.ours(), sample.theirs(), torch.full_like(x, -torch.inf))


def test_a_window_of_minus_infinity_whose_index_torch_gets_wrong():
    """The CPU kernel for channels-last volumes says depth 0; the gradient lands in the plane."""
    x = torch.full((1, 16, 4, 4, 4), -torch.inf).to(memory_format=torch.channels_last_3d)
    for padding in (0, 1):
        results, grad = step(lambda x: F.max_pool3d(x, 2, 2, padding), x)  # noqa: B023
        grad_y = normal(results[0].shape, seed=6)
        torch.testing.assert_close(grad.sum((2, 3, 4)), grad_y.sum((2, 3, 4)))


@EACH
def test_bytes(device, sample):
    x = normal(sample.shape, device=device).requires_grad_()
    y, saved = kept_by(sample.ours(), x)
    assert bytes_of(saved) == sample.bytes(y.numel())


def test_k_of_each_number_of_bits(device):
    for k in range(1, 12):
        x = normal((3, 40), device=device).requires_grad_()
        ours, theirs = (partial(each.max_pool1d, kernel_size=k, stride=1) for each in (F, torch_f))
        y, saved = kept_by(ours, x)
        bits = ceil(torch.tensor(float(k)).log2().item())
        assert bytes_of(saved) == 4 * bits * ceil(y.numel() / 32)
        check(ours, theirs, x)


@EACH_KIND
def test_nothing_is_kept_without_a_gradient(device, sample):
    x = normal(sample.shape, device=device)
    for module, leaf in ((sample.ours(), x), (sample.ours().eval(), x)):
        y, saved = kept_by(module, leaf)
        assert not saved and same(y, kept_by(sample.theirs(), leaf)[0])
    with torch.no_grad():
        y, saved = kept_by(sample.ours(), x.requires_grad_())
    assert not saved and not y.requires_grad


@EACH_KIND
def test_eval_is_torch(device, sample):
    ours = sample.ours().eval()
    assert isinstance(ours, getattr(nn, sample.name)) and repr(ours) == repr(sample.theirs())
    check(ours, sample.theirs(), normal(sample.shape, device=device))


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_autocast(device, sample, dtype):
    x = normal(sample.shape, dtype, device)

    def cast(module):
        def call(x):
            with torch.autocast(device, torch.bfloat16):
                return module(x)

        return call

    check(cast(sample.ours()), cast(sample.theirs()), x)


WIDE = [sample for sample in SAMPLES if sample.name == "MaxPool2d" and sample.bits in (0, 16)]


@pytest.mark.fast(1)
@pytest.mark.parametrize("sample", [*DIFFERENT, *WIDE], ids=lambda sample: sample.id)
def test_compiled(device, sample):
    torch.compiler.reset()
    x = normal(sample.shape, device=device)
    module = sample.ours()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")
    (ours, ours_grad), (theirs, theirs_grad) = step(compiled, x), step(sample.theirs(), x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours_grad, theirs_grad)
    y, saved = kept_by(compiled, x.requires_grad_())
    # Of a few elements the unpacked ones are smaller, and the partitioner finds them.
    assert bytes_of(saved) <= min(sample.bytes(y.numel()), 4 * y.numel())


@EACH_KIND
def test_a_second_derivative_is_refused(device, sample):
    if sample.arguments == (1,):  # torch's mean
        return
    x = normal(sample.shape, device=device).requires_grad_()
    y, _ = kept_by(sample.ours(), x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="no second derivative"):
        grad.sum().backward()


@EACH_KIND
def test_transforms_see_torch(device, sample):
    x = normal(sample.shape, device=device)

    def total(module):
        def call(x):
            y = module(x)
            return (y[0] if isinstance(y, tuple) else y).square().sum()

        return call

    ours, theirs = (torch.func.grad(total(m))(x) for m in (sample.ours(), sample.theirs()))
    assert same(ours, theirs)


@EACH_KIND
def test_a_batch_of_gradients(device, sample):
    x = normal(sample.shape, device=device).requires_grad_()
    y, _ = kept_by(sample.ours(), x)
    grads = normal((3, *y.shape), device=device, seed=7)
    together = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)[0]
    for grad, one in zip(grads, together, strict=True):
        torch.testing.assert_close(torch.autograd.grad(y, x, grad, retain_graph=True)[0], one)


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d", "adaptive_avg_pool3d"])
def test_what_torch_refuses(device, name):
    x = normal((2, 3, 4, 5), device=device).requires_grad_()
    for wrong in (x.long() if name == "max_pool2d" else x[0, 0], x[0, 0]):
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            getattr(torch_f, name)(wrong, (9, 9, 9))
        with pytest.raises(type(theirs.value)):
            getattr(F, name)(wrong, (9, 9, 9))


def test_unpooling(device):
    x = normal((2, 3, 8, 8), device=device)
    pooled, indices = F.max_pool2d(x.requires_grad_(), 2, return_indices=True)
    y = torch_f.max_unpool2d(pooled, indices, 2)
    assert same(torch.autograd.grad(y.sum(), x)[0], (y == x).to(x.dtype))


@given(st.integers(1, 30), st.integers(1, 30))
def test_the_longest_adaptive_window(size, out):
    longest = max(ceil((o + 1) * size / out) - o * size // out for o in range(out))
    assert Windows.adaptive((size,), (out,)).count == longest


def test_integers(device):
    for count in (2, 3, 8, 9, 200, 256, 257, 1 << 15, (1 << 15) + 1):
        values = torch.arange(77, device=device).remainder(count)
        kept = integers.pack(values, count)
        assert torch.equal(kept.spec.dequantize(kept.tensors).to(torch.int64), values)
    swapped = torch.arange(15, device=device).view(3, 5).t()
    kept = integers.pack(swapped, 15)
    assert torch.equal(kept.spec.dequantize(kept.tensors).to(torch.int64), swapped)


def test_the_ops_of_integers(device):
    values = torch.arange(77, device=device).remainder(5)
    for arguments in ((values, 3, 5, [1]), (values.int(), 3, 5, [1]), (values, 16, 300, [1])):
        torch.library.opcheck(torch.ops.fewbit.pack_kept.default, arguments)
    torch.library.opcheck(torch.ops.fewbit.narrow_kept.default, (values, torch.int16))


# -- all configurations ----------------------------------------------------------------------------


@st.composite
def cases(draw):
    dims = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["max", "avg", "adaptive_max", "adaptive_avg"]))
    lead = draw(st.sampled_from([(2, 3), (3,), (1, 1), (0, 2)]))
    size = tuple(draw(st.integers(1, 9)) for _ in range(dims))

    def each(low, high):
        one = st.integers(low, high)
        return draw(one | st.tuples(*[one] * dims))

    options = {}
    if "adaptive" in kind:
        arguments = (each(1, 7),)
    else:
        kernel = each(1, 4)
        arguments = (kernel, draw(st.sampled_from([kernel, each(1, 3)])), each(0, 2))
        options["ceil_mode"] = draw(st.booleans())
        if kind == "max":
            arguments += (each(1, 3),)
        else:
            options["count_include_pad"] = draw(st.booleans())
    if "max" in kind:
        options["return_indices"] = draw(st.booleans())
    return f"{kind}_pool{dims}d", (*lead, *size), arguments, options


@settings(max_examples=200)
@given(cases(), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 9))
def test_any_configuration(case, dtype, channels_last, ties, seed):
    name, shape, arguments, options = case
    x = normal(shape, dtype, scale=1.0, seed=seed)
    if ties:
        x = x.round()
        x[x == 2] = torch.nan
    if channels_last and len(shape) in CHANNELS_LAST and prod(shape):
        x = x.to(memory_format=CHANNELS_LAST[len(shape)])

    def call(functions):
        return lambda x: getattr(functions, name)(x, *arguments, **options)

    check(call(F), call(torch_f), x)
