"""Rotated copies (docs/concepts/quantizer.md) in plain torch, bit for bit those of the compiled kernels.

A group minus its mean, multiplied by random signs and a Hadamard matrix, gets the codes that are best for a normal
distribution (EDEN, Vargaftik et al., ICML 2022).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from fewbit.catalog.normal_levels import normal_levels, rotated_levels
from fewbit.config import LARGEST_ROTATED_GROUP
from fewbit.runtime.backends.reference_bits import philox_words

_FIRST_COUNTER = -(2**63)  # 2^63 as int64: no draw of a uniform copy has such a counter
_COUNTERS = 16  # of each group
_SCALE_COUNTER = 8  # the counter of the scale's random rounding, after those of the signs
_LEAST_ENERGY, _MOST_ENERGY, _RESCUE = 2.0**-80, 2.0**100, 2.0**96
_MOST_SCALE = torch.finfo(torch.bfloat16).max
_SHARE_OF_ONE = 8.0  # a group is rotated twice if one element has more than 1 / 8 of the energy


class _Remainders(NamedTuple):
    values: torch.Tensor
    lengths: torch.Tensor
    mean: torch.Tensor
    factor: torch.Tensor
    energy: torch.Tensor


def quantize_groups(cut, exists, seed, bits, first_group, is_masked):
    """Quantize groups.

    Args:
        cut: (groups, group_size) float32, the elements, with any finite value where no element is.
        exists: (groups, group_size) bool, False where no element is.
        seed: (1,) int64, the seed of signs and scales.
        bits: 1 to 8.
        first_group: the number of the first group, on which signs depend.
        is_masked: whether elements that are 0 are left out.

    Returns:
        Codes, int64 of the shape of `cut`; means and scales, (groups,) float32 rounded to bfloat16. A scale is negative
        if the group was rotated twice.
    """
    breaks, levels = _normal_levels(bits, cut.device)
    left = _remainders(cut, exists, is_masked)
    most = left.values.abs().amax(1)
    is_twice = most * most * _SHARE_OF_ONE > left.energy
    words = _sign_words(seed, first_group, len(cut))
    y = _rotated(left.values, left.lengths, words, is_twice)
    rms = root(left.energy / left.lengths.to(torch.float32))
    magnitude = y.abs()
    index = (magnitude[..., None] > breaks * rms[:, None, None]).sum(-1)
    codes = index + (torch.signbit(y).to(torch.int64) << (bits - 1))
    products = torch.where(_padded(exists), magnitude * levels[index], 0.0)
    scale = left.energy / _sums(products) * (1.0 / left.factor)
    scale = scale.clamp(max=_MOST_SCALE)
    draw, *_ = philox_words(seed, _counters(seed, first_group, len(cut)) + _SCALE_COUNTER)
    scale = torch.where(left.energy == 0, 0.0, _drop_half(scale, draw & 0xFFFF))
    is_good = left.energy.isfinite() & left.mean.isfinite()
    codes = torch.where((is_good & (left.energy > 0))[:, None], codes, 0)
    scale = torch.where(is_good, torch.where(is_twice, -scale, scale), torch.nan)
    mean = torch.where(is_good, left.mean, torch.nan)
    return codes[:, : cut.shape[1]], mean, scale


def restore_groups(codes, exists, mean, scale, seed, bits, first_group):
    """Return the values of groups' codes, float32 of the shape of `codes`; see `quantize_groups`."""
    _, levels = _normal_levels(bits, codes.device)
    half = 2 ** (bits - 1)
    y = levels[codes % half] * torch.where(codes >= half, -1.0, 1.0)
    words = _sign_words(seed, first_group, len(codes))
    values = _rotated_back(_padded(y), exists.sum(1), words, torch.signbit(scale), scale.abs())
    values = mean[:, None] + values[:, : codes.shape[1]]
    return torch.where(scale[:, None].isnan(), torch.nan, values)


def energies(cut, exists, is_masked):
    """Return the sum of the squares of each group's elements minus their mean, (groups,) float32; NaN if one is not finite.

    It is multiplied by the share of elements that are not left out.
    """
    left = _remainders(cut, exists, is_masked)
    back = 1.0 / left.factor
    energy = left.energy * back * back
    if is_masked:
        energy = energy * (exists & (cut != 0)).sum(1) / exists.sum(1)
    return torch.where(left.energy.isfinite() & left.mean.isfinite(), energy, torch.nan)


def _remainders(cut, exists, is_masked) -> _Remainders:
    there = _padded(exists)
    lengths = there.sum(1)
    x = torch.where(there, _padded(cut), 0.0)
    if is_masked:
        there = there & (x != 0)
    count = there.sum(1).to(torch.float32)
    mean = torch.where(count == 0, 0.0, _sums(x) / count)
    mean = mean.to(torch.bfloat16).to(torch.float32) + 0.0
    left = torch.where(there, x - mean[:, None], 0.0)
    energy = _sums(left * left)
    factor = torch.where(energy < _LEAST_ENERGY, _RESCUE, torch.ones_like(energy))
    factor = torch.where(energy < _MOST_ENERGY, factor, 1 / _RESCUE)
    left = left * factor[:, None]
    return _Remainders(left, lengths, mean, factor, _sums(left * left))


