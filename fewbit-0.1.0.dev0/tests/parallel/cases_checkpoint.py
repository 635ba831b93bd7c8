"""`torch.distributed.checkpoint` in two processes: a stopped training continues with the same losses and bits."""

import json
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_tensor import mesh_of, parallel
from language_model import batch, loss_of, model, share
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fewbit


def _start(sizes, bits):
    module = model(activation=nn.GELU)
    controller = fewbit.compress_(module, bits, verbose=False)
    mesh = mesh_of(*sizes)
    parallel(module, mesh["tensor"])
    for block in module.blocks.values():
        fully_shard(block, mesh=mesh["data"])
    fully_shard(module, mesh=mesh["data"])
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return module, controller, torch.optim.Adam(weights, 0.01)


def _state(module, controller, optimizer, rank):
    of_model, of_optimizer = get_state_dict(module, optimizer)
    fewbits = json.dumps(controller.state_dict())
    return {
        "model": of_model,
        "optimizer": of_optimizer,
        f"fewbit.{rank}": fewbits,
        f"generator.{rank}": torch.get_rng_state(),
    }


def _train(module, optimizer, data, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module(data[0]), data[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _resume(rank, bits):
    for sizes in ((1, 2), (2, 1)):
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder)
        data = share(rank) if sizes[0] == 2 else batch()
        torch.manual_seed(1 + rank)
        module, controller, optimizer = _start(sizes, bits)
        _train(module, optimizer, data, 3)
        dcp.save(_state(module, controller, optimizer, rank), checkpoint_id=folder[0])
        expected = _train(module, optimizer, data, 3)
        rows = [(row.name, row.bits) for row in controller.allocation]
        torch.manual_seed(7)
        module, controller, optimizer = _start(sizes, bits)
        state = _state(module, controller, optimizer, rank)
        dcp.load(state, checkpoint_id=folder[0])
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(module, optimizer, **states)
        controller.load_state_dict(json.loads(state[f"fewbit.{rank}"]))
        torch.set_rng_state(state[f"generator.{rank}"])
        assert _train(module, optimizer, data, 3) == expected, (sizes, expected)
        assert [(row.name, row.bits) for row in controller.allocation] == rows


def resumed(rank):
    """With fixed bits."""
    _resume(rank, 2)


def resumed_adaptive(rank):
    """With bits that were measured before the training stopped."""
    _resume(rank, fewbit.AdaptiveBits(2.5, interval=2))


def resumed_error_bound(rank):
    """With error bounds, of which every process has its own measurements."""
    _resume(rank, fewbit.ErrorBound(interval=2))


CASES = (resumed, resumed_adaptive, resumed_error_bound)
