"""Few-bit activations in autograd: uses that must work as with torch's own, and uses that must be refused."""

import copy
import threading

import pytest
import torch
from samples import (
    ACTIVATIONS,
    GELU,
    RELU,
    SMOOTH,
    adversarial,
    gradient,
    ids,
    load_table,
    normal,
    same,
    scaled,
)
from torch import nn
from torch.nn import functional as torch_f
from torch.utils.checkpoint import checkpoint

import fewbit
import fewbit.functional as F
from fewbit.errors import InputError, TableError

SOME = [GELU, RELU, *[sample for sample in SMOOTH if sample.function in ("silu", "elu")]]
INPLACE = [sample for sample in ACTIVATIONS if sample.inplace]
DRAWN = load_table("gelu", 2, objective="unbiased")
some = pytest.mark.parametrize("sample", **ids(SOME))


def leaf(shape, device="cpu", seed=1, dtype=torch.float32):
    return normal(shape, dtype, device, seed=seed).requires_grad_()


# -- checkpoints, repeated and combined use ------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@some
def test_checkpoint(sample, use_reentrant, device):
    x = leaf((33, 7), device)

    def body(x):
        with torch.no_grad():
            sample(x)  # torch's own, inside a checkpoint
        return sample(x * 2.0) * 3.0

    (expected,) = torch.autograd.grad(body(x).sum(), x)
    checkpoint(body, x, use_reentrant=use_reentrant).sum().backward()
    assert same(x.grad, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_draws_the_same_codes_again(use_reentrant, device):
    """The outputs of the recomputation cannot show it, but the gradient of a region with two draws does."""
    x = leaf((300,), device)
    torch.manual_seed(4)
    (expected,) = torch.autograd.grad((F.gelu(x, table=DRAWN) * 2).sum(), x)
    torch.manual_seed(4)
    checkpoint(
        lambda x: F.gelu(x, table=DRAWN) * 2, x, use_reentrant=use_reentrant
    ).sum().backward()
    assert same(x.grad, expected)


@some
def test_backward_twice_and_inputs_used_twice(sample, device):
    x = leaf((65,), device)
    grad = normal((65,), device=device, seed=3)
    y = sample(x)
    (first,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, grad)
    assert same(first, second) and same(first, gradient(sample.table(), x, grad))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x, grad)
    sample(x).backward(grad)
    sample(x).backward(grad)
    assert same(x.grad, first + first)
    x.grad = None
    (sample(x) + sample(x)).backward(grad)
    assert same(x.grad, first + first)


def test_tensor_hooks(device):
    x, seen = leaf((40,), device), []
    y = F.gelu(x)
    y.register_hook(lambda grad: seen.append("y") or grad * 2)
    x.register_hook(lambda grad: seen.append("x") or grad * 3)
    y.grad_fn.register_prehook(lambda grads: seen.append("pre"))
    y.sum().backward()
    expected = gradient(load_table("gelu", 3), x, torch.full_like(x, 2.0)) * 3
    assert same(x.grad, expected) and seen.index("y") < seen.index("x")


def test_saved_tensor_hooks_carry_the_codes(device):
    x = leaf((400,), device)
    with torch.autograd.graph.save_on_cpu():
        y = F.gelu(x)
    y.sum().backward()
    assert same(x.grad, gradient(load_table("gelu", 3), x, torch.ones_like(x)))


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


