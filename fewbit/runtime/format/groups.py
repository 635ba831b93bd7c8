"""How a tensor is cut into groups, and how many bytes its quantized copy takes (docs/quantizer.md).

A sample is a slice along dimension 0. Samples of 64 features or more are cut into groups one by one;
shorter ones follow each other and groups run across them. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from fewbit.config import BLOCK, GROUP_SIZE
from fewbit.runtime.format.encoding import packed_words

LEAST_FEATURES = 64
"""Of a sample that has groups of its own."""
FP32_MIN_COLUMNS = 3
"""Columns of the ranges where minimums are float32: upper half, range, lower half; else 2."""
STEPS = 8
"""Minimums are float32 where a tensor's range is below this many bfloat16 steps of its minimum."""


def samples_of(shape) -> tuple[int, int]:
    """(number of samples, features of each) of a tensor of that shape."""
    n = shape[0] if len(shape) else 1
    return n, prod(shape[1:])


def group_count(samples: int, features: int, group_size: int) -> int:
    """Groups of samples that are all packed with the same width."""
    if features >= LEAST_FEATURES:
        return samples * -(-features // group_size)
    return -(-(samples * features) // group_size)


def most_groups(samples: int, features: int, group_size: int) -> int:
    """Groups of samples of several widths, at most: where groups run across samples, each width ends one."""
    if features >= LEAST_FEATURES:
        return group_count(samples, features, group_size)
    return group_count(samples, features, group_size) + min(8, samples) - (samples > 0)


def mixed_words(widths: Iterable[int], features: int) -> int:
    """int32 words of the codes of samples with those widths: each width is padded to whole words once."""
    counts = [0] * 9
    for width in widths:
        counts[width] += 1
    return sum(packed_words(count * features, bits) for bits, count in enumerate(counts))


def words_of_total(total: int, features: int) -> int:
    """int32 words that suffice for samples whose bits an element sum up to `total`, whatever each has.

    The codes of each width are padded to whole blocks, so that 36 more words than without are enough.
    """
    return -(-total * features // BLOCK) + sum(range(1, 9))


def quantized_bytes(shape, bits: int, group_size: int = GROUP_SIZE, fp32_min: bool = False) -> int:
    """Bytes of the quantized copy of a tensor of that shape: codes, and 4 (fp32_min: 6) a group.

    4 bits ceil(n / 32) + (4 or 6) groups, where n is the number of elements. fp32_min: minimums in float32.
    """
    samples, features = samples_of(shape)
    groups = group_count(samples, features, group_size)
    return 4 * packed_words(samples * features, bits) + (6 if fp32_min else 4) * groups


def fp32_min_bytes(ranges) -> int:
    """Bytes by which (groups, 2 or 3) ranges grow where their minimums become float32."""
    count, columns = ranges.shape
    return 2 * count * (FP32_MIN_COLUMNS - columns)
