"""Backends: the kernels of a device, compiled or in plain torch. The best backend that works is chosen for each device.

A backend has the functions of `reference`, with the same signatures. This folder may import `runtime.format` and
`runtime.interop`.
"""

from __future__ import annotations

import warnings

import torch

from fewbit.runtime.backends import reference

_chosen: dict[torch.device, object] = {}


def of(tensor: torch.Tensor):
    """Return the backend of the tensor's device: the compiled kernels, or the reference backend after one warning."""
    device = tensor.device
    backend = _chosen.get(device)
    if backend is None:
        backend = _chosen[device] = _choose(device)
    return backend


def _choose(device: torch.device):
    if device.type not in ("cpu", "cuda"):
        return reference
    try:
        from fewbit.runtime.backends import native
    except ImportError as error:
        return _fall_back(device, f"its compiled kernels cannot be imported ({error})")
    if device.type == "cpu":
        return native.cpu()
    reason = native.cuda_unusable(device)
    return _fall_back(device, reason) if reason else native.cuda()


def _fall_back(device: torch.device, reason: str):
    warnings.warn(
        f"fewbit uses its slower reference backend on {device}: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return reference
