"""The messages of `fewbit.fit_` for a memory in which nothing fits: how much is needed, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fewbit.analysis.gradients import size_of, tensors_of
from fewbit.errors import FewbitError
from fewbit.planning.block_steps import FakeBlockSteps, OptimizerBytes
from fewbit.planning.largest import largest
from fewbit.render.formats import amount, digits
from fewbit.sizes import counted

if TYPE_CHECKING:
    from fewbit.planning.fit import Chosen, Search

MATTERS = 0.25
"""The part of the missing memory that a piece of advice frees at least."""
MORE = 1.1
"""The factor between a measured error and the bound that is advised, for other random rounding."""
FAKE = 0.98
"""The part of the memory that a smaller batch may take on fake tensors."""


def fixed_shortage(optimizer: OptimizerBytes, model, sample, capacity: int, processes) -> str:
    """Return the message for a memory that does not hold weights, gradients and the optimizer's state."""
    least = max(optimizer.update(sample, processes), capacity + 1)
    batch = sum(tensor.nbytes for tensor in tensors_of(sample))
    missing = MATTERS * (least - capacity)
    helps = _lighter_training(optimizer, model, processes, missing)
    with_batch = ""
    if batch >= missing:
        with_batch = ", the batch"
        if size_of(sample) > 1:
            helps.insert(0, "a smaller batch")
    if any(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters()):
        helps.append("weights in 16 bits")
    return (
        f"memory: expected at least {amount(least)} for weights, gradients{with_batch} and {optimizer.name} alone, got "
        f"{amount(capacity)}{_would_help(helps)}"
    )


def _lighter_training(optimizer: OptimizerBytes, model, processes, missing: float) -> list[str]:
    """Return changes that free at least `missing` bytes of gradients and of the optimizer's state in a process."""
    state, gradients = (size // processes.shards for size in (optimizer.state, optimizer.gradients))
    helps = []
    if state and state >= missing:
        helps.append(f"an optimizer without state ({amount(state)} less than {optimizer.name})")
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    if is_whole and state + gradients >= missing:
        helps.append(f"LoRA (up to {amount(state + gradients)} less for gradients and state)")
    return helps


def _would_help(helps: list[str]) -> str:
    return f"; {' or '.join(helps)} would help" if helps else ""


def _smaller_batch(
    search: Search, least: Chosen, sample, capacity: int, steps: FakeBlockSteps
) -> list[str]:
    """Return the largest batch with which the settings with the least peak fit, if there is one."""
    found, size = search.examination, size_of(sample)
    if size == 1:
        return []

    def peak_of(samples: int) -> int | None:
        try:
            peak = steps.timeline_of(least.settings, samples).peak().size
        except (RuntimeError, FewbitError):  # for example, values decide shapes
            return None
        return max(peak, found.optimizer.update(sample, found.processes, samples / size))

    first = peak_of(size)
    if first is None:
        return ["a smaller batch"]
    # Steps on fake tensors take nearly, but not exactly, what real ones take.
    limit = int(FAKE * capacity * min(first / least.peak, 1.0))
    fitting = largest(peak_of, size, max(first, limit + 1), limit, size)
    return [f"{counted(fitting, 'sample')} in place of {size}"] if fitting else []


def shortage(
    search: Search, relaxed: Chosen | None, model, sample, capacity: int, steps: FakeBlockSteps
) -> str:
    """Return the message for a memory in which no choice fits; `relaxed` is the fastest one that fits, whatever its error."""
    found, least = search.examination, search.smallest()
    if least is None:
        return f"error: expected a bound that some settings keep, got {search.error:g}"
    if least.peak <= capacity and least.error > search.error:
        return (
            f"error: expected at least about {digits(least.error * MORE)} with memory={amount(capacity)} for this model and "
            f"sample, got {search.error:g}"
        )
    helps = []
    if relaxed is not None:
        helps.append(f"error={digits(relaxed.error * MORE)}")
    if not least.error > search.error:  # also if it is not known
        helps += _smaller_batch(search, least, sample, capacity, steps)
    missing = MATTERS * (least.peak - capacity)
    helps += _lighter_training(found.optimizer, model, found.processes, missing)
    if not found.paths and not found.repeated:
        helps.append("blocks to compute again (name them in the argument blocks)")
    expected = amount(max(int(least.peak), capacity + 1))
    return f"memory: expected at least about {expected} for this model and sample, got {amount(capacity)}{_would_help(helps)}"
