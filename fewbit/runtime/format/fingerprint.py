"""Checksums of a tensor's memory, to detect writes through `x.data` or `x.numpy()`. Such writes do not change the version."""

from __future__ import annotations

import ctypes
import zlib
from functools import lru_cache

import numpy as np
import torch

from fewbit.runtime.format import layout
from fewbit.runtime.interop.tensor_kinds import is_plain

SMALL = 1024
"""The largest number of bytes for which a CRC of all bytes is faster than sums of columns."""
WIDTHS = (61, 67, 71), (1021, 1031, 1033)
"""The candidates for the number of columns, all primes, for small and for large tensors.

The first one that does not divide the number of words is taken, so that the length of a tensor's rows is no multiple of it.
Rows of the tensor that are reordered then change columns, unless they move by a multiple of that many rows.
"""


def fingerprint(x: torch.Tensor) -> int | bytes | None:
    """Return a checksum of a tensor's memory.

    For up to SMALL bytes the checksum is a CRC. For more bytes, the memory is read as rows of 64-bit integers. The
    checksum is then the sums of the columns, which are computed at the speed of memory, with a CRC of the rest. Two
    words of the same column can be exchanged without changing the checksum.

    Returns:
        The checksum. None if the tensor is not on the CPU, since reading would synchronize with the device, or if the
        tensor has no readable memory.
    """
    if x.device.type != "cpu" or not is_plain(x):
        return None
    if not x.is_contiguous() and not layout.is_dense(x):
        x = x.contiguous()
    address, size = x.data_ptr(), x.nbytes
    if not address or not size:
        return None
    if size <= SMALL:
        return zlib.crc32(_bytes(size).from_address(address))
    words = size // 8
    widths = WIDTHS[size > 64 * WIDTHS[1][0]]
    width = next((width for width in widths if words % width), widths[0])
    # With an odd number of rows the sums show if one number is added to every word, as by a changed sign or exponent.
    words = ((words // width - 1) | 1) * width
    rows = np.frombuffer(_bytes(8 * words).from_address(address), np.uint64).reshape(-1, width)
    rest = zlib.crc32(_bytes(size - 8 * words).from_address(address + 8 * words))
    return np.add.reduce(rows, 0).tobytes() + rest.to_bytes(4, "big")


@lru_cache(maxsize=1024)
def _bytes(size: int):
    return ctypes.c_char * size
