"""Which backend serves a device. Nothing here is configured: the best one that works is taken.

A backend has pack, unpack, encode, decode_mul and forward, with the signatures of `reference`.
"""

from __future__ import annotations

import warnings

import torch

from fewbit.runtime.backends import reference

_chosen: dict[torch.device, object] = {}


def of(tensor: torch.Tensor):
    """The backend of the tensor's device: compiled kernels, or the reference backend and one warning."""
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