def root(x):
    """Return square roots, rounded correctly, unlike torch's on some processors."""
    return x.double().sqrt().float()


def _padded(x):
    return torch.nn.functional.pad(x, (0, LARGEST_ROTATED_GROUP - x.shape[1]))


def _sums(x):
    """Return the sum of each row of (groups, 256), in the order that all backends have."""
    half = LARGEST_ROTATED_GROUP // 2
    while half:
        x = x[:, :half] + x[:, half:]
        half //= 2
    return x[:, 0]


def _drop_half(scale, draw):
    """Round positive float32 numbers to bfloat16 by 16 random bits each."""
    bits = scale.view(torch.int32).to(torch.int64) + draw
    return (bits & 0xFFFF0000).to(torch.int32).view(torch.float32)


@lru_cache(maxsize=32)
def _normal_levels(bits, device):
    breaks, levels = normal_levels(bits)[0], rotated_levels(bits)
    return tuple(torch.tensor(x, dtype=torch.float32, device=device) for x in (breaks, levels))


# -- Signs ---------------------------------------------------------------------------------------------------


def _counters(seed, first_group, count):
    group = torch.arange(first_group, first_group + count, device=seed.device)
    return _FIRST_COUNTER + _COUNTERS * group


def _sign_words(seed, first_group, count):
    """Return whether signs are negative, (count, 4, 256) bool, for two rotations of two transforms each."""
    counter = _counters(seed, first_group, count)[:, None] + torch.arange(8, device=seed.device)
    words = torch.stack(philox_words(seed, counter), -1).view(count, 4, 8)
    bits = words[..., None] >> torch.arange(32, device=seed.device) & 1
    return bits.view(count, 4, LARGEST_ROTATED_GROUP).bool()


# -- Rotations -----------------------------------------------------------------------------------------------


def _rotated(values, lengths, words, is_twice):
    """Rotate groups by signs, twice if `is_twice` or if the length is no power of two."""
    once = _rotate(values, lengths, words[:, :2])
    twice = _rotate(_moved(once, lengths, 1), lengths, words[:, 2:])
    return torch.where(_second(lengths, is_twice), twice, once)


def _second(lengths, is_twice):
    is_power = (lengths & (lengths - 1)) == 0
    return (is_twice | ~is_power)[:, None]


def _moved(values, lengths, direction):
    """Move groups whose length is no power of two to the left, or back for direction -1."""
    out = values.clone()
    for m in lengths.unique().tolist():
        size, _ = _transform_of(m)
        if m <= size:
            continue
        rows = out[lengths == m]
        rows[:, :m] = rows[:, :m].roll(-direction * ((m - size) // 2), 1)
        out[lengths == m] = rows
    return out


def _rotate(values, lengths, signs):
    out = torch.zeros_like(values)
    for m in lengths.unique().tolist():
        chosen = lengths == m
        y, (first, second) = values[chosen][:, :m].clone(), signs[chosen][:, :, :m].unbind(1)
        size, unit = _transform_of(m)
        y = _signed(y, first, unit, size)
        y[:, :size] = _transformed(y[:, :size])
        if size < m:
            y[:, m - size :] = _transformed(_signed(y[:, m - size :], second[:, m - size :], unit))
        rows = out[chosen]
        rows[:, :m] = y
        out[chosen] = rows
    return out


def _rotated_back(values, lengths, words, is_twice, scale):
    once = _rotate_back(values, lengths, words[:, 2:], torch.ones_like(scale))
    y = torch.where(_second(lengths, is_twice), _moved(once, lengths, -1), values)
    return _rotate_back(y, lengths, words[:, :2], scale)


def _rotate_back(values, lengths, signs, scale):
    out = torch.zeros_like(values)
    for m in lengths.unique().tolist():
        chosen = lengths == m
        y, (first, second) = values[chosen][:, :m].clone(), signs[chosen][:, :, :m].unbind(1)
        size, unit = _transform_of(m)
        if size < m:
            y[:, m - size :] = _signed(_transformed(y[:, m - size :]), second[:, m - size :], unit)
        y[:, :size] = _transformed(y[:, :size])
        factor = scale[chosen][:, None]
        transformed = torch.arange(m, device=y.device) < size
        y = y * _with_sign(torch.where(transformed, factor * unit, factor), first)
        rows = out[chosen]
        rows[:, :m] = y
        out[chosen] = rows
    return out


def _transform_of(m: int):
    """Return the size of the transforms of a group of m elements, and the factor that makes them orthogonal."""
    size = 1 << m.bit_length() - 1
    return size, torch.tensor(1 / math.sqrt(size), dtype=torch.float32).item()


def _signed(y, negative, unit, size=None):
    """Multiply the first `size` numbers of each row by +unit or -unit, the others by +1 or -1."""
    size = y.shape[1] if size is None else size
    factor = torch.where(torch.arange(y.shape[1], device=y.device) < size, unit, 1.0)
    return y * _with_sign(factor.to(torch.float32), negative)


def _with_sign(x, negative):
    return torch.where(negative, -x, x)


def _transformed(y):
    rows, size = y.shape
    half = size // 2
    while half:
        pairs = y.reshape(rows, -1, 2, half)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((a + b, a - b), 2).reshape(rows, size)
        half //= 2
    return y
