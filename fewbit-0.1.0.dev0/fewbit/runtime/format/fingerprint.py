"""Checksums of a tensor's memory, to detect writes through `x.data` or `x.numpy()`, which leave x._version as it is."""

from __future__ import annotations

import ctypes
import zlib

import torch

from fewbit.runtime.format import layout
from fewbit.runtime.interop.cuda_streams import stream_of
from fewbit.runtime.interop.tensor_kinds import is_plain

try:
    from fewbit import _kernels

    _checksum = _kernels.checksum
except ImportError:  # fewbit was installed without a compiler

    def _checksum(address: int, size: int, threads: int) -> int:
        return zlib.crc32((ctypes.c_char * size).from_address(address))


_UNKNOWN = object()


class Content:
    """The place and the content of a tensor, of which a checksum is computed at most once.

    While one layer runs, it can hand the same object to several methods of the cache, because the tensor does not
    change in between.

    Args:
        x: the tensor.
        changes: the number of in-place changes of x that its version does not count yet.

    Attributes:
        x: the tensor.
        storage: the storage of the tensor.
        place: a tuple that identifies the tensor with its present content, and the current stream.
    """

    __slots__ = ("_checksum", "place", "storage", "x")

    def __init__(self, x: torch.Tensor, changes: int = 0):
        self.x, self._checksum = x, _UNKNOWN
        self.storage = storage = x.untyped_storage()
        version = x._version + changes
        place = storage._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, version
        self.place = *place, stream_of(x)

    @property
    def checksum(self) -> int | None:
        """The result of `fingerprint(x)`."""
        if self._checksum is _UNKNOWN:
            self._checksum = fingerprint(self.x)
        return self._checksum


def fingerprint(x: torch.Tensor) -> int | None:
    """Return a checksum of a tensor's memory.

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
    return _checksum(address, size, torch.get_num_threads())
