"""The processes that train one model together, and the exchange of measurements between them."""

from __future__ import annotations

from torch import distributed

from fewbit.runtime.parallel.process_groups import is_distributed_run, process_groups

LAG = 4
"""The number of forward passes from a measurement's end to its use, the same in several processes on GPUs."""


def groups_of(module) -> tuple:
    """Return the process groups over which measurements are gathered, tensor parallelism included; () for one process."""
    if not is_distributed_run():
        return ()
    groups = process_groups(module)
    return groups.data + groups.tensor


def lag_of(module, groups) -> int:
    """Return the lag of a measurement in a forward pass of `module` that several processes run."""
    parameter = next(module.parameters(), None)
    kind = "cpu" if parameter is None else parameter.device.type
    reached = [device.type for device in groups[0]._device_types]
    # The device of parameters that were offloaded to the host is not the one on which collectives run.
    return LAG if (kind if kind in reached else reached[0]) == "cuda" else 0


def gather(value, groups) -> list:
    """Return the values of all processes, in the same order in all."""
    values = [value]
    for group in groups:
        parts = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(parts, values, group=group)
        values = [value for part in parts for value in part]
    return values
