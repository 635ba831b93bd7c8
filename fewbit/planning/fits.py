"""`fewbit.fits`: whether a training step fits in the memory of a device, before the device is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from fewbit.analysis.gradients import (
    check_loss,
    check_model,
    check_optimizer,
    explained,
    size_of,
    with_dict,
)
from fewbit.analysis.progress import StepsProgress
from fewbit.analysis.unchanged import unchanged
from fewbit.checkpointing import supports_checkpoints
from fewbit.config import FixedBits, PreActivationBits
from fewbit.errors import FewbitError, InputError
from fewbit.planning.candidates import CHECKPOINT, EXACT, Candidate, check_candidates
from fewbit.planning.fake_steps import PARTS, FakeTraining, length_of
from fewbit.planning.fits_result import Fit, FitRow
from fewbit.planning.largest import largest
from fewbit.planning.real_steps import naming
from fewbit.printable import one_line, shorten
from fewbit.runtime.saved.context import measuring
from fewbit.sizes import parse_size

LEAST_BYTES = 2**20
"""The least memory of a device; a smaller number probably means GiB."""
SETTINGS = (EXACT, 4, 2)
_METHODS = ("compress_", "replace_activations_", "checkpoint_", EXACT)
"""The methods of candidates that run on fake tensors."""


def fits(
    model: nn.Module,
    batch,
    loss: Callable | None = None,
    *,
    optimizer=torch.optim.AdamW,
    device: str | int | torch.device | None = None,
    settings: Iterable | None = None,
    sequence_dim: int | None = None,
    progress: bool = True,
) -> Fit:
    """Compute the memory that a training step takes, and the largest batch that fits in the memory of a device.

    The step runs on fake tensors, so the model may be too large for this machine. The model and torch's random state do not change.
    docs/guides/fits.md says what is counted.

    Args:
        model: A model in training mode, compressed already or not. Its tensors may be real, fake or on the meta device.
        batch: A batch, of which only shapes and dtypes count: a tensor, or tuples, lists and mappings of tensors, with
            samples in dimension 0. The tensors may be on the meta device.
        loss: Called as ``loss(model, batch)`` with a copy of the model; returns a scalar tensor. If None, the model is
            called with the batch (a tuple as positional and a mapping as keyword arguments). The loss is then the
            output if that is a scalar, else its attribute `loss`, else the mean of the output.
        optimizer: A class such as torch.optim.AdamW, a function that makes an optimizer from a list of parameters, or an
            optimizer of the model, which does not change.
        device: A size such as "24 GiB" (units are powers of 1024), a number of bytes, or a device that is there, whose
            whole memory counts. If None, the result has only the bytes. With a size, or a device that is no CPU, torch's
            optimizers and attention take the memory that they take on a GPU.
        settings: The settings to compare. Each is "exact"; "checkpoint", which is exact with the gradient checkpointing
            of transformers; a whole number of bits or a configuration with fixed bits; a `fewbit.Candidate`, or the result of
            `fewbit.fit_`. By default "exact", 4 and 2 bits, and for models of transformers that support it "checkpoint".
        sequence_dim: The dimension of the batch's tensors that has the sequence, for which the largest length is
            computed too, or None.
        progress: Whether to show a bar on standard error after two seconds.

    Raises:
        InputError: An argument is not valid, or the step cannot run on fake tensors, for example because an operation
            depends on values.
    """
    check_model(model)
    if loss is not None:
        check_loss(loss)
    check_optimizer(optimizer)
    capacity = capacity_of(device)
    on_gpu = _is_gpu(device, model)
    arms = _given(settings, model)
    batch = with_dict(batch)
    size = size_of(batch)
    length = most = None
    if sequence_dim is not None:
        if isinstance(sequence_dim, bool) or not isinstance(sequence_dim, int) or sequence_dim < 1:
            raise InputError(
                f"sequence_dim: expected an integer of at least 1, got {shorten(sequence_dim)}"
            )
        length, most = length_of(batch, sequence_dim), _most_sequence(model)
    if not size or length == 0:
        raise InputError("batch: expected at least one sample, got none")
    rows, name, bar = [], "", StepsProgress("fits", progress)
    done = partial(bar.step, len(arms) * (1 + (capacity is not None) * (1 + (length is not None))))
    search = _Search(batch, size, capacity, sequence_dim, length, most, done)
    with unchanged({}, []), measuring(), bar.shown():
        for arm in arms:
            training = FakeTraining(model, partial(_convert, arm), loss, optimizer, on_gpu)
            name = training.optimizer_name
            rows.append(search.row(_name_of(arm), training))
    limit = search.limits[0] if search.limits else None
    return Fit(type(model).__name__, name, capacity, size, length, most, tuple(rows), limit)


@dataclass(frozen=True)
class _Search:
    """The measurements that `fits` makes of every setting, in steps with `size` samples and sequences of `length`.

    Attributes:
        capacity: the bytes of the device, or None.
        most: the longest sequence that the model takes, or None.
        done: called after each part of the work.
        limits: the exceptions that limit the largest batch of a setting.
    """

    batch: object
    size: int
    capacity: int | None
    sequence_dim: int | None
    length: int | None
    most: int | None
    done: Callable[[], None]
    limits: list[str] = field(default_factory=list)

    def row(self, name: str, training: FakeTraining) -> FitRow:
        with explained(self.batch):
            training.step(self.batch)
            timeline = training.step(self.batch)  # the optimizer's state exists before this step
        found = timeline.peak()
        self.done()
        fitting = longest_batch = longest = None
        if self.capacity is not None:
            fitting = found.size <= self.capacity
            longest_batch, limit = self._largest(training, 0, self.size, found.size)
            if limit is not None:
                self.limits.append(limit)
            if self.sequence_dim is not None:
                most = None if self.most is None else max(self.most, self.length)
                place = self.sequence_dim, self.length
                longest, _ = self._largest(training, *place, found.size, most)
        return FitRow(
            setting=name,
            **{part: found.parts.get(part, 0) for part in PARTS},
            peak=found.size,
            phase=found.phase,
            all_gradients=training.gradient_bytes,
            all_saved=int(timeline.bytes_of([]).saved.sum()),
            fits=fitting,
            largest_batch=longest_batch,
            largest_sequence=longest,
        )

    def _largest(self, training, dim: int, size: int, peak: int, most=None) -> tuple:
        """Return the largest size of a dimension with which a step fits, and the exception of the next size, or None.

        `size` has the given peak.
        """
        failed = {}
        peak_of = partial(_peak, training, self.batch, dim, failed)
        found = largest(peak_of, size, peak, self.capacity, most)
        self.done()
        return found, failed.get(found + 1)


def _peak(training: FakeTraining, batch, dim: int, failed: dict[int, str], size: int) -> int | None:
    try:
        return training.peak(batch, dim, size)
    except Exception as error:  # for example, more tokens than the model has positions
        failed[size] = one_line(error)
        return None


# -- Settings --------------------------------------------------------------------------------------------------


def _given(settings, model: nn.Module) -> tuple[Candidate, ...]:
    """Return the settings' candidates. Raise InputError for one that cannot run on fake tensors."""
    if settings is None:
        settings = [*SETTINGS, *([CHECKPOINT] if supports_checkpoints(model) else [])]
    found = check_candidates(settings, "settings")
    for candidate in found:
        if not isinstance(candidate.bits, FixedBits | PreActivationBits):
            raise InputError(
                "settings: expected bits that do not depend on values, as FixedBits(2), because fits runs on fake "
                f"tensors; got {candidate.bits!r}"
            )
        if candidate.method not in _METHODS:
            raise InputError(
                f"settings: expected a Candidate with one of the methods {', '.join(_METHODS)}, got {candidate.method}"
            )
        if any(region.include is None for region in candidate.regions):
            if not supports_checkpoints(model):
                raise InputError(
                    f"settings: expected a model of transformers for {candidate.label!r}, got {type(model).__name__}"
                )
    return found


