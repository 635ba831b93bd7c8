"""Tensor parallelism in two processes: `parallelize_module`, with sequence parallelism, and with `fully_shard`."""

import torch
import torch.distributed as dist
from language_model import (
    batch,
    check,
    compressed,
    exact_gradients,
    gradients_of,
    local_bytes,
    loss_of,
    model,
    share,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fewbit


def mesh_of(*sizes):
    names = ("tensor",) if len(sizes) == 1 else ("data", "tensor")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def parallel(module, mesh, is_local=True, head=None):
    """Distribute the layers of a language model over the mesh. The tensors between the blocks are replicated."""
    columns = ColwiseParallel(use_local_output=is_local)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": head or ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, plan)
    for block in module.blocks.values():
        names = "attention.query", "attention.key", "attention.value", "up"
        rows = dict.fromkeys(("attention.out", "down"), RowwiseParallel())
        parallelize_module(block, mesh, dict.fromkeys(names, columns) | rows)
    return module


def sequence_parallel(module, mesh, is_local=True):
    """Distribute the layers over the mesh. The tensors between the blocks are sharded along the sequence."""
    columns = ColwiseParallel(use_local_output=is_local)
    parts = Shard(1)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=parts),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=parts, output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, plan)
    whole = PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(Replicate(),))
    plan = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": whole,
        "attention.query": columns,
        "attention.key": columns,
        "attention.value": columns,
        "attention.out": RowwiseParallel(output_layouts=parts),
        "up": ColwiseParallel(input_layouts=parts, use_local_output=is_local),
        "down": RowwiseParallel(output_layouts=parts),
    }
    for block in module.blocks.values():
        parallelize_module(block, mesh, plan)
    return module


def _step(module, data=None):
    tokens, targets = data or batch()
    loss_of(module(tokens), targets).backward()
    return gradients_of(module)


def tensor_parallel(rank):
    """With `compress_` before or after, and DTensors or local tensors between the layers."""
    mesh = mesh_of(2)
    for is_local in (True, False):
        for distribute in (parallel, sequence_parallel):

            def first(module, distribute=distribute, is_local=is_local):
                compressed(module)
                return _step(distribute(module, mesh, is_local))

            def later(module, distribute=distribute, is_local=is_local):
                distribute(module, mesh, is_local)
                compressed(module)
                return _step(module)

            check(first)
            check(later)


def fewer_bytes(rank):
    """Every process saves few bits of its own shards."""
    mesh = mesh_of(2)
    for is_local in (True, False):
        for distribute in (parallel, sequence_parallel):
            found = {}
            for bits in (None, 4):
                module = model(activation=nn.GELU)
                if bits is not None:
                    fewbit.compress_(module, bits, verbose=False)
                # torch has no attention of DTensors on the CPU
                distribute(module, mesh, is_local or bits is None)
                found[bits] = local_bytes(module, batch()[0])
            # Only the deviations of the norms' rows remain in float32: one of 64 elements.
            assert found[4]["floats"] < 0.02 * found[None]["floats"], found
            assert found[4]["codes"] < 0.2 * found[None]["floats"], found


def replicas_stay_equal(rank):
    """Replicated parameters stay equal to the bit in training with 2 bits, although the generators differ."""
    for distribute in (parallel, sequence_parallel):
        for sizes in ((2,), (1, 2)):
            for bits in (2, fewbit.AdaptiveBits(2.5, interval=2), fewbit.ErrorBound(interval=2)):
                _train_replicas(rank, distribute, mesh_of(*sizes), bits)


def _train_replicas(rank, distribute, mesh, bits):
    module = model(activation=nn.GELU)
    controller = fewbit.compress_(module, bits, verbose=False)
    distribute(module, mesh["tensor"])
    if mesh.ndim == 2:
        for block in module.blocks.values():
            fully_shard(block, mesh=mesh["data"])
        fully_shard(module, mesh=mesh["data"])
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    before = {name: _local(value).clone() for name, value in module.named_parameters()}
    for _ in range(6):
        optimizer.zero_grad()
        tokens, targets = batch()
        loss_of(module(tokens), targets).backward()
        optimizer.step()
    compared = 0
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        own = _local(parameter)
        assert not torch.equal(own, before[name]), name
        is_replica = not isinstance(parameter, DTensor) or all(
            placement.is_replicate()
            for placement, size in zip(
                parameter.placements, parameter.device_mesh.shape, strict=True
            )
            if size > 1
        )
        if is_replica:
            both = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(both, own.contiguous())
            assert torch.equal(*both), name
            compared += 1
    assert compared >= 8, compared
    found = [None, None]
    dist.all_gather_object(found, [(row.name, row.bits) for row in controller.allocation])
    assert found[0] == found[1]


