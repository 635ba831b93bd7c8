"""The second run of a region of fewbit.checkpoint: it decides as the first run did, and leaves the state of modules alone."""

import gc
import weakref
from functools import partial

import pytest
import torch
from layers import relative
from samples import normal, same
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import fewbit
from fewbit.errors import GradientError

WIDTH = 64
TABLE = normal((WIDTH, WIDTH), seed=1, scale=1.0)
ROWS = torch.arange(1.0, 65.0)


def over_gates(x):
    values, experts = (x * 3).topk(2)
    return torch.einsum("nk,nkd->nd", values, TABLE[experts])


def in_place(x):
    levels = torch.zeros(x.shape, dtype=torch.long).copy_(x.detach() * 10)
    return x.sin() * levels


def into_out(x):
    mask = torch.zeros(x.shape, dtype=torch.bool)
    torch.gt(x.detach(), 0.3, out=mask)
    return x.sin() * mask


def pooled(x):
    indices = functional.max_pool2d(x.detach()[None, None], 2, return_indices=True)[1]
    return x.sin() * indices.remainder(5)[0, 0].repeat(2, 2)


def in_inference_mode(x):
    with torch.inference_mode():
        mask = x > 0.3
    return x.sin() * mask.clone()


def assigned(x):
    levels = torch.zeros(x.shape, dtype=torch.long)
    levels[:, 3:] = x.detach()[:, 3:] * 10
    return x.sin() * levels


def gamma(x):
    drawn = torch.distributions.Gamma(x.exp() + 1, 1.0).rsample()
    return functional.dropout(x.sin() * drawn)


def expanded(x):
    levels = torch.zeros(1, dtype=torch.long).expand(WIDTH)
    levels[0] = 5.0 + 0 * x[0, 0].detach()
    return x.sin() * levels


def changed_array(x):
    numbers = x.detach().exp().numpy()
    numbers += 1
    return x.sin() * torch.tensor(numbers)


def changed_lists(x):
    rows = x.detach().tolist()
    return x.sin() * torch.tensor([row.pop(0) for row in rows])


DECIDING = {
    "topk": over_gates,
    "topk of aten": lambda x: TABLE[torch.ops.aten.topk.default(x, 2)[1]].sum(1) * x.sin(),
    "argmax": lambda x: TABLE[x.argmax(-1)] * x.sin(),
    "argsort": lambda x: TABLE[x.argsort(-1)[:, 0]] * x.sin(),
    "sort": lambda x: x.sin().sort(-1).values * ROWS,
    "max": lambda x: torch.max(x, dim=1, keepdim=True)[0].sin() * ROWS,
    "median": lambda x: x.median(0).values.sin() * ROWS,
    "kthvalue": lambda x: x.kthvalue(3, 0).values.sin() * ROWS,
    "cummax": lambda x: x.cummax(0).values.sin() * ROWS,
    "mask": lambda x: x[x > 0.3].sin().cumsum(0),
    "where": lambda x: torch.where(x > 0.1, x.sin(), -3 * x.sin()),
    "nonzero": lambda x: x.flatten()[x.relu().flatten().nonzero()[:, 0]].sin().cumsum(0),
    "bucketize": lambda x: ROWS[torch.bucketize(x.detach(), torch.linspace(-3, 3, 32))] * x.sin(),
    "bucketize by name": lambda x: (
        torch.bucketize(x.detach(), boundaries=torch.linspace(-3, 3, 200)) * x.sin()
    ),
    "searchsorted by name": lambda x: (
        torch.searchsorted(sorted_sequence=torch.linspace(-3, 3, 200), input=x.detach()) * x.sin()
    ),
    "bits of numbers": lambda x: x.detach().view(torch.int32).remainder(5) * x.sin(),
    "uint16": lambda x: (x.detach().abs() * 99).to(torch.uint16).float() * x.sin(),
    "inference mode": in_inference_mode,
    "changed array": changed_array,
    "changed lists": changed_lists,
    "where of floats": lambda x: x.flatten()[torch.where(x.flatten().relu())[0]].sin().cumsum(0),
    "indices of pooling": pooled,
    "frexp": lambda x: torch.frexp(x.detach())[1] * x.sin(),
    "unique": lambda x: x.detach().round().unique().cos().sum() * x.sin(),
    "integers": lambda x: (x * 10).long() * x.sin(),
    "in place": in_place,
    "assigned": assigned,
    "bernoulli": lambda x: x.sin() * x.detach().sigmoid().bernoulli(),
    "bernoulli_": lambda x: x.sin() * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "bernoulli of a gradient": lambda x: x.sin() * torch.bernoulli(x.sigmoid()),
    "poisson, then dropout": lambda x: functional.dropout(
        x.sin() * torch.poisson(x.detach().exp())
    ),
    "gamma, then dropout": gamma,
    "assigned to an expanded tensor": expanded,
    "out": into_out,
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x, hard=True) @ TABLE * x.sin(),
    "multinomial": lambda x: TABLE[torch.multinomial(x.detach().softmax(-1), 2)].sum(1) * x.sin(),
    "item": lambda x: x.sin() * (1 if x[0, 0].item() > x.detach()[0, 1] else -1),
    "a number": lambda x: x.sin() * x.detach()[3, 3].item(),
    "bool": lambda x: x.sin() if (x.detach()[0] * 1000).long()[0] % 2 else x.cos(),
    "a list": lambda x: x.sin() * sum(x.detach()[0].tolist()),
    "numpy": lambda x: x.sin() * float(x.detach().numpy()[0, 0]),
}


