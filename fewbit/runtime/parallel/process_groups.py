"""The processes that train one model: process groups of DistributedDataParallel, `fully_shard` and tensor parallelism."""

from __future__ import annotations

import sys
from typing import NamedTuple

from torch import distributed
from torch.nn.parallel import DistributedDataParallel


class ProcessGroups(NamedTuple):
    """The groups of several processes that run one module.

    Attributes:
        data: the groups whose processes have the same parameters and different inputs.
        tensor: the groups whose processes have different shards of the parameters and the same inputs.
    """

    data: tuple = ()
    tensor: tuple = ()

    @property
    def data_rank(self) -> tuple[int, ...]:
        """The rank of this process in each group of `data`."""
        return tuple(distributed.get_rank(group) for group in self.data)


_IS_AVAILABLE = distributed.is_available()


def is_distributed_run() -> bool:
    """Return whether several processes may train a model."""
    return _IS_AVAILABLE and distributed.GroupMember.WORLD is not None


def running_replica() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward pass runs, or None."""
    return DistributedDataParallel._active_ddp_module


def is_sharded(module) -> bool:
    """Return whether FSDP has wrapped or sharded a module."""
    return any(cls.__module__.startswith("torch.distributed.fsdp") for cls in type(module).__mro__)


def process_groups(module) -> ProcessGroups:
    """Return the groups of processes that run the module's forward pass, if `is_distributed_run()`.

    `data` is that of DistributedDataParallel or of the mesh of `fully_shard`; `tensor` those of DTensors' other meshes.
    """
    running = module if isinstance(module, DistributedDataParallel) else running_replica()
    data = _sharded_over(module) if running is None else (running.process_group,)
    names = {group.group_name for group in data}
    tensor = [group for group in _tensor_groups_of(module) if group.group_name not in names]
    return ProcessGroups(_several(data), _several(tensor))


def _several(groups) -> tuple:
    return tuple(group for group in groups if distributed.get_world_size(group) > 1)


def _sharded_over(module) -> tuple:
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            meshes = _meshes_of_state(child._get_fsdp_state())
            if meshes:
                return _groups_of(meshes)
    return ()


def _meshes_of_state(state) -> list:
    if hasattr(state, "_fsdp_param_groups"):
        found = state._fsdp_param_groups
    else:  # older versions of torch have one mesh
        found = [state._fsdp_param_group]
    return [parameters.mesh_info.mesh for parameters in found if parameters is not None]


def _tensor_groups_of(module) -> tuple:
    library = sys.modules.get("torch.distributed.tensor")
    found = {}
    for parameter in module.parameters() if library is not None else ():
        if isinstance(parameter, library.DTensor):
            found[id(parameter.device_mesh)] = parameter.device_mesh
    return _groups_of(found.values())


def _groups_of(meshes) -> tuple:
    groups = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
    return tuple({group.group_name: group for group in groups}.values())
