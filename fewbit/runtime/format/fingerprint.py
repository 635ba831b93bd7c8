"""Checksums of a tensor's memory, to detect writes through `x.data` or `x.numpy()`, which leave x._version as it is."""

from __future__ import annotations

import ctypes
import zlib
from functools import cached_property, lru_cache

import numpy as np
import torch

from fewbit.runtime.format import layout
from fewbit.runtime.interop.tensor_kinds import is_plain

SMALL = 1024
"""The largest number of bytes for which a CRC of all bytes is faster than sums of columns."""
WIDTHS = (61, 67, 71), (1021, 1031, 1033)
"""Numbers of columns in which `fingerprint` may read memory, for small and for large tensors. All are primes.

The first prime that does not divide the number of 64-bit words is used. The length of the tensor's own rows is then no
multiple of the prime. If rows of the tensor are reordered, their words come into other columns, and the checksum
changes. It may stay the same only if each row moves by a multiple of the prime.
"""


class Content:
    """The content of a tensor, of which a checksum is computed at most once.

    While one layer runs, it can hand the same object to several methods of the cache, because the tensor does not
    change in between.

    Args:
        x: the tensor.
    """

    def __init__(self, x: torch.Tensor):
        self._x = x

    @cached_property
    def checksum(self) -> int | bytes | None:
        """The result of `fingerprint(x)`."""
        return fingerprint(self._x)


def fingerprint(x: torch.Tensor) -> int | bytes | None:
    """Return a checksum of a tensor's memory.

    For up to SMALL bytes the checksum is a CRC. For more bytes, the memory is read as a matrix of 64-bit
    integers. The checksum is then the sums of the columns, which are computed at the speed of memory, followed by a CRC
    of the remaining bytes. If two words of the same column are exchanged, the checksum does not change.

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
    # With an odd number of rows, the sums also change if the same number is added to every word, for example because
    # all signs or exponents change.
    words = ((words // width - 1) | 1) * width
    rows = np.frombuffer(_bytes(8 * words).from_address(address), np.uint64).reshape(-1, width)
    rest = zlib.crc32(_bytes(size - 8 * words).from_address(address + 8 * words))
    return np.add.reduce(rows, 0).tobytes() + rest.to_bytes(4, "big")


@lru_cache(maxsize=1024)
def _bytes(size: int):
    return ctypes.c_char * size