def gradient(function, x, run):
    """Return (the result, the gradient of x) of a function that is run by `run`, with the random numbers of seed 1."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = run(function, x)
    y.backward(normal(y.shape, seed=2, scale=1.0))
    return y.detach(), x.grad


def after_a_seed(function, x):
    fewbit.runtime.ops.library.new_seed(x)  # as fewbit.checkpoint draws one
    return function(x)


@pytest.mark.parametrize("name", DECIDING)
def test_decisions(name):
    """The exact function, whose decisions are constants, has a gradient that is smooth in the inputs."""
    x = normal((WIDTH, WIDTH), scale=1.0)
    y, wanted = gradient(DECIDING[name], x, after_a_seed)
    for bits, most in ((8, 0.03), (4, 0.3)):
        found_y, found = gradient(DECIDING[name], x, partial(fewbit.checkpoint, bits=bits))
        assert same(found_y, y)
        assert relative(found, wanted) < most


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "topk",
        "mask",
        "sort",
        "unique",
        "gumbel_softmax",
        "multinomial",
        "changed array",
        "changed lists",
    ],
)
def test_decisions_in_nested_regions_and_twice(name, early):
    """A region in a region decides alike, in every backward pass and with both ways to end the second run."""
    x, gradients = normal((WIDTH, WIDTH), scale=1.0), []
    for run in (after_a_seed, fewbit.checkpoint):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        with set_checkpoint_early_stop(early):
            y = run(lambda x, run=run: run(DECIDING[name], x * 1.5) * 2, leaf)
            for keeps in (True, False):
                leaf.grad = None
                y.backward(normal(y.shape, seed=2, scale=1.0), retain_graph=keeps)
                gradients.append(leaf.grad)
    assert same(gradients[2], gradients[3])
    # The two runs draw seeds of rounding at different places, so random choices differ.
    assert name in ("gumbel_softmax", "multinomial") or relative(gradients[2], gradients[0]) < 0.03


def saved(function, x):
    return fewbit.saved_bytes(lambda x: fewbit.checkpoint(function, x), x).total


def test_bytes_of_decisions():
    """Masks and coins take 1 bit per element, indices as many as their dimension needs. Regions without decisions save none."""
    x = normal((WIDTH, WIDTH), scale=1.0).requires_grad_()
    usual = saved(torch.sin, x)
    assert saved(lambda x: x.sin() * (x > 0), x) - usual == WIDTH * WIDTH // 8
    coins = saved(lambda x: x.sin() * x.detach().sigmoid().bernoulli(), x)
    assert coins - usual == WIDTH * WIDTH // 8
    assert saved(lambda x: x.sin() * x.argmax(-1), x) - usual == WIDTH * 6 // 8
    assert saved(lambda x: x.sin() * x.sort(-1)[1], x) - usual == WIDTH * WIDTH * 6 // 8


@pytest.mark.slow
def test_a_record_is_freed_with_the_graph():
    x = normal((WIDTH, WIDTH)).requires_grad_()
    buffer = torch.zeros(WIDTH)
    packed = []

    def region(x):
        buffer.add_(1)
        return x.sin() * (x > 0)

    def pack(tensor):
        packed.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = fewbit.checkpoint(region, x)
    assert len(packed) > 3 and all(reference() is not None for reference in packed)
    y.sum().backward()
    gc.collect()
    assert not any(reference() is not None for reference in packed)


def test_a_region_that_decides_elsewhere_is_refused():
    x, runs = normal((WIDTH, WIDTH)).requires_grad_(), []

    def region(x):
        runs.append(1)
        return x.sin() * (x > 0) if len(runs) == 1 else x.sin() * x.argmax(-1)

    y = fewbit.checkpoint(region, x)
    with pytest.raises(GradientError, match="gt in the first run and argmax .* use torch.utils"):
        y.sum().backward()
    assert not torch._C._len_torch_function_stack()


def test_vmap_in_a_region():
    """A region may use vmap. A decision within vmap is refused, because it is not of one tensor."""
    x = normal((WIDTH, WIDTH), scale=1.0).requires_grad_()

    def region(x):
        return torch.func.vmap(torch.sin)(x) * torch.func.vmap(torch.cos)(TABLE).mean()

    found, wanted = (
        torch.autograd.grad(run(x).sum(), x)[0]
        for run in (partial(fewbit.checkpoint, region), region)
    )
    assert relative(found, wanted) < 0.03
    with pytest.raises(GradientError, match="decision within torch.func.vmap .* use torch.utils"):
        fewbit.checkpoint(torch.func.vmap(lambda row: row.sin() * (row > 0)), x)


def test_slopes_that_are_drawn_are_refused():
    x = normal((WIDTH, WIDTH)).requires_grad_()
    with pytest.raises(GradientError, match="rrelu draws a random number .* use torch.utils"):
        fewbit.checkpoint(nn.RReLU(), x)
    fewbit.checkpoint(nn.RReLU().eval(), x).sum().backward()


OTHERS = {
    "torch": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_decisions_in_regions_of_torch(name):
    """A region of torch that decides may be around a region of fewbit, but not within it."""
    other, x = OTHERS[name], normal((WIDTH, WIDTH), scale=1.0).requires_grad_()
    y = other(lambda x: fewbit.checkpoint(DECIDING["mask"], x * 1.5), x)
    assert (
        torch.autograd.grad(y.sum(), x)[0].isfinite().all() if name == "torch" else y.requires_grad
    )
    with pytest.raises(GradientError, match="a decision within torch.utils.checkpoint"):
        fewbit.checkpoint(lambda x: other(DECIDING["mask"], x * 1.5), x)
    fewbit.checkpoint(lambda x: other(torch.sin, x * 1.5), x).sum().backward()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [1, 2])
def test_no_mode_is_left_on(error, number):
    """The region raises in its first or in its second run."""
    x, runs = normal((WIDTH, WIDTH)).requires_grad_(), []

    def region(x):
        runs.append(1)
        y = x.sin() * (x > 0)
        if len(runs) == number:
            raise error
        return y * y

    with pytest.raises(error):
        fewbit.checkpoint(region, x).sum().backward()
    assert not torch._C._len_torch_function_stack()


# -- State ---------------------------------------------------------------------------------------------


class CodeBook(nn.Module):
    """A code book of averages (VQ), which the forward updates, and a buffer that the forward replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", normal((16, WIDTH), seed=3, scale=1.0))
        self.register_buffer("count", torch.ones(16))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        nearest = torch.cdist(x, self.codes).argmin(-1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            members = functional.one_hot(nearest, 16).float()
            self.count.data.mul_(0.9).add_(members.sum(0), alpha=0.1)
            self.codes.data.lerp_(members.T @ x / self.count[:, None], 0.5)
        return (x + (chosen - x).detach()).sin() * (x - self.mean)


class Queue(nn.Module):
    """A queue of earlier results (MoCo)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", normal((WIDTH, 256), seed=3, scale=1.0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        place = int(self.place)
        y = x.sin() @ self.keys.clone()
        self.keys[:, place : place + WIDTH] = x.detach().T
        self.place[0] = (place + WIDTH) % 256
        return y


class Custom(nn.Module):
    """An average that an op changes, whose schema alone says so."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        ones = torch.ones(WIDTH)
        torch.ops.aten._native_batch_norm_legit(
            x.detach(), None, None, self.mean, ones, True, 0.1, 1e-5
        )
        return x.sin() * (x - self.mean)


class Clamped(nn.Linear):
    """A layer that changes its parameters in the forward."""

    def forward(self, x):
        self.weight.data.clamp_(-0.05, 0.05)
        with torch.no_grad():
            self.bias.mul_(0.5)
        return super().forward(x)


STATEFUL = {
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()),
    "average": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (8, 8)), nn.InstanceNorm1d(8, track_running_stats=True)
    ),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "code book": CodeBook,
    "queue": Queue,
    "op": Custom,
    "clamped": lambda: Clamped(WIDTH, WIDTH),
    "frozen": lambda: nn.BatchNorm1d(WIDTH).eval(),
}


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.*:FutureWarning")
@pytest.mark.parametrize("compresses", [False, True])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_moves_once(name, compresses):
    """Three forwards come before one backward pass: the second runs read the values of their first runs, and write none."""

    def trained(run):
        torch.manual_seed(0)
        body = STATEFUL[name]()
        model = nn.Module()
        model.body = body
        model.forward = lambda x: run(body, x)
        if compresses:
            fewbit.compress_(model, bits=8, layers={"activation_bits": 8}, verbose=False)
        leaves = [normal((WIDTH, WIDTH), seed=k, scale=1.0).requires_grad_() for k in range(3)]
        results = [model(x * 1) for x in leaves]
        state = {key: value.clone() for key, value in body.state_dict().items()}
        sum((y * normal(y.shape, seed=9)).sum() for y in results).backward()
        assert all(same(value, state[key]) for key, value in body.state_dict().items())
        found = [x.grad for x in (*leaves, *body.parameters()) if x.grad is not None]
        return state, torch.cat([x.flatten() for x in found])

    state, wanted = trained(lambda body, x: body(x))
    found_state, found = trained(fewbit.checkpoint)
    assert all(same(found_state[key], value) for key, value in state.items())
    assert relative(found, wanted) < 0.05