def _local(parameter):
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def with_a_parallel_loss(rank):
    """The logits stay sharded along the classes, and torch's `loss_parallel` computes the loss."""
    mesh = mesh_of(2)

    def run(module):
        compressed(module)
        parallel(module, mesh, head=ColwiseParallel(use_local_output=False))
        tokens, targets = batch()
        with loss_parallel():
            loss_of(module(tokens), targets).backward()
        return gradients_of(module)

    check(run)


def with_checkpoints(rank):
    """The blocks are recomputed, with the collectives in them."""
    mesh = mesh_of(2)
    for distribute in (parallel, sequence_parallel):
        for is_reentrant in (False, True):

            def run(module, distribute=distribute, is_reentrant=is_reentrant):
                compressed(module)
                distribute(module, mesh)
                tokens, targets = batch()
                x = module.embedding(tokens)
                for block in module.blocks.values():
                    x = checkpoint(block, x, use_reentrant=is_reentrant)
                loss_of(module.head(module.norm(x)), targets).backward()
                return gradients_of(module)

            check(run)


def with_fully_shard(rank):
    """Meshes of two dimensions: both processes in tensor parallelism, or both in data parallelism."""
    for sizes in ((1, 2), (2, 1)):
        mesh = mesh_of(*sizes)
        for distribute in (parallel, sequence_parallel):

            def run(module, mesh=mesh, distribute=distribute, sizes=sizes):
                compressed(module)
                distribute(module, mesh["tensor"])
                for block in module.blocks.values():
                    fully_shard(block, mesh=mesh["data"])
                fully_shard(module, mesh=mesh["data"])
                return _step(module, share(rank) if sizes[0] == 2 else None)

            check(run)


def gated_units(rank):
    """A gated unit of Llama, whose product is computed from DTensors."""
    mesh = mesh_of(2)

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
            self.down = nn.Linear(128, 64, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    def make():
        torch.manual_seed(0)
        return nn.Sequential(Unit(), Unit())

    x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(2))
    exact = make()
    exact(x).square().mean().backward()
    expected = gradients_of(exact)
    module = make()
    fewbit.compress_(module, 8, layers={"activation_bits": 8}, verbose=False)
    columns = ColwiseParallel(use_local_output=False)
    for unit in module:
        plan = {"gate": columns, "up": columns, "down": RowwiseParallel()}
        parallelize_module(unit, mesh, plan)
    assert local_bytes(module, x)["floats"] == 0
    module(x).square().mean().backward()
    for name, gradient in gradients_of(module).items():
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert 1e-5 < error < 0.02, (name, error)


def other_functions_stay_exact(rank):
    """Functions of DTensors that are not computed from local tensors have torch's results and gradients, to the bit."""
    mesh = mesh_of(2)

    class Odd(nn.Module):
        def forward(self, x):
            x = F.softmax(x, -1) + F.relu(x)
            return F.log_softmax(x.transpose(1, 2).matmul(x), 1)

    x = torch.randn(8, 16, 16, generator=torch.Generator().manual_seed(2))
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        gradients = []
        for bits in (None, 2):
            module = Odd()
            if bits:
                fewbit.compress_(module, bits, verbose=False)
            whole = distribute_tensor(x, mesh, [placement]).requires_grad_()
            module(whole).square().sum().backward()
            gradients.append(whole.grad.full_tensor())
        assert torch.equal(*gradients), placement


def compiled(rank):
    """In compiled code, layers with DTensors run torch's own functions, and other layers save few bits."""
    options = {"activation": nn.GELU, "blocks": 1}
    expected = exact_gradients(**options)
    module = model(**options)
    compressed(module)
    sequence_parallel(module, mesh_of(2))
    for name, gradient in _step(torch.compile(module, backend="aot_eager")).items():
        name = name.removeprefix("_orig_mod.")
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert error < 0.03, (name, error)


CASES = (
    tensor_parallel,
    fewer_bytes,
    replicas_stay_equal,
    with_a_parallel_loss,
    with_checkpoints,
    with_fully_shard,
    gated_units,
    other_functions_stay_exact,
    compiled,
)
