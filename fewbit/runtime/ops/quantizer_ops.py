"""The functions of the group quantizer, which eager mode calls, and which implement ops for compiled code."""

from __future__ import annotations

import torch

from fewbit.config import UNIFORM
from fewbit.runtime import backends
from fewbit.runtime.format import groups, layout
from fewbit.runtime.format.channels import Normalization
from fewbit.runtime.format.encoding import packed_words


def quantize(
    x,
    seed,
    bits,
    group_size,
    normalize=None,
    widths=None,
    words=None,
    kind=UNIFORM,
):
    """Quantize a tensor of any strides as `reference_quantizer.quantize`; `normalize` is a `Normalization` or None.

    If it has an rstd, `layout.is_by_sample(x)` must be true.
    """
    if not x.is_contiguous() and not layout.is_by_sample(x):
        x = x.detach().contiguous()
    if x.dtype is torch.float64:
        x = x.float()  # the kernels compute in float32
    return backends.on[x.device].quantize(x, seed, bits, group_size, widths, words, normalize, kind)


def quantize_samples(x, seed, slot, samples, group_size, normalize=None, kind=UNIFORM):
    """Divide the bits of x's slot among x's samples, then quantize x.

    `samples` is the size of dimension 0 as which x is viewed.

    Returns:
        packed and ranges, as of `quantize`; widths, (samples,) uint8, the bits of each sample; and the `sensitivities`.
    """
    source = _by_samples(x, samples)
    total, backend = slot.total(samples), backends.on[source.device]
    of_samples = backend.squares(source, group_size, normalize, kind)
    of_samples = slot.assignment.sensitivities(slot, of_samples)
    widths = backend.share_bits(of_samples, total, kind)
    words = groups.words_of_total(total, source.numel() // samples)
    tensors = backend.quantize(source, seed, 0, group_size, widths, words, normalize, kind)
    return *tensors, widths, of_samples


def sensitivities(x, slot, samples, group_size, normalize=None, kind=UNIFORM):
    """Return the numbers by which `quantize_samples` shares bits, (samples,) float32: a larger one gets more bits."""
    found = squares(_by_samples(x, samples), group_size, normalize, kind)
    return slot.assignment.sensitivities(slot, found)


def _by_samples(x, samples):
    if x.dtype is torch.float64:
        x = x.float()  # the kernels compute in float32
    if not x.is_contiguous() and not layout.is_by_sample(x):
        x = x.detach().contiguous()
    return x if x.shape[0] == samples else x.detach().view(samples, -1)


def channel_statistics(x, count, normalize=None):
    """See `reference.channel_statistics`."""
    source = x if x.is_contiguous() or layout.is_by_sample(x) else x.detach().contiguous()
    source = _narrow(source)
    return backends.on[source.device].channel_statistics(source, count, normalize)


def squares(x, group_size, normalize=None, kind=UNIFORM):
    """Return, for each sample of x, a number to which the variance of rounding is proportional, (N,) float32.

    Times `distortion(kind, bits)`, it is the variance, summed over the sample's elements. `layout.is_by_sample(x)` must
    be true.
    """
    return backends.on[x.device].squares(_narrow(x), group_size, normalize, kind)


def rounding_variance(x, samples, group_size, normalize, bits, generator):
    """Return the variance that rounding to `bits` adds to an element of a uniform copy, the mean of each sample.

    It is estimated from two random roundings of x, with seeds of generator(device): (samples,) float32.
    """
    stride = layout.by_sample_stride(x)
    dtype = torch.promote_types(x.dtype, torch.float32)

    def drawn():
        seed = torch.randint(
            2**62, (1,), dtype=torch.int64, device=x.device, generator=generator(x.device)
        )
        tensors = quantize(x, seed, bits, group_size, normalize)
        return dequantize(*tensors, bits, group_size, tuple(x.shape), stride, dtype)

    difference = drawn() - drawn()
    rows = layout.storage_order(difference).view(samples or (len(x) if x.dim() else 1), -1)
    return (rows.square().mean(1) / 2).float()


def dequantize(
    packed,
    ranges,
    bits,
    group_size,
    size,
    stride,
    dtype,
    widths=None,
    affine=None,
    kind=UNIFORM,
    mask=None,
    channels=None,
):
    """Return the dequantized values of a tensor, with the given size and dtype, and strides as `layout.by_sample_stride`.

    The other arguments are those of `reference_quantizer.dequantize`.
    """
    is_wide = dtype is torch.float64
    narrow = torch.float32 if is_wide else dtype
    out = torch.empty_strided(size, stride, dtype=narrow, device=packed.device)
    settings = widths, affine, kind, mask, channels
    backends.on[packed.device].dequantize(packed, ranges, bits, group_size, out, *settings)
    return out.double() if is_wide else out


def _narrow(x):
    """Return x in a dtype that the kernels have, which compute in float32."""
    return x if x.dtype is not torch.float64 else x.float()


def quantize_with_channels(x, seed, bits, group_size, kind, channels):
    """Return (packed, ranges, numbers of channels); see `quantize`."""
    numbers, normalize = x.new_empty((0, 2), dtype=torch.bfloat16), None
    if channels and not x.numel():
        numbers = numbers.new_tensor([0.0, 1.0]).expand(channels, 2).contiguous()
    elif channels:
        numbers = channel_statistics(x, channels)
        normalize = Normalization(channels=numbers)
    return *quantize(x, seed, bits, group_size, normalize, kind=kind), numbers


def fake_copy(x, bits, group_size, kind, channels):
    """Return the fake results of `quantize_with_channels`."""
    samples, features = groups.samples_of(x.shape)
    packed = x.new_empty(packed_words(x.numel(), bits), dtype=torch.int32)
    rows = groups.group_count(samples, features, group_size) + groups.seed_rows(kind)
    ranges, numbers = (x.new_empty((n, 2), dtype=torch.bfloat16) for n in (rows, channels))
    return packed, ranges, numbers
