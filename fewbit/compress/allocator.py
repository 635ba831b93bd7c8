"""PyTorch's expandable segments, with which freed CUDA memory of one size can be used for tensors of another size.

They take the place of ActNN's level L5 (section 5.2).
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass

import torch

from fewbit.errors import InputError
from fewbit.render.formats import amount

SETTING = "expandable_segments"
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, repr=False)
class AllocatorReport:
    """The result of `use_expandable_segments`.

    Attributes:
        in_force: whether the allocator reserves memory in expandable segments from now on.
        fixed: the bytes reserved earlier in segments of a fixed size, which stay until `torch.cuda.empty_cache()` frees
            them.
        reason: the reason why expandable segments are not in force, or "".
    """

    in_force: bool
    fixed: int = 0
    reason: str = ""

    def __repr__(self) -> str:
        if not self.in_force:
            return f"expandable segments: not in force, {self.reason}"
        if self.fixed:
            return (
                f"expandable segments: in force from now on; set too late for {amount(self.fixed)} "
                "that were reserved before"
            )
        return "expandable segments: in force for all memory"


@dataclass(frozen=True, repr=False)
class PeakMemory:
    """The peaks of one device's memory since the last `torch.cuda.reset_peak_memory_stats`.

    Attributes:
        allocated: the largest number of bytes that tensors occupied at one time.
        reserved: the largest number of bytes that the allocator had reserved at one time.
    """

    device: str
    allocated: int
    reserved: int

    @property
    def ratio(self) -> float:
        """`reserved` divided by `allocated`, at least 1; 1 if nothing was allocated."""
        return self.reserved / self.allocated if self.allocated else 1.0

    def __repr__(self) -> str:
        return (
            f"peak memory on {self.device}: {amount(self.allocated)} allocated, "
            f"{amount(self.reserved)} reserved ({self.ratio:.2f} times as much)"
        )


def use_expandable_segments() -> AllocatorReport:
    """Make the CUDA caching allocator of this process use expandable segments; other settings are kept.

    Call this before the first tensor is on the GPU, because existing segments do not change. Nothing changes if there
    is no GPU, or if an environment variable such as PYTORCH_CUDA_ALLOC_CONF contains `expandable_segments:False`.

    Returns:
        A report that says whether the setting is in force, and if not, why.
    """
    if not torch.cuda.is_available():
        return AllocatorReport(False, reason="there is no CUDA device")
    torch.cuda.init()
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return AllocatorReport(False, reason=f"the allocator is {backend}, which has no segments")
    if not _state().in_force:
        for name in VARIABLES:
            if re.search(rf"\b{SETTING}\s*:\s*False\b", os.environ.get(name, "")):
                return AllocatorReport(False, reason=f"{name} says {SETTING}:False")
        try:
            _set(f"{SETTING}:True")
        except (AttributeError, RuntimeError, ValueError) as error:
            line = str(error).partition("\n")[0]
            return AllocatorReport(False, reason=f"PyTorch refused to set them: {line}")
    return _state()


def peak_memory(device=None) -> PeakMemory:
    """Return the peaks of a GPU's memory since the last `torch.cuda.reset_peak_memory_stats`, or raise InputError."""
    try:
        found = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError):
        raise InputError(f"expected a CUDA device, got {device!r}") from None
    if found.type != "cuda":
        raise InputError(f"expected a CUDA device, got {str(found)!r}")
    if not torch.cuda.is_available():
        raise InputError(
            f"expected a CUDA device, got {str(found)!r}, and torch finds no CUDA device"
        )
    stats = torch.cuda.memory_stats(found)
    allocated, reserved = (
        stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved")
    )
    return PeakMemory(str(found), allocated, reserved)


def _state() -> AllocatorReport:
    snapshot = torch.cuda.memory._snapshot()
    if not snapshot["allocator_settings"].get(SETTING, False):
        return AllocatorReport(False, reason="PyTorch has none on this platform")
    segments = (part for part in snapshot["segments"] if not part["is_expandable"])
    fixed = sum(segment["total_size"] for segment in segments)
    return AllocatorReport(True, fixed)


def _set(setting: str) -> None:
    """Add an allocator setting to those in force, all of which are passed: PyTorch resets those that a call omits."""
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    before = next((settings[name] for name in VARIABLES if settings.get(name)), "")
    setting = f"{before},{setting}" if before else setting
    generic = getattr(
        torch._C, "_accelerator_setAllocatorSettings", None
    )  # newer versions of torch
    if generic is not None:
        generic(setting)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(setting)
