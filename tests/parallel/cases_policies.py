"""Saved bytes under data parallelism, and policies that choose bits in two processes."""

import copy
import math
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from language_model import gradients_of
from quantized import quantized_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fewbit
from fewbit.functional.batch_norm import sync_batch_norm as few_bit_sync_batch_norm
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.quantizers.quantizer import Quantizer

BITS = 8


class Model(nn.Module):
    """A model of a convolution, norms, dropout, and two layers with one input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.batch_norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.25)
        self.a, self.b = nn.Linear(512, 64), nn.Linear(512, 64)
        self.norm = nn.LayerNorm(64)
        self.gelu = nn.GELU()
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        x = self.dropout(self.relu(self.batch_norm(self.conv(x)))).flatten(1)
        return self.head(self.gelu(self.norm(self.a(x) + self.b(x))))


def model():
    torch.manual_seed(0)
    return Model()


def inputs(rank):
    return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(rank))


def _shard(module, *layers):
    for layer in layers:
        fully_shard(layer)
    return fully_shard(module)


def _few_bit_bytes():
    """Return the bytes that a forward saves: codes and ranges of layers, masks of ReLU and dropout, codes of GELU."""
    pixels, features = (16, 8, 8, 8), (16, 64)
    copies = [(16, 3, 8, 8), pixels, (16, 512), features, features]  # a and b share one
    masks = 2 * 4 * packed_words(math.prod(pixels), 1)
    codes = 4 * packed_words(math.prod(features), BITS)
    return sum(quantized_bytes(shape, BITS) for shape in copies) + masks + codes


def _forward(module, rank):
    torch.manual_seed(10 + rank)  # the same masks in the exact model
    return module(inputs(rank))


def _saved_bytes(rank, wrap):
    """Check saved bytes and gradients of a wrapped model, in two steps."""
    exact = model()
    for number in range(2):
        (_forward(exact, number).square().mean() / 2).backward()
    module = model()
    fewbit.compress_(module, bits=BITS, layers={"activation_bits": BITS}, verbose=False)
    wrapped = wrap(module)
    weights = {parameter.shape for parameter in exact.parameters()}
    for _ in range(2):  # the second forward uses buckets made anew
        saved = {}

        def pack(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
            return tensor.detach()

        wrapped.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = _forward(wrapped, rank)
        few_bit = [x for x in saved.values() if x.dtype in (torch.int32, torch.bfloat16)]
        assert sum(tensor.nbytes for tensor in few_bit) == _few_bit_bytes()
        others = [x for x in saved.values() if x.dtype not in (torch.int32, torch.bfloat16)]
        assert all(other.shape in weights or other.numel() <= 64 for other in others)
        y.square().mean().backward()
    expected = gradients_of(exact)
    for name, gradient in gradients_of(wrapped).items():
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert error < 0.02, (name, error)
    assert all(isinstance(layer, fewbit.nn.Linear) for layer in (module.a, module.b, module.head))


def ddp_saves(rank):
    """A wrapped model saves what it saves by itself. Its gradients, batch norms and masks of dropout are right too."""
    _saved_bytes(rank, DistributedDataParallel)


def sharded_saves(rank):
    """The same with `fully_shard` of every layer."""

    def wrap(module):
        return _shard(module, *(layer for layer in module.children() if list(layer.parameters())))

    _saved_bytes(rank, wrap)


def _train_sharded(rank, check, config):
    module = model()
    controller = fewbit.compress_(module, config, verbose=False)
    _shard(module, module.a, module.head)

    def run(number):
        module.zero_grad()
        module(inputs(rank)).square().mean().backward()

    check(rank, controller, run)


def adapting_sharded(rank):
    _train_sharded(rank, _adapt, fewbit.AdaptiveBits(2, interval=8))


def bounded_sharded(rank):
    _train_sharded(rank, _bounded, fewbit.ErrorBound(interval=2))


def _adapt(rank, controller, run, first="conv"):
    """Check that both processes choose the same bits in the same step, from the results of both."""
    policy = controller.context.policy
    changed = []
    for number in range(1, 21):
        before = policy.averages
        run(number)
        if policy.averages is not before:
            changed.append(number)
    both = [None, None]
    dist.all_gather_object(both, (changed, controller.allocation))
    assert both[0] == both[1]
    assert changed and changed == sorted(set(changed)), changed
    bits = {row.bits for row in controller.allocation}
    assert len(bits) > 1, bits
    rows = controller.allocation
    assert sum(row.bits * row.elements for row in rows) <= 2 * sum(row.elements for row in rows)
    assert {row.elements for row in rows if row.name == first} == {2 * 16 * 3 * 64}


def _adapting():
    module = model()
    return module, fewbit.compress_(module, fewbit.AdaptiveBits(2, interval=8), verbose=False)


def adapting(rank):
    """Processes agree although one ran the model before, and the other runs it outside of them in between."""
    module, controller = _adapting()
    if rank == 0:
        module(inputs(rank)).square().mean().backward()
    wrapped = DistributedDataParallel(module)

    def run(number):
        wrapped.zero_grad()
        with wrapped.no_sync() if number % 2 else nullcontext():
            wrapped(inputs(rank)).square().mean().backward()
        if number % 3 == 0 and rank == 1:
            module(inputs(rank)).square().mean().backward()

    _adapt(rank, controller, run)


def adapting_within(rank):
    """The data parallel module itself is compressed, and forwards come in threes before their backward passes."""
    wrapped = DistributedDataParallel(model(), find_unused_parameters=True)
    controller = fewbit.compress_(wrapped, fewbit.AdaptiveBits(2, interval=1), verbose=False)

    def run(number):
        wrapped.zero_grad()
        with wrapped.no_sync():
            losses = [wrapped(inputs(rank)).square().mean() for _ in range(number % 3)]
        sum([*losses, wrapped(inputs(rank)).square().mean()]).backward()

    _adapt(rank, controller, run, "module.conv")


def _bounded(rank, controller, run, first="conv"):
    """Check that both processes find the same bounds and use the same bits, from the results of both."""
    for number in range(1, 13):
        run(number)
    both = [None, None]
    policy = controller.context.policy
    learned = policy.averages, policy.activations, policy.monitored()
    dist.all_gather_object(both, (controller.bounds, learned))
    assert both[0] == both[1]
    rows = [row for row in controller.bounds if row.input is not None]
    assert {row.elements for row in rows if row.name == first} == {2 * 16 * 3 * 64}
    assert len({row.bits for row in rows}) > 1 and all(row.dx > 0 for row in rows)
    assert controller.bounds.ratio < 1.5
    assert len(rows) > 3 and any(row.input is None for row in controller.bounds)


def bounded(rank):
    """Processes agree although losses are scaled, one ran the model before, and the other does in between."""
    module = model()
    bound = fewbit.ErrorBound(interval=2, by_channel=True)
    controller = fewbit.compress_(module, bound, verbose=False)
    if rank == 0:
        module(inputs(rank)).square().mean().backward()
    wrapped = DistributedDataParallel(module)

    def run(number):
        wrapped.zero_grad()
        scale = 2.0 ** (number % 3)
        if number % 4 == 3 and rank == 0:
            scale = float("inf")  # what one process saw counts alone
        (scale * wrapped(inputs(rank)).square().mean()).backward()
        if number % 3 == 0 and rank == 1:
            module(inputs(rank)).square().mean().backward()

    _bounded(rank, controller, run)


def stages(rank):
    """Each process has its own model, sharded over a mesh of one. The processes do not wait for each other."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "data"))
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(1 + 2 * rank)))
    controller = fewbit.compress_(module, fewbit.AdaptiveBits(2.5, interval=8), verbose=False)
    fully_shard(module, mesh=mesh["data"])
    for _ in range(5 + 10 * rank):
        module(torch.randn(8, 64)).square().mean().backward()
    assert len(controller.allocation) == len(module)