def _name_of(candidate: Candidate) -> str:
    policy = candidate.policy
    if not policy and not isinstance(candidate.bits, FixedBits):
        policy = type(candidate.bits).__name__
    return f"{policy}, {candidate.label}" if policy else candidate.label


def _convert(candidate: Candidate, model: nn.Module) -> None:
    with naming(candidate):
        candidate.apply(model)


# -- The device ------------------------------------------------------------------------------------------------


def check_memory(memory, bits) -> None:
    """Raise InputError if a training callback gets an invalid memory, or bits beside a memory."""
    if memory is not None and bits is not None:
        raise InputError(f"bits: expected none with memory={memory!r}, got {shorten(bits)}")
    capacity_of(memory, "memory")


def capacity_of(device, name: str = "device") -> int | None:
    """Return the bytes of a size, a number of bytes or a device, or None for None. Messages call the argument `name`."""
    if device is None:
        return None
    is_number = isinstance(device, int | float) and not isinstance(device, bool)
    if is_number and float(device).is_integer():
        if device < LEAST_BYTES:
            raise InputError(
                f"{name}: expected a size such as '24 GiB', or at least {LEAST_BYTES:,} bytes, got {device}"
            )
        return int(device)
    if isinstance(device, str) and device[:1].isalpha():
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise InputError(
                f"{name}: expected a size such as '24 GiB' or a device, got {shorten(device)}"
            ) from error
    if isinstance(device, str):
        try:
            return parse_size(device)
        except FewbitError as error:
            raise InputError(f"{name}: {error}") from None
    if not isinstance(device, torch.device):
        raise InputError(
            f"{name}: expected a size such as '24 GiB', a torch.device or None, got {shorten(device)}"
        )
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return torch.get_device_module(device).get_device_properties(device).total_memory
    except Exception as error:
        raise InputError(
            f"{name}: expected a device of this machine with a known memory, got {device} ({one_line(error)}); give "
            "a size such as '24 GiB'"
        ) from error


def _is_gpu(device, model: nn.Module) -> bool:
    if device is None:
        return next(model.parameters()).device.type not in ("cpu", "meta")
    return not str(device).startswith("cpu")


def _most_sequence(model: nn.Module) -> int | None:
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None
