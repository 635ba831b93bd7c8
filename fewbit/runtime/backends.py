"""Which backend serves a device. Nothing here is configured: the best one that works is taken.

A backend has pack, unpack, encode, decode_mul and forward, with the signatures of `reference`.
"""

from __future__ import annotations

import warnings

import torch

from fewbit.runtime import reference

_chosen: dict[str, object] = {}


def of(tensor: torch.Tensor):
    """The backend of the tensor's device: compiled kernels, or the reference backend and one warning."""
    kind = tensor.device.type
    backend = _chosen.get(kind)
    if backend is None:
        backend = _chosen[kind] = _choose(kind)
    return backend


def _choose(kind: str):
    if kind not in ("cpu", "cuda"):
        return reference
    try:
        from fewbit.runtime import native
    except ImportError as error:
        return _fall_back(kind, f"its compiled kernels cannot be imported ({error})")
    if kind == "cpu":
        return native.cpu()
    reason = native.cuda_unusable()
    return _fall_back(kind, reason) if reason else native.cuda()


def _fall_back(kind: str, reason: str):
    warnings.warn(
        f"fewbit uses its slower reference backend on {kind}: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return reference
