"""The groups that a tensor is cut into, and the bytes of its quantized copy (docs/concepts/quantizer.md), without torch.

Samples of `LEAST_FEATURES` or more are cut into groups one by one; groups run across shorter samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from fewbit.config import BLOCK, UNIFORM
from fewbit.runtime.format.encoding import packed_words

LEAST_FEATURES = 64
"""The least number of features with which each sample is cut into groups of its own."""
LEAST_ELEMENTS = 1024
"""Tensors of functions and of checkpointed regions with fewer elements stay exact."""
SEED_ROWS = 2


def samples_of(shape) -> tuple[int, int]:
    """Return (number of samples, features of a sample)."""
    n = shape[0] if len(shape) else 1
    return n, prod(shape[1:])


def seed_rows(kind: str) -> int:
    """Return the number of rows at the end of `ranges` that have a copy's seed."""
    return 0 if kind == UNIFORM else SEED_ROWS


def group_count(samples: int, features: int, group_size: int) -> int:
    """Return the number of groups if all samples have the same bits."""
    if features >= LEAST_FEATURES:
        return samples * -(-features // group_size)
    return -(-(samples * features) // group_size)


def most_groups(samples: int, features: int, group_size: int) -> int:
    """Return the largest number of groups if samples may have different bits, at whose changes groups end."""
    if features >= LEAST_FEATURES:
        return group_count(samples, features, group_size)
    return group_count(samples, features, group_size) + min(8, samples) - (samples > 0)


def mixed_words(widths: Iterable[int], features: int) -> int:
    """Return the number of int32 words of samples of widths[n] bits, padded to 32 codes for each width."""
    counts = [0] * 9
    for width in widths:
        counts[width] += 1
    return sum(packed_words(count * features, bits) for bits, count in enumerate(counts))


def words_of_total(total: int, features: int) -> int:
    """Return a number of int32 words that suffices for samples whose bits per element add up to `total`.

    Padding adds at most 1 + 2 + ... + 8 = 36 words, because a block of b-bit codes has b words.
    """
    return -(-total * features // BLOCK) + 36