class Average(nn.Module):
    """An average of the inputs, in a buffer that the forward makes or replaces."""

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean).sin()


class Holder:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)


HOLDS = {
    "module": lambda module: module,
    "closure": lambda module: lambda x: module(x),
    "keyword": lambda module: partial(lambda x, module: module(x), module=module),
    "object": Holder,
}


@pytest.mark.parametrize("holds", HOLDS)
def test_replaced_buffers_move_once(holds):
    module, x = Average(), normal((WIDTH, WIDTH), scale=1.0).requires_grad_()
    results = [fewbit.checkpoint(HOLDS[holds](module), x) for _ in range(2)]
    wanted, buffer = 0.19 * x.detach().mean(0), module.mean
    for y, number in zip(results, (0.1, 0.19), strict=True):
        found = torch.autograd.grad(y.sum(), x)[0]
        assert relative(found, (x - number * x.mean(0)).detach().cos()) < 0.03
    assert module.mean is buffer and torch.allclose(buffer, wanted)


class Recurrent(nn.Linear):
    """A layer that keeps its result, with the graph, in a buffer."""

    def forward(self, x):
        self.state = torch.tanh(super().forward(x) * self.state)
        return self.state


def test_buffers_with_gradients():
    gradients = []
    for run in (lambda f, x: f(x), fewbit.checkpoint):
        torch.manual_seed(0)
        layer, x = Recurrent(WIDTH, WIDTH), normal((WIDTH, WIDTH), scale=1.0).requires_grad_()
        layer.register_buffer("state", torch.ones(WIDTH, WIDTH, requires_grad=True))
        (run(layer, x) + run(layer, x.cos())).square().mean().backward()
        gradients.append(torch.cat([x.grad.flatten(), layer.weight.grad.flatten()]))
    assert relative(gradients[1], gradients[0]) < 0.03


