"""Copies whose bits, or whose slot codec, a policy has chosen for this forward pass."""

from __future__ import annotations

import torch

from fewbit.runtime.format import groups, layout
from fewbit.runtime.format.tensor_checks import seed_on
from fewbit.runtime.interop.checkpoint import in_backward
from fewbit.runtime.ops import quantizer_ops
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.codec import CodecSpec, SlotCodec
from fewbit.runtime.quantizers.spec import (
    QuantizationRecord,
    QuantizedTensorSpec,
    SavedTensors,
    spec_of,
)
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.assignment import REENTRANT


def quantize_slot(
    quantizer, x, seed, dtype, number, normalize, input_dtype, kind, mask, channels, assignment
):
    """Quantize a plain tensor x with the bits or the slot codec of its slot, input number `number` of the layer.

    `normalize` has no channels. The values are dequantized in `dtype`.
    """
    average = (
        quantizer.bits_of(number, quantizer.average) if quantizer.is_fixed else quantizer.average
    )
    slot = assignment.slot((quantizer.name, number), average, quantizer.is_fixed, kind)
    samples = assignment.samples_of(x, quantizer.name if number == 0 else "")
    codecs = assignment.codecs
    codec = codecs[slot.name] if slot.name in codecs and not quantizer.is_fixed else None
    probe, sensitivities = assignment.probe, None
    is_observed = probe is not None or assignment.numbers is not None
    # Short samples of different bits do not lie side by side in a group.
    is_short = samples is not None and x.numel() < samples * groups.LEAST_FEATURES
    if channels and codec is None and not is_short:
        normalize = copies.with_channels(x, normalize, channels)
    how = quantizer.group_size, normalize
    has_channels = normalize is not None and normalize.channels is not None
    stride = None if x.is_contiguous() else layout.by_sample_stride(x)
    of_copy = quantizer.group_size, kind, mask is not None, has_channels, samples
    bits = slot.uniform()
    spec = spec_of(x.shape, stride, dtype, bits, *of_copy)
    if codec is not None:
        tensors, spec = _quantize_by_codec(codec, x, seed, spec, normalize, input_dtype)
        if samples is not None and probe is not None:
            sensitivities = quantizer_ops.sensitivities(x, slot, samples, *how, kind)
    elif samples is None:
        tensors = quantizer_ops.quantize(x, seed, bits, *how, kind=kind)
    else:
        *tensors, sensitivities = quantizer_ops.quantize_samples(x, seed, slot, samples, *how, kind)
    if codec is None:
        if has_channels:
            tensors = (*tensors, normalize.channels)
        if mask is not None:
            tensors = (*tensors, mask)
    if is_observed:
        spec = spec.with_slot(slot)
    if (probe is not None or assignment.unobserved) and x.numel():
        _report_unobserved(quantizer, assignment, slot)
    if probe is not None and x.numel() and not in_backward():
        record = QuantizationRecord(x.detach(), tuple(tensors), spec, *how)
        # A torch function mode would be called for every operation here, but has nothing to replace.
        with torch._C.DisableTorchFunction():
            probe.record_saved(slot, x.numel(), sensitivities)
            found = probe.record_rounding(slot, record)
        spec = spec.with_slot(slot._replace(rounding=found))
    if offload.running.entered:
        offload.mark(*tensors)
    return SavedTensors(tuple(tensors), spec, None, spec.slot is not None)


def _report_unobserved(quantizer, assignment, slot) -> None:
    reason, probe = assignment.unobserved, assignment.probe
    if probe is not None and in_backward() and not probe.knows(slot.name):
        reason = REENTRANT
    if reason and not slot.is_fixed:
        quantizer.context.policy.report_unobserved(quantizer.name, reason)


def _quantize_by_codec(
    codec: SlotCodec, x, seed, spec: QuantizedTensorSpec, normalize, input_dtype
):
    """Save x, or x normalized, with a slot codec. Return (tensors to save, spec)."""
    values = x.detach()
    if normalize is not None:
        values = QuantizationRecord(values, (), spec, spec.group_size, normalize).exact()
    tensors, inner = codec.quantize(values.to(input_dtype), seed_on(values.device, seed))
    return tuple(tensors), CodecSpec(inner, spec)
