"""Pack rows of small integers, each row with as few bits as its integers need: its *width*.

If it takes fewer bits, only the nonzero integers of a row are packed, together with a mask.
"""

from __future__ import annotations

import torch

from fewbit.runtime import backends
from fewbit.runtime.format.encoding import packed_words

SPARSE = 128
"""The number that is added to the width of a row whose zeros are left out."""
BYTE = 8
"""The largest width of packed codes."""


def write(numbers: torch.Tensor):
    """Pack integers of magnitude below 2^15, (C, K, n) int32, C * K rows of n. The host waits for the device.

    Returns:
        words: 1-D int32, the packed integers of all rows in ascending order of widths.
        widths: (C, K) uint8, the width of each row, plus SPARSE if a mask, one bit for each integer, comes before the
        nonzero integers alone.
        nonzeros: for each width with SPARSE, in ascending order, the number of nonzero integers in all its rows.
    """
    # 0, 1, -1, 2, -2 ... become 0, 1, 2, 3, 4 ...
    folded = 2 * numbers.abs() - (numbers > 0).to(torch.int32)
    rows = folded.reshape(-1, numbers.shape[2])
    widths = torch.frexp(rows.amax(1).float()).exponent
    nonzero = (rows != 0).sum(1)
    widths = widths + SPARSE * (len(rows[0]) + nonzero * widths < len(rows[0]) * widths)
    words, nonzeros = [], []
    for width in widths.unique().tolist():
        chosen = rows[widths == width].reshape(-1)
        if width >= SPARSE:
            is_saved = chosen != 0
            words.append(_pack(is_saved.to(torch.int32), 1))
            chosen = chosen[is_saved]
            nonzeros.append(len(chosen))
        if width:
            words.append(_pack(chosen, width % SPARSE))
    joined = torch.cat(words) if words else rows.new_zeros(0)
    return joined, widths.to(torch.uint8).view(numbers.shape[:2]), tuple(nonzeros)


def read(words, widths, n: int, nonzeros) -> torch.Tensor:
    """Return the integers that `write` packed, (C, K, n) int32. The host waits for the device."""
    flat, nonzeros = widths.reshape(-1), iter(nonzeros)
    rows = torch.zeros(len(flat), n, dtype=torch.int32, device=words.device)
    for width in flat.unique().tolist():
        if not width:
            continue
        where = flat == width
        values = torch.zeros(int(where.sum()) * n, dtype=torch.int32, device=words.device)
        if width >= SPARSE:
            mask, words = _unpack(words, 1, len(values))
            values[mask.bool()], words = _unpack(words, width - SPARSE, next(nonzeros))
        else:
            values, words = _unpack(words, width, len(values))
        rows[where] = values.view(-1, n)
    unfolded = torch.where(rows % 2 == 1, rows + 1, -rows) // 2
    return unfolded.view(*widths.shape, n)


def _pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Pack (n,) int32 values below 2^width; above 8 bits, the lower 8 bits of all values come first."""
    backend = backends.on[values.device]
    low = backend.pack((values & 255).to(torch.uint8), min(width, BYTE))
    if width <= BYTE:
        return low
    return torch.cat((low, backend.pack((values >> BYTE).to(torch.uint8), width - BYTE)))


def _unpack(words, width: int, n: int):
    """Unpack n values. Return them, int32, and the words that follow."""
    backend = backends.on[words.device]
    low, high = packed_words(n, min(width, BYTE)), packed_words(n, max(width - BYTE, 0))
    values = backend.unpack(words[:low].contiguous(), min(width, BYTE), n).to(torch.int32)
    if high:
        rest = words[low : low + high].contiguous()
        values += backend.unpack(rest, width - BYTE, n).to(torch.int32) << BYTE
    return values, words[low + high :]
