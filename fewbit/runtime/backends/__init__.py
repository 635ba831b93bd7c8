"""Backends: the functions that compress tensors on one type of device, as compiled kernels or in plain torch.

A backend is an object with these attributes, which the module `reference` defines and documents:

    name                         the name in reports: "reference", "cuda" or an instruction set of the CPU
    pack, unpack                 store codes as bit-planes in int32 words, and read them back
    draw_seeds                   draw the seeds of a compiled model from a counter
    encode                       get the codes that a few-bit activation saves
    decode_mul                   get the gradient of the activation's input from these codes
    forward                      get the activation's result and its codes in one pass over memory
    quantize, dequantize         get codes and ranges of groups, and approximate values from them
    channel_statistics           get the means and the scales of a tensor's channels
    squares                      get the numbers that decide how a tensor's bits are shared among its samples
    share_bits                   get the bits of each sample from these numbers
    forward_quantized            `forward`, and `quantize` of the result, in one pass over memory
    can_quantize_result          tell whether `forward_quantized` has a pass for an activation
    batch_norm_backward          get batch norm's gradients from a rotated copy of its normalized input
    can_compute_batch_norm       tell whether `batch_norm_backward` has a kernel for a copy
    grid_fixed                   get the values that the fixed-point codes of a norm's channels stand for
    encode_fixed                 get the fixed-point codes of a norm's normalized input
    decode_fixed                 get approximate values from fixed-point codes
    mask_fixed                   get a ReLU's gradient from the signs in fixed-point codes

All backends return the same codes, ranges and dequantized values, bit for bit, except that `forward`,
`forward_quantized` and `batch_norm_backward` return None in a backend without such a pass, and that `squares` and
`batch_norm_backward` add up in an order of their own. To add a backend, write a new file here and let `_choose` select
it by device. This folder may import `runtime.format` and `runtime.interop`.
"""

from __future__ import annotations

import warnings

import torch

from fewbit.runtime.backends import reference

_chosen: dict[torch.device, object] = {}


def of(tensor: torch.Tensor):
    """Return the backend of the tensor's device: the compiled kernels, or else the reference backend.

    If compiled kernels exist for this type of device but cannot run, the first call for the device warns.
    """
    device = tensor.device
    if device not in _chosen:
        _chosen[device] = _choose(device)
    return _chosen[device]


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