def test_bytes_of_state():
    """The values from before the region are saved once per tensor: means, variances and the number of batches."""
    model, x = nn.BatchNorm1d(WIDTH), normal((WIDTH, WIDTH)).requires_grad_()
    assert saved(model, x) - saved(torch.sin, x) == 2 * 4 * WIDTH + 8


# -- Selective policies --------------------------------------------------------------------------------


def policy(context, op, *args, **kwargs):
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {
    "save all": lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "recompute all": lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE,
    "save products": policy,
    "list": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
}


class Chooser(nn.Module):
    """A block that keeps its largest features."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.down = nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.run = run

    def body(self, x):
        y = self.down(self.act(self.up(self.norm(x))))
        values, places = y.topk(8)
        return torch.zeros_like(y).scatter(-1, places, values)

    def forward(self, x):
        return x + self.run(self.body, x)


@pytest.mark.parametrize("name", ["assigned", "bernoulli_", "in place"])
def test_changed_tensors_and_a_policy(name):
    x = normal((WIDTH, WIDTH), scale=1.0)
    context_fn = partial(create_selective_checkpoint_contexts, policy)
    _, wanted = gradient(DECIDING[name], x, after_a_seed)
    _, found = gradient(DECIDING[name], x, partial(fewbit.checkpoint, context_fn=context_fn))
    assert relative(found, wanted) < 0.03


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.products += op is torch.ops.aten.addmm.default
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("layers", [None, {}, {"everything": True}], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_selective_policies(name, layers):
    """Gradients are right, and products that the policy saves are not computed again."""
    x, products = normal((32, WIDTH), scale=1.0), []

    def gradients(run, compresses):
        model = nn.Sequential(Chooser(run), Chooser(run))
        if compresses:
            fewbit.compress_(model, bits=8, layers={"activation_bits": 8} | layers, verbose=False)
        leaf = x.clone().requires_grad_()
        loss = model(leaf).square().mean()
        with Counter() as counter:
            loss.backward()
        products.append(counter.products)
        return torch.cat([g.flatten() for g in (leaf.grad, *(p.grad for p in model.parameters()))])

    context_fn = partial(create_selective_checkpoint_contexts, POLICIES[name])
    wanted = gradients(lambda body, x: body(x), False)
    found = gradients(partial(fewbit.checkpoint, context_fn=context_fn), layers is not None)
    assert relative(found, wanted) < 0.02
    if layers is None:
        assert products[1] == (4 if name == "recompute all" else 0)
