"""Exactly unbiased copies (docs/concepts/quantizer.md) in plain torch, for any device.

The results equal those of the compiled kernels exactly. Groups are rotated as in rotated copies. The codes of the rotated
numbers are those of `fewbit.catalog.unbiased_codes` (QUIC-FL, Ben Basat et al., 2022): for each element, encoder and
decoder share a random number, which both compute from the copy's seed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fewbit.catalog.unbiased_codes import unbiased_code
from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.runtime.backends.reference_bits import sixteen_bit_draws
from fewbit.runtime.backends.reference_rotated import (
    MOST_SCALE,
    padded,
    remainders,
    root,
    rotated,
    rotated_back,
    sign_words,
)

_FIRST_COUNTER, _COUNTERS = 2**62, 64  # group g has 64 counters, from 2**62 + 64 g on
_OWN = 32  # a group's shared random numbers come from its first 32 counters, the encoder's own from the others


def quantize_groups(cut, exists, seed, bits, fp32_mean, first_group, is_masked=False):
    """Quantize groups, see `reference_rotated.quantize_groups`. Scales are never negative."""
    code = _code(bits, cut.device)
    left = remainders(cut, exists, fp32_mean, is_masked)
    never = torch.zeros(len(cut), dtype=torch.bool, device=cut.device)
    words = sign_words(seed, first_group, len(cut))
    y = rotated(left.values, left.lengths, words, never)
    # Divided by the scale, no number may exceed the limit T of the code.
    least_scale = torch.where(padded(exists), y.abs(), 0.0).amax(1) * code.inverse_limit
    rms = root(left.energy / left.lengths.to(torch.float32))
    scale = torch.maximum(rms, least_scale) * (1.0 / left.factor)
    scale = _up(scale.clamp(max=MOST_SCALE))
    z = y * (1.0 / (scale * left.factor))[:, None]
    codes = _drawn(z, code, seed, first_group)
    is_good = left.energy.isfinite() & left.mean.isfinite()
    codes = torch.where((is_good & (left.energy > 0))[:, None], codes, 0)
    scale = torch.where(left.energy == 0, 0.0, scale)
    scale = torch.where(is_good, scale, torch.nan)
    mean = torch.where(is_good, left.mean, torch.nan)
    return codes[:, : cut.shape[1]], mean, scale


def restore_groups(codes, exists, mean, scale, seed, bits, first_group):
    """Return the values of groups' codes, see `reference_rotated.restore_groups`."""
    code = _code(bits, codes.device)
    rows = _shared(seed, first_group, len(codes), code)
    y = code.levels[rows, padded(codes)]
    words = sign_words(seed, first_group, len(codes))
    never = torch.zeros(len(codes), dtype=torch.bool, device=codes.device)
    values = rotated_back(y, exists.sum(1), words, never, scale)
    values = mean[:, None] + values[:, : codes.shape[1]]
    return torch.where(scale[:, None].isnan(), torch.nan, values)


def _drawn(z, code, seed, first_group):
    """Draw the codes of numbers in units of their group's scale, int64 of the shape of z, (groups, 256)."""
    rows = _shared(seed, first_group, len(z), code)
    own = sixteen_bit_draws(seed, _counters(seed, first_group, len(z)) + _OWN)
    own = (2 * own + 1).to(torch.float32) * 2.0**-17
    codes = torch.zeros_like(rows)
    step = code.levels.shape[1] // 2
    while step:
        above = codes + step - 1
        codes += step * (z > code.means[rows, above] + own * code.gaps[rows, above])
        step //= 2
    return codes


def _shared(seed, first_group, count, code):
    """Return the shared random numbers, the rows of the code's arrays, (count, 256) int64."""
    draws = sixteen_bit_draws(seed, _counters(seed, first_group, count))
    return draws % len(code.levels)


def _counters(seed, first_group, count):
    group = torch.arange(first_group, first_group + count, device=seed.device)
    return _FIRST_COUNTER + _COUNTERS * group


def _up(scale):
    """Round numbers that are not negative up to bfloat16. The result has dtype float32."""
    bits = scale.view(torch.int32).to(torch.int64) + 0xFFFF
    return (bits & 0xFFFF0000).to(torch.int32).view(torch.float32)


def prepare(device):
    """Make the codes of all numbers of bits on a device."""
    for bits in range(MIN_BITS, MAX_BITS + 1):
        _code(bits, device)


@lru_cache(maxsize=32)
def _code(bits, device):
    """Return the code of `unbiased_code` with tensors instead of arrays."""
    code = unbiased_code(bits)
    with unset_fake_temporarily():  # a compiler may be tracing
        arrays = {
            name: torch.tensor(getattr(code, name), device=device) for name in code._fields[1:]
        }
    return code._replace(**arrays)
