"""The torch ops of the group quantizer, and their implementations, which eager mode calls directly.

quantize(x, stride, seed, bits, group_size, wide) -> packed, ranges, and a 1 to multiply the layer's result with
dequantize(packed, ranges, bits, group_size, size, stride, dtype) -> the values, with those strides

Both ops take the same strides, which define the order of the elements.
"""

from __future__ import annotations

import math

import torch
from torch.library import register_fake

from fewbit.runtime import backends
from fewbit.runtime.format import groups, layout
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.ops import define, keep_results
from fewbit.runtime.saved.assignment import split


def quantize(x, seed, bits, group_size, wide=None, normalize=None, widths=None, words=None):
    """(packed, ranges) of x (docs/quantizer.md).

    x: floating, any strides. seed: (1,) int64 on x's device. bits: 1 to 8, for all samples; or widths: (N,)
    uint8, for each, with the int32 words to allocate (`groups.mixed_words`, or more). wide: whether
    minimums are float32; None: where the tensor's offset asks for it (never on CUDA, where only a
    synchronization could tell: see `offset`). normalize: as in `reference.quantize`, for an x that is
    `layout.is_by_sample`.
    """
    x = x.detach()
    source = x if layout.is_by_sample(x) else x.contiguous()
    return _quantize(source, seed, bits, group_size, wide, widths, words, normalize)


def _quantize(source, seed, bits, group_size, wide, *rest):
    """`quantize` of a tensor that is dense, samples outermost; rest: widths, words, normalize."""
    backend = backends.of(source)
    packed, ranges, spread = backend.quantize(source, seed, bits, group_size, bool(wide), *rest)
    if wide is None and source.device.type == "cpu" and is_offset(*map(float, spread)):
        packed, ranges, _ = backend.quantize(source, seed, bits, group_size, True, *rest)
    return packed, ranges


def quantize_samples(x, seed, slot, samples, group_size, wide=None, normalize=None):
    """(packed, ranges, widths, sensitivities) of x, whose samples share the bits of a slot.

    widths: (samples,) uint8. sensitivities: (samples,) float32, which they are shared by.
    """
    source = _by_samples(x, samples)
    features = source.numel() // samples
    total = slot.total(samples)
    of_samples = _sensitivities(source, slot, group_size, normalize)
    widths = split(of_samples, total)
    words = groups.words_of_total(total, features)
    kept = quantize(source, seed, 0, group_size, wide, normalize, widths, words)
    return *kept, widths, of_samples


def sensitivities(x, slot, samples, group_size, wide=None, normalize=None):
    """(samples,) float32, which samples would share bits by, as in `quantize_samples`."""
    return _sensitivities(_by_samples(x, samples), slot, group_size, normalize)


def _by_samples(x, samples):
    """x with that many entries in dimension 0."""
    x = x.detach()
    source = x if layout.is_by_sample(x) else x.contiguous()
    return source if len(source) == samples else source.view(samples, -1)


def _sensitivities(source, slot, group_size, normalize):
    return slot.assignment.sensitivities(slot, squares(source, group_size, normalize))


def squares(x, group_size, normalize=None):
    """(N,) float32: of each sample of x, `layout.is_by_sample`, the sum over groups of length times range squared."""
    return backends.of(x).squares(x, group_size, normalize)


def rounding_variance(x, samples, group_size, wide, normalize, bits, generator):
    """(samples,) float32: of each sample of x the mean variance of an element that is rounded to so many bits.

    samples: None: as many as dimension 0 has. normalize: as for `quantize`. generator: (device) -> a generator of seeds.
    From two draws, so that neither the ranges nor the exact values are needed.
    """
    stride = layout.by_sample_stride(x)
    dtype = torch.promote_types(x.dtype, torch.float32)

    def drawn():
        seed = torch.randint(
            2**62, (1,), dtype=torch.int64, device=x.device, generator=generator(x.device)
        )
        kept = quantize(x, seed, bits, group_size, wide, normalize)
        return dequantize(*kept, bits, group_size, tuple(x.shape), stride, dtype)

    rows = layout.storage_order(drawn() - drawn()).view(samples or (len(x) if x.dim() else 1), -1)
    return (rows.square().mean(1) / 2).float()


def dequantize_samples(
    packed, ranges, widths, samples, group_size, size, stride, dtype, affine=None
):
    """The values of `quantize_samples`, as `dequantize`."""
    out = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    rows = out
    if len(out) != samples:
        rows = out.view(samples, -1)
    backends.of(packed).dequantize(packed, ranges, 0, group_size, rows, widths, affine)
    return out


def dequantize(packed, ranges, bits, group_size, size, stride, dtype, widths=None, affine=None):
    """The quantized values, of that size and dtype; stride: `layout.by_sample_stride` of what was quantized.

    affine: as in `reference.dequantize`.
    """
    out = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    backends.of(packed).dequantize(packed, ranges, bits, group_size, out, widths, affine)
    return out


def is_offset(least: float, greatest: float) -> bool:
    """Whether the range of a tensor is below 8 bfloat16 steps of its minimum."""
    if not (math.isfinite(least) and math.isfinite(greatest)) or least == 0:
        return False
    step = math.ldexp(1.0, math.frexp(least)[1] - 1 - 7)
    return greatest - least < groups.STEPS * step


def _quantize_as_told(x, stride, *settings):
    source = layout.told(x.detach(), stride, by_sample=True)
    return *_quantize(source, *settings), x.new_ones(())


def _dequantize_as_told(packed, ranges, bits, group_size, size, stride, dtype):
    layout.check_stride(size, stride, by_sample=True)
    return dequantize(packed, ranges, bits, group_size, size, stride, dtype)


quantize_op = define(
    "quantize(Tensor x, SymInt[] stride, Tensor seed, int bits, int group_size, bool wide) "
    "-> (Tensor, Tensor, Tensor)",
    _quantize_as_told,
)
dequantize_op = define(
    "dequantize(Tensor packed, Tensor ranges, int bits, int group_size, SymInt[] size, SymInt[] stride, "
    "ScalarType dtype) -> Tensor",
    _dequantize_as_told,
)


@register_fake("fewbit::quantize")
def _(x, stride, seed, bits, group_size, wide):
    samples, features = groups.samples_of(x.shape)
    packed = x.new_empty(packed_words(x.numel(), bits), dtype=torch.int32)
    shape = (groups.group_count(samples, features, group_size), 3 if wide else 2)
    return packed, x.new_empty(shape, dtype=torch.bfloat16), x.new_empty(())


@register_fake("fewbit::dequantize")
def _(packed, ranges, bits, group_size, size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype, device=packed.device)


keep_results(quantize_op)
