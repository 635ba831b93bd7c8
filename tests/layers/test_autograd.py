"""Few-bit activations in autograd: uses that must work as with torch's own, and uses that must be refused."""

import copy

import pytest
import torch
from expectation import drawn, pooled_z, signed_z
from samples import (
    ACTIVATIONS,
    GELU,
    RELU,
    SMOOTH,
    ids,
    load_table,
    normal,
    same,
)
from torch import nn
from torch.nn import functional as torch_f
from torch.utils.checkpoint import checkpoint

import fewbit
import fewbit.functional as F

SOME = [GELU, RELU, *[sample for sample in SMOOTH if sample.function in ("silu", "elu")]]
INPLACE = [sample for sample in ACTIVATIONS if sample.inplace]
DRAWN = load_table("gelu", 2, objective="unbiased")
some = pytest.mark.parametrize("sample", **ids(SOME))


def leaf(shape, device="cpu", seed=1, dtype=torch.float32):
    return normal(shape, dtype, device, seed=seed).requires_grad_()


# -- checkpoints and negations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@some
def test_checkpoint(sample, use_reentrant, device):
    """A checkpoint draws the same codes again: the outputs of the recomputation cannot show it, but the gradient does."""
    x = leaf((33, 7), device)

    def body(x):
        with torch.no_grad():
            sample(x)  # torch's own, inside a checkpoint
        return F.gelu(sample(x * 2.0) * 3.0, table=DRAWN) * 2

    torch.manual_seed(4)
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    torch.manual_seed(4)
    checkpoint(body, x, use_reentrant=use_reentrant).sum().backward()
    assert same(x.grad, expected)


def test_negations_that_are_only_noted(device):
    """The memory of the imaginary part of a conjugate has the other sign."""
    x, theirs = leaf((9,), device), leaf((9,), device)
    for leaf_x, relu in ((x, F.relu), (theirs, torch_f.relu)):
        y = relu(torch._neg_view(leaf_x * 1.0))
        y.backward(torch._neg_view(normal((9,), device=device, seed=6)))
    assert (x.grad == theirs.grad).all()
    one = leaf((1,), device)
    torch.complex(one * 0.0, F.relu(one * one)).conj().imag.backward(torch.ones(1, device=device))
    assert one.grad.item() == -2 * one.item()


# -- autocast ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_autocast_gives_torchs_dtype(sample, device):
    for autocast in (torch.bfloat16, torch.float16):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, theirs = (leaf((40,), device, dtype=dtype) for _ in range(2))
            with torch.autocast(device, dtype=autocast):
                y, expected = sample(x), sample.torch(theirs)
            assert y.dtype == expected.dtype, (autocast, dtype)
            y.float().sum().backward()
            expected.float().sum().backward()
            assert x.grad.dtype == theirs.grad.dtype == dtype


# -- in place ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(INPLACE))
def test_inplace(sample, device):
    x = leaf((5, 33), device)
    for change in (
        lambda x: x * 1.0,
        lambda x: (x * 1.0).t(),
        lambda x: torch.cat([x, x], 1)[:, ::2],
    ):
        inner = change(x)
        before, version = inner.detach().clone(), inner._version
        y = sample(inner, inplace=True)
        assert y.data_ptr() == inner.data_ptr() and inner._version > version
        torch.testing.assert_close(y.detach(), sample.torch(before))
        torch.testing.assert_close(y, sample(before.requires_grad_()))
        weight = normal(y.shape, device=device, seed=4)
        (grad,) = torch.autograd.grad(y, inner if inner is y else x, weight, allow_unused=True)
        copy = change(x)
        (expected,) = torch.autograd.grad(sample(copy), x, weight)
        (ours,) = torch.autograd.grad(sample(change(x), inplace=True), x, weight)
        assert same(ours, expected)
    ours = torch.func.grad(lambda x: sample(x * 1.0, inplace=True).sum())(x.detach())
    assert same(ours, torch.autograd.grad(sample(x).sum(), x)[0])


