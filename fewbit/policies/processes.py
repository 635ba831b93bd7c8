"""The processes that train one model together, and the exchange of measurements between them."""

from __future__ import annotations

import torch
from torch import distributed

LAG = 4
"""The number of forward passes from the end of a measurement to its use, if several processes train on GPUs.

All processes have to use the numbers in the same step, so no process may use them as soon as they reach its host."""


def groups_of(module) -> tuple:
    """Return the process groups over which measurements are gathered; () for a single process.

    With DistributedDataParallel this is the process group of the wrapper whose forward pass runs. With fully_shard
    these are the groups of the mesh over which the parameters are distributed.

    Args:
        module: the module whose forward pass runs.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return ()
    from torch.nn.parallel import DistributedDataParallel

    running = DistributedDataParallel._active_ddp_module
    if isinstance(module, DistributedDataParallel):
        running = module
    groups = (running.process_group,) if running is not None else _sharded_over(module)
    return tuple(group for group in groups if distributed.get_world_size(group) > 1)


def _sharded_over(module) -> tuple:
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            parameters = getattr(child._get_fsdp_state(), "_fsdp_param_group", None)
            if parameters is not None:
                mesh = parameters.mesh_info.mesh
                return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    return ()


def lag_of(module, groups) -> int:
    """Return how many forward passes lie between the end of a measurement and its use in all processes.

    Args:
        module: the module that was measured.
        groups: the process groups that `groups_of` returned for the module.
    """
    if not groups:
        return 0
    parameter = next(module.parameters(), None)
    kind = "cpu" if parameter is None else parameter.device.type
    reached = [device.type for device in groups[0]._device_types]
    # The device of parameters that were offloaded to the host is not the one on which collectives run.
    return LAG if (kind if kind in reached else reached[0]) == "cuda" else 0


def gather(value, groups) -> list:
    """Wait until all processes have called this function, and return the list of their values.

    Args:
        value: the value of this process.
        groups: the process groups that `groups_of` returned.

    Returns:
        The list, in the same order in all processes.
    """
    values = [value]
    for group in groups:
        parts = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(parts, values, group=group)
        values = [value for part in parts for value in part]
    return values


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
