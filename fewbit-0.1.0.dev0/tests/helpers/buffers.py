"""Arguments of the compiled kernels, and the number of threads that they use."""

from contextlib import contextmanager

import torch

from fewbit import _kernels as kernels
from fewbit.runtime.backends import native  # noqa: F401, lets the kernels ask torch for threads

STANDS_FOR = {"uint32": "int32", "uint16": "bfloat16"}


def buffer(array, dtype=None):
    """Return (address, number of elements, dtype, device) of a contiguous array. dtype: the array's unless given."""
    name = dtype or STANDS_FOR.get(array.dtype.name, array.dtype.name)
    return array.ctypes.data if array.size else 0, array.size, kernels.DTYPES.index(name), -1


@contextmanager
def torch_threads(number):
    """Let torch, and therefore the kernels, use so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