@pytest.mark.parametrize("sample", **ids(INPLACE))
def test_inplace_refusals_come_before_anything_is_written(sample, device):
    x = leaf((9,), device)
    before = x.detach().clone()
    for wrong in (x, x[2:], x.view(3, 3)):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            sample(wrong, inplace=True)
        assert same(x, before) and x._version == 0
    overlapping = (x * 1.0).expand(4, 9)
    start = overlapping.detach().clone()
    if sample.function == "threshold":  # torch's function computes the result without an error
        y = sample(overlapping, inplace=True)
        assert y.data_ptr() == overlapping.data_ptr() and same(y, sample.torch(start))
        return
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        sample(overlapping, inplace=True)
    assert same(overlapping, start)


def test_inplace_on_a_view_updates_its_base(device):
    x, theirs = leaf((6, 8), device), leaf((6, 8), device)
    weight = normal((6, 8), device=device, seed=6)
    for leaf_x, relu in ((x, F.relu), (theirs, torch_f.relu)):
        base = leaf_x * 2.0
        relu(base[1:4, ::2], inplace=True)
        (base * weight).sum().backward()
    assert (x.grad == theirs.grad).all()  # 0 * -1 is -0 here, 0 in torch's


class Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def _made_without_gradients(x):
    with torch.no_grad():
        return x[1:]


SEVERAL = "the output of a function that returns multiple views"
REFUSED_VIEWS = {
    "chunk": (lambda x: x.chunk(2)[0], SEVERAL),
    "split": (lambda x: x.split(2)[1], SEVERAL),
    "unbind": (lambda x: x.unbind(0)[0], SEVERAL),
    "Function": (Viewed.apply, "Viewed is a view and is being modified inplace"),
    "no_grad": (_made_without_gradients, "view was created in no_grad mode"),
}


@pytest.mark.parametrize(("view", "reason"), REFUSED_VIEWS.values(), ids=REFUSED_VIEWS)
def test_inplace_on_a_view_that_torch_refuses_too(device, view, reason):
    for relu in (torch_f.relu, F.relu):
        x = view(leaf((6, 8), device) * 1.0)
        start = x.detach().clone()
        with pytest.raises(RuntimeError, match=reason):
            relu(x, inplace=True)
        assert same(x, start)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("place", [0, 1])
def test_inplace_beside_a_full_backward_hook(hook, place):
    """Torch refuses such activations too, because it passes the hooks' tensors through an autograd Function."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    getattr(layers[place], hook)(lambda *_: None)
    with pytest.raises(RuntimeError, match="BackwardHookFunction"):
        layers(leaf((2, 8)))
    fewbit.compress_(layers, verbose=False)
    with pytest.raises(RuntimeError, match="BackwardHookFunction"):
        layers(leaf((2, 8)))
    layers[1].inplace = False
    layers(leaf((2, 8))).sum().backward()


def _hooked_always(layer, hook):
    return layer.register_forward_hook(hook, always_call=True)


@pytest.mark.parametrize(
    "register",
    [nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook, _hooked_always],
)
def test_inplace_beside_other_hooks(register):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    exact, called, x = copy.deepcopy(layers), [], torch.randn(16, 8)
    register(layers[1], lambda *_: called.append(1))
    fewbit.compress_(layers, 8, verbose=False)
    for model in (exact, layers):
        model(x).sum().backward()
    assert called == [1] and same(layers[0].bias.grad, exact[0].bias.grad)


# -- unbiased tables -----------------------------------------------------------------------------------------


def test_seeds_come_from_torchs_generator(device):
    x = leaf((300,), device)

    def draw():
        return torch.autograd.grad(F.gelu(x, table=DRAWN).sum(), x)[0]

    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    assert same(draw(), first) and same(draw(), second) and not same(first, second)


def test_draws_are_unbiased(device):
    """Entries whose level is never drawn anew are the table's mean up to rounding."""
    torch.manual_seed(11)
    x = leaf((500,), device)
    (draws,) = drawn(lambda: torch.autograd.grad(F.gelu(x, table=DRAWN).sum(), x), 200)
    mean = torch.from_numpy(DRAWN(x.detach().cpu().double().numpy())).to(device)
    assert abs(pooled_z(draws, mean, 1e-5, may_stay=True)) < 5
    assert max(map(abs, signed_z(draws, mean, 1e-5))) < 4