def resumed_policy(rank):
    """The training stops and continues from the state of each process, with the same losses and bits."""

    def start():
        module, controller = _adapting()
        return DistributedDataParallel(module), controller

    def train(wrapped, numbers):
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        for number in numbers:
            torch.manual_seed(100 * number + rank)
            optimizer.zero_grad()
            loss = wrapped(torch.randn(16, 3, 8, 8)).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.item()

    for stop in (1, 4, 13):
        expected = None
        # Whether all save, none or only one of them, changes nothing.
        for saves in (False, rank == 0, True):
            whole, controller = start()
            list(train(whole, range(stop)))
            if saves:
                state = copy.deepcopy((whole.state_dict(), controller.state_dict()))
            found = list(train(whole, range(stop, 20))), controller.allocation
            expected = expected or found
            assert found == expected
        again, controller = start()
        again.load_state_dict(state[0])
        controller.load_state_dict(state[1])
        if rank == 0:  # looks at the model first
            again.module(torch.randn(16, 3, 8, 8)).sum().backward()
        assert (list(train(again, range(stop, 20))), controller.allocation) == expected


def adapting_parts(rank):
    """The modules of a model are wrapped and called one by one."""
    torch.manual_seed(0)
    sizes = (16, 64), (64, 64), (64, 8)
    parts = nn.ModuleList(nn.Sequential(nn.Linear(*number), nn.ReLU()) for number in sizes)
    controller = fewbit.compress_(parts, fewbit.AdaptiveBits(2, interval=2), verbose=False)
    wrapped = [DistributedDataParallel(part) for part in parts]
    for step in range(12):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(8, 16)
        for item in wrapped:
            x = item(x)
        x.square().mean().backward()
    found = [(row.name, row.bits, row.sensitivity) for row in controller.allocation]
    assert {name for name, _, sensitivity in found if sensitivity > 0} == {"0.0", "1.0", "2.0"}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert everyone[0] == everyone[1]


