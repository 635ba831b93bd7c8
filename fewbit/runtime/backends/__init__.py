"""Backends: the functions that compress tensors on one type of device, as compiled kernels or in plain torch.

A backend has the attributes that the module `reference` lists in `__all__` and documents. All backends return the same
codes, ranges and dequantized values, bit for bit, except that `forward`, `forward_quantized` and `batch_norm_backward`
return None in a backend without such a pass, and that `squares` and `batch_norm_backward` add up in an order of their
own. To add a backend, write a new file here and let `_choose` select it by device.
"""

from __future__ import annotations

import warnings

import torch

from fewbit.runtime.backends import reference


class _Backends(dict):
    """{device: its backend}, the compiled kernels or else the reference backend, chosen when a device is first asked for.

    If compiled kernels exist for this type of device but cannot run, the choice warns.
    """

    def __missing__(self, device: torch.device):
        self[device] = _choose(device)
        return self[device]


on = _Backends()


def _choose(device: torch.device):
    if device.type not in ("cpu", "cuda"):
        return reference
    try:
        from fewbit.runtime.backends import native
    except ImportError as error:
        return _fall_back(device, f"its compiled kernels cannot be imported ({error})")
    if device.type == "cpu":
        chosen = native.cpu()
    else:
        reason = native.cuda_unusable(device)
        if reason:
            return _fall_back(device, reason)
        chosen = native.cuda()
    chosen.register_ops()
    return chosen


def _fall_back(device: torch.device, reason: str):
    warnings.warn(
        f"fewbit uses its slower reference backend on {device}: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return reference
