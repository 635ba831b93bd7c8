"""Context parallelism in two processes: each has half of every sequence.

torch's kernels that exchange keys and values exist on GPUs only. On the CPU, this file supplies an attention that gathers all
keys and values, so that the rest of torch's `context_parallel` runs.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from language_model import (
    CLASSES,
    TOKENS,
    WIDTH,
    batch,
    check,
    compressed,
    gradients_of,
    loss_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention

import fewbit
from fewbit.errors import InputError

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _gathered(op, args, kwargs):
    """Run an op of attention on whole tensors, and return the parts of its results that belong to this process."""
    calls.append(op)
    first = args[0]
    args = [x.full_tensor() if isinstance(x, DTensor) else x for x in args]
    size, rank = dist.get_world_size(), dist.get_rank()
    results = [y.chunk(size, 2)[rank].contiguous() for y in op(*args, **kwargs)]
    return tuple(DTensor.from_local(y, first.device_mesh, first.placements) for y in results)


calls = []


@contextmanager
def _context(tokens, targets):
    mesh = init_device_mesh("cpu", (2,))
    handlers = dict.fromkeys((_FORWARD, _BACKWARD), _gathered)
    with (
        patch.dict(_attention.custom_ops, handlers),
        patch.object(_attention._cp_options, "enable_load_balance", False),
        context_parallel(mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1]),
    ):
        yield


def _step(module):
    tokens, targets = (part.clone() for part in batch())
    calls.clear()
    with _context(tokens, targets):
        assert tokens.shape[1] == TOKENS // 2
        (loss_of(module(tokens), targets) / 2).backward()
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    return gradients_of(module)


def functions(rank):
    """The model calls torch's function of attention."""

    def run(module):
        compressed(module)
        found = _step(module)
        assert calls == [_FORWARD] * 2 + [_BACKWARD] * 2
        return found

    check(run)


class _Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, tokens, need_weights=False):
        x = self.embedding(tokens)
        return self.head(self.attention(x, x, x, need_weights=need_weights)[0])


def modules(rank):
    """fewbit's MultiheadAttention calls torch's function too, not its own, which knows half of the keys."""

    def make():
        torch.manual_seed(0)
        return _Attending()

    exact = make()
    tokens, targets = batch()
    loss_of(exact(tokens), targets).backward()
    expected = gradients_of(exact)
    module = make()
    compressed(module)
    assert isinstance(module.attention, fewbit.nn.MultiheadAttention)
    found = _step(module)
    assert calls == [_FORWARD, _BACKWARD]
    for name in ("attention.in_proj_weight", "attention.out_proj.weight", "embedding.weight"):
        error = float((found[name] - expected[name]).norm() / expected[name].norm())
        assert error < 0.02, (name, error)
    tokens, targets = (part.clone() for part in batch())
    with _context(tokens, targets):
        try:
            module(tokens, need_weights=True)
        except InputError as error:
            assert "need_weights=False" in str(error) and "\n" not in str(error)
        else:
            raise AssertionError("weights of half of the keys were returned")


CASES = (functions, modules)