@contextmanager
def _synchronized_on_the_cpu():
    """Replace the kernels of SyncBatchNorm, which torch has on GPUs only, by formulas."""

    def stats(x, eps):
        flat = x.transpose(0, 1).flatten(1)
        return flat.mean(1), (flat.var(1, unbiased=False) + eps).rsqrt()

    def gather(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
        weights = (counts / counts.sum())[:, None]
        total = (weights * mean).sum(0)
        var = (weights * (invstd**-2 - eps + (mean - total) ** 2)).sum(0)
        n = counts.sum()
        running_mean.lerp_(total, momentum)
        running_var.lerp_(var * n / (n - 1), momentum)
        return total, (var + eps).rsqrt()

    def place(v):
        return v[None, :, None]

    def elemt(x, weight, bias, mean, invstd, eps):
        return (x - place(mean)) * place(invstd * weight) + place(bias)

    def reduce(grad, x, mean, invstd, weight, *needs):
        centered = x - place(mean)
        dy, dy_x = grad.sum((0, 2)), (grad * centered).sum((0, 2))
        return dy, dy_x, dy_x * invstd, dy

    def backward(grad, x, mean, invstd, weight, dy, dy_x, count):
        n = count.sum()
        inner = grad - place(dy / n) - (x - place(mean)) * place(invstd**2 * dy_x / n)
        return inner * place(invstd * weight)

    with patch.multiple(
        torch,
        batch_norm_stats=stats,
        batch_norm_gather_stats_with_counts=gather,
        batch_norm_elemt=elemt,
        batch_norm_backward_reduce=reduce,
        batch_norm_backward_elemt=backward,
    ):
        yield


def sync_batch_norm(rank):
    x = [torch.randn(4, 5, 40, generator=torch.Generator().manual_seed(i)) * 2 + 1 for i in (0, 1)]
    grad = [torch.randn(4, 5, 40, generator=torch.Generator().manual_seed(i)) for i in (2, 3)]
    own = nn.BatchNorm1d(5)
    nn.init.normal_(own.weight, generator=torch.Generator().manual_seed(4))
    both = copy.deepcopy(own)
    all_x = torch.cat(x).requires_grad_()
    both(all_x).backward(torch.cat(grad))
    mine = x[rank].clone().requires_grad_()
    vectors = own.weight, own.bias, own.running_mean, own.running_var
    quantizer = Quantizer(8)
    with _synchronized_on_the_cpu():
        y = few_bit_sync_batch_norm(
            mine, *vectors, 1e-5, 0.1, dist.group.WORLD, quantizer=quantizer
        )
        y.backward(grad[rank])
    torch.testing.assert_close(
        y, copy.deepcopy(both)(all_x).detach().chunk(2)[rank], rtol=1e-4, atol=1e-4
    )
    wanted = all_x.grad.chunk(2)[rank]
    assert float((mine.grad - wanted).norm() / wanted.norm()) < 0.02
    for item in (own.weight, own.bias):
        dist.all_reduce(item.grad)
    assert float((own.weight.grad - both.weight.grad).norm() / both.weight.grad.norm()) < 0.02
    torch.testing.assert_close(own.bias.grad, both.bias.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.running_var, both.running_var, rtol=1e-4, atol=1e-4)


def sync_batch_norm_observed(rank):
    """Each backward pass of the norm sums once, also if one process has an empty batch or no probe."""
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 5, 3), nn.SyncBatchNorm(5), nn.Tanh(), nn.Conv1d(5, 5, 1)
    module = nn.Sequential(*layers)
    controller = fewbit.compress_(
        module, fewbit.AdaptiveBits(2.5, interval=1 + rank), verbose=False
    )
    with (
        _synchronized_on_the_cpu(),
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
    ):
        for step in range(6):
            x = torch.randn(4 if (step + rank) % 3 else 0, 3, 40)
            module(x).square().sum().backward()
    assert sums.call_count == 6
    bits = {row.name: row.bits for row in controller.allocation}
    assert bits["1"] == 2.5 and len(bits) == 3


CASES = (
    ddp_saves,
    sharded_saves,
    adapting,
    adapting_within,
    adapting_sharded,
    bounded,
    bounded_sharded,
    stages,
    resumed_policy,
    adapting_parts,
    sync_batch_norm,
    sync_batch_norm_observed,
)