def test_codes_that_were_overwritten_are_noticed(device):
    x = leaf((40,), device)
    y = F.gelu(x)
    y.grad_fn.saved_tensors[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_another_gradients_thread(device):
    x = leaf((4000,), device)
    y = F.gelu(x)
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert same(x.grad, gradient(load_table("gelu", 3), x, torch.ones_like(x)))


# -- refusals ------------------------------------------------------------------------------------------------


def test_a_tensor_is_no_table(device):
    with pytest.raises(TableError, match="takes no gradient"):
        F.gelu(leaf((4,), device), table=torch.ones(8, requires_grad=True))


# -- torch.func ----------------------------------------------------------------------------------------------


@some
def test_nested_transforms(sample, device):
    from torch.func import grad, vmap

    x = normal((5, 9), device=device)
    ones = gradient(sample.table(), x, torch.ones_like(x))
    one = grad(lambda x: sample(x).sum())
    assert same(vmap(one, in_dims=1, out_dims=1)(x), ones)
    assert same(vmap(vmap(one))(x), ones)
    assert same(grad(lambda x: vmap(sample)(x).sum())(x), ones)
    assert same(vmap(sample)(x), sample.torch(x))


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


@pytest.mark.parametrize("sample", **ids(INPLACE))
def test_inplace_refusals_come_before_anything_is_written(sample, device):
    x = leaf((9,), device)
    before = x.detach().clone()
    for wrong in (x, x[2:], x.view(3, 3)):
        if wrong is x:
            with pytest.raises(InputError, match="not a leaf which requires grad for inplace=True"):
                sample(wrong, inplace=True)
        else:
            with pytest.raises((InputError, RuntimeError), match="leaf"):
                sample(wrong, inplace=True)
        assert same(x, before) and x._version == 0
    overlapping = (x * 1.0).expand(4, 9)
    start = overlapping.detach().clone()
    with pytest.raises(InputError, match="elements lie apart for inplace=True"):
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


SEVERAL = "one of several views that one function returned"
REFUSED_VIEWS = {
    "chunk": (lambda x: x.chunk(2)[0], SEVERAL),
    "split": (lambda x: x.split(2)[1], SEVERAL),
    "unbind": (lambda x: x.unbind(0)[0], SEVERAL),
    "Function": (Viewed.apply, "a view that the autograd Function Viewed returned"),
    "no_grad": (_made_without_gradients, r"a view that was made in torch.no_grad\(\)"),
}


@pytest.mark.parametrize(("view", "reason"), REFUSED_VIEWS.values(), ids=REFUSED_VIEWS)
def test_inplace_on_a_view_that_torch_refuses_too(device, view, reason):
    for relu, error in ((torch_f.relu, RuntimeError), (F.relu, InputError)):
        x = view(leaf((6, 8), device) * 1.0)
        start = x.detach().clone()
        with pytest.raises(error, match=reason if relu is F.relu else None):
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
    with pytest.raises(
        InputError, match="full backward hook of a module; use inplace=False"
    ) as error:
        layers(leaf((2, 8)))
    assert "chunk" not in str(error.value)
    layers[1].inplace = False
    layers(leaf((2, 8))).sum().backward()


HOOKS = {
    "forward": lambda layer, hook: layer.register_forward_hook(hook),
    "forward, keywords": lambda layer, hook: layer.register_forward_hook(hook, with_kwargs=True),
    "before": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "before, keywords": lambda layer, hook: layer.register_forward_pre_hook(hook, with_kwargs=True),
    "always": lambda layer, hook: layer.register_forward_hook(hook, always_call=True),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_inplace_beside_other_hooks(register):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    exact, called, x = copy.deepcopy(layers), [], torch.randn(16, 8)
    register(layers[1], lambda *_: called.append(1))
    fewbit.compress_(layers, 8, verbose=False)
    for model in (exact, layers):
        model(x).sum().backward()
    assert called == [1] and same(layers[0].bias.grad, exact[0].bias.grad)


def test_an_earlier_op_that_needs_the_old_value_notices(device):
    x = leaf((20,), device)
    inner = x * 1.0
    square = inner.square()
    F.relu(inner, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_our_own_input_may_be_overwritten(device):
    """The backward pass needs the codes alone."""
    x = leaf((20,), device)
    inner = x * 1.0
    y = F.gelu(inner)
    inner.detach().zero_()
    y.sum().backward()
    assert same(x.grad, gradient(load_table("gelu", 3), x, torch.ones_like(x)))


def test_inplace_chain(device):
    x = leaf((50,), device)
    y = F.leaky_relu(F.elu(F.relu6(x * 1.0, inplace=True), inplace=True), 0.2, inplace=True)
    z = F.leaky_relu(F.elu(F.relu6(x * 1.0)), 0.2)
    assert same(y, z)
    assert same(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(z.sum(), x)[0])


def test_inplace_under_transforms(device):
    x = normal((4, 9), device=device)
    ours = torch.func.grad(lambda x: F.relu(x * 1.0, inplace=True).sum())(x)
    assert same(ours, (x > 0).float())


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
    """One pooled z statistic compares the mean of many draws with the table's mean, in units of its deviation."""
    torch.manual_seed(11)
    x = leaf((500,), device)
    mean = torch.from_numpy(DRAWN(x.detach().cpu().double().numpy()))
    draws = torch.stack(
        [torch.autograd.grad(F.gelu(x, table=DRAWN).sum(), x)[0].cpu().double() for _ in range(200)]
    )
    levels = torch.tensor(DRAWN.levels)
    lower = torch.from_numpy(DRAWN.code(x.detach().cpu().double().numpy()))
    variance = (mean - levels[lower]) * (levels[lower + 1] - mean)
    z = (draws - mean).sum() / (200 * variance.sum()).sqrt()
    assert abs(z) < 4
    moving = variance > 1e-4
    squares = ((draws.mean(0) - mean)[moving] ** 2 / variance[moving] * 200).sum()
    n = int(moving.sum())
    assert abs(squares - n) < 5 * (2 * n) ** 0.5


def test_the_same_seed_on_every_layout(device):
    """Draws follow storage order: a transposed tensor draws the same as its storage."""
    x = leaf((20, 30), device)
    torch.manual_seed(3)
    (plain,) = torch.autograd.grad(F.gelu(x, table=DRAWN).sum(), x)
    torch.manual_seed(3)
    (turned,) = torch.autograd.grad(F.gelu(x.t(), table=DRAWN).sum(), x)
    assert same(plain, turned)


# -- non-finite values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_nan_is_in_the_last_piece(sample, device):
    table = sample.table()
    x = torch.full((40,), torch.nan, device=device).requires_grad_()
    y = sample(x)
    assert (y.isnan() == sample.torch(x.detach()).isnan()).all()
    y.backward(torch.ones_like(y))
    last = scaled(table, [table.codes[-1]] * 40, torch.ones(40))
    assert same(x.grad.cpu(), last)


def test_gradients_that_are_not_finite_stay_so(device):
    """Level 0 times infinity is NaN, so a GradScaler misses nothing."""
    for sample in (GELU, RELU):
        x = adversarial(sample.table(), torch.float32, device).nan_to_num().requires_grad_()
        for bad in (float("inf"), float("-inf"), float("nan")):
            (grad,) = torch.autograd.grad(sample(x), x, torch.full_like(x, bad))
            assert not grad.isfinite().any()


def scaled_step(activation, device, x, poison):
    """Return whether a GradScaler takes one step of a small fp16 model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 1)).to(device, torch.float16)
    if poison is not None:
        model[1].register_full_backward_hook(lambda module, grads, _: (grads[0] * poison,))
    # 16-bit gradients are what a scaler may not unscale: the master copy is float32, as usual.
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaler.scale(model(x).float().square().mean()).backward()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad = parameter.grad.float()
    before = [master.detach().clone() for master in masters]
    scaler.step(optimizer)
    scaler.update()
    moved = any(not same(a, b) for a, b in zip(before, masters, strict=True))
    return moved, scaler.get_scale()


@pytest.mark.parametrize("bad", [1.0, 6e4, float("inf"), float("nan")])
@pytest.mark.parametrize("poison", [None, float("inf"), float("nan")])
def test_a_grad_scaler_skips_the_step_as_with_torchs_own(device, bad, poison):
    x = normal((8, 4), torch.float16, device, scale=1.0)
    x[0] *= bad
    ours = scaled_step(fewbit.GELU(), device, x, poison)
    assert ours == scaled_step(nn.GELU(), device, x, poison)
    assert ours[0] == (bad == 1.0 and poison is None)
