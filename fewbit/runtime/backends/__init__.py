"""Backends: the kernels of a device, compiled or in plain torch. The best backend that works is chosen for each device.

A backend is an object with these attributes. The module `reference` has and documents all of them:

    name                         for reports: "reference", "cuda" or an instruction set of the CPU
    pack, unpack                 codes to bit-planes, and back
    encode, decode_mul           the codes of a few-bit activation's input, and its gradient from these codes
    forward                      the activation's result and its codes in one pass, or None if there is no such pass
    quantize, dequantize         the group quantizer: codes and ranges of groups, and approximate values from them
    squares                      the numbers by which a tensor's bits are divided among its samples
    forward_quantized            `forward` and `quantize` of the result in one pass, or None if there is no such pass
    grid_fixed, encode_fixed     the grid and the codes of a pre-activation in fixed point
    decode_fixed, mask_fixed     values from these codes, and the gradient of the ReLU from their signs

Every function takes and returns tensors of one device, and has the signature that it has in `reference`. All backends
return the same codes, ranges and values, bit for bit. They differ in two things only. Some backends have passes that
others lack, see `reference.forward`. Only some know a tensor's smallest and largest element without waiting for the
device, see `results.QuantizedGroups.spread`.

To add a backend, write a new file here and let `_choose` select it by device. This folder may import `runtime.format`
and `runtime.interop`.
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
