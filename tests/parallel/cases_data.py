"""Data parallelism in two processes: DistributedDataParallel, `fully_shard` and FullyShardedDataParallel."""

from functools import partial

import torch
import torch.distributed as dist
from language_model import checked, compressed, gradients_of, loss_of, model, share
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fewbit


def _step(wrapped, rank):
    tokens, targets = share(rank)
    loss_of(wrapped(tokens), targets).backward()
    return gradients_of(wrapped)


def _shard(module, **options):
    for block in module.blocks.values():
        fully_shard(block, **options)
    fully_shard(module, **options)
    return module


@checked
def ddp(module, rank):
    """With DistributedDataParallel, gradients are those of both inputs."""
    compressed(module)
    return _step(DistributedDataParallel(module), rank)


@checked
def ddp_compressed_within(module, rank):
    """`compress_` also takes a module that is wrapped already."""
    wrapped = DistributedDataParallel(module)
    compressed(wrapped)
    return _step(wrapped, rank)


@checked
def ddp_accumulates(module, rank):
    """Microbatches in `no_sync` and one with synchronization give the gradient of all of them."""
    compressed(module)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    tokens, targets = (part.chunk(2) for part in share(rank))
    with wrapped.no_sync():
        (loss_of(wrapped(tokens[0]), targets[0]) / 2).backward()
    (loss_of(wrapped(tokens[1]), targets[1]) / 2).backward()
    return gradients_of(wrapped)


@checked
def ddp_static_graph(module, rank):
    """A static graph of DistributedDataParallel, with reentrant checkpoints, which need it."""
    for block in module.blocks.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    compressed(module)
    return _step(DistributedDataParallel(module, static_graph=True), rank)


@checked
def sharded(module, rank):
    """With `fully_shard`, of the blocks and of the model."""
    compressed(module)
    return _step(_shard(module), rank)


@checked
def sharded_first(module, rank):
    """`compress_` after `fully_shard`: torch's subclasses of layers are converted or stay exact, with right gradients."""
    _shard(module)
    compressed(module)
    return _step(module, rank)


@checked
def sharded_with_torchs_checkpoints(module, rank):
    compressed(module)
    blocks = set(module.blocks.values())
    apply_activation_checkpointing(module, check_fn=lambda child: child in blocks)
    return _step(_shard(module), rank)


@checked
def sharded_with_fewbits_checkpoints(module, rank):
    compressed(module)
    for block in module.blocks.values():
        block.forward = partial(fewbit.checkpoint, block.forward)
    return _step(_shard(module), rank)


@checked
def sharded_accumulates(module, rank):
    """Gradient accumulation of `fully_shard`, without synchronization and resharding in between."""
    compressed(module)
    _shard(module)
    tokens, targets = (part.chunk(2) for part in share(rank))
    for number in range(2):
        module.set_requires_gradient_sync(number == 1)
        module.set_reshard_after_backward(number == 1)
        (loss_of(module(tokens[number]), targets[number]) / 2).backward()
    return gradients_of(module)


def _sharded_and_replicated(module, rank, sizes):
    """With HSDP: a mesh of two dimensions, of which one has both processes."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
    compressed(module)
    return _step(_shard(module, mesh=mesh), rank)


@checked
def replicated_hsdp(module, rank):
    return _sharded_and_replicated(module, rank, (2, 1))


@checked
def sharded_hsdp(module, rank):
    return _sharded_and_replicated(module, rank, (1, 2))


@checked
def sharded_in_the_old_way(module, rank):
    """With FullyShardedDataParallel, whose flat parameters are views of one tensor."""
    compressed(module)
    policy = ModuleWrapPolicy({type(module.blocks["0"])})
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    wrapped = FullyShardedDataParallel(module, auto_wrap_policy=policy, **options)
    tokens, targets = share(rank)
    loss_of(wrapped(tokens), targets).backward()
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        return {name: grad.clone() for name, grad in gradients_of(wrapped).items()}


class Checkpointed(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def independent_rounding(rank):
    """Processes whose generators are in the same state round independently, so that averaging lowers the noise.

    Both processes get the same batch. Their gradients before the average would be equal otherwise.
    """
    tokens, targets = share(0)
    exact = model()
    loss_of(exact(tokens), targets).backward()
    exact = gradients_of(exact)["blocks.0.up.weight"]

    def in_place(module):
        compressed(module, bits=2)
        return module

    def noise(wrap, compress=in_place):
        module = model()
        wrapped = wrap(compress(module))
        torch.manual_seed(5)
        loss_of(wrapped(tokens), targets).backward()
        return gradients_of(module)["blocks.0.up.weight"] - exact

    alone = noise(lambda module: module)
    # Without a wrapper the processes know nothing of each other.
    everyone = [torch.empty_like(alone) for _ in range(2)]
    dist.all_gather(everyone, alone)
    assert torch.equal(*everyone)
    # The mean of two independent errors of the same size has half the squared size.
    for wrap in (DistributedDataParallel, _shard):
        ratio = float(noise(wrap).square().sum() / alone.square().sum())
        assert 0.35 < ratio < 0.65, ratio

    compiled = partial(fewbit.compile, bits=2, backend="aot_eager")
    for compress in (compiled, lambda module: Checkpointed(compiled(module))):
        alone = noise(lambda module: module, compress)
        ratio = noise(DistributedDataParallel, compress).square().sum() / alone.square().sum()
        assert 0.35 < float(ratio) < 0.65, ratio


CASES = (
    ddp, ddp_compressed_within, ddp_accumulates, ddp_static_graph, sharded, sharded_first, sharded_with_torchs_checkpoints,
    sharded_with_fewbits_checkpoints, sharded_accumulates, replicated_hsdp, sharded_hsdp, sharded_in_the_old_way,
    independent_rounding,
)  # fmt: skip
