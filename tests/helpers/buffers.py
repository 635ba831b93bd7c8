"""NumPy arrays as the compiled kernels take them."""

from fewbit import _kernels as kernels

STANDS_FOR = {"uint32": "int32", "uint16": "bfloat16"}


def buffer(array, dtype=None):
    """(address, number of elements, dtype, device) of a contiguous array; dtype: its own unless given."""
    name = dtype or STANDS_FOR.get(array.dtype.name, array.dtype.name)
    return array.ctypes.data if array.size else 0, array.size, kernels.DTYPES.index(name), -1
