"""NumPy arrays in the form that the compiled kernels take."""

from fewbit import _kernels as kernels

STANDS_FOR = {"uint32": "int32", "uint16": "bfloat16"}


def buffer(array, dtype=None):
    """Return (address, number of elements, dtype, device) of a contiguous array. dtype: the array's unless given."""
    name = dtype or STANDS_FOR.get(array.dtype.name, array.dtype.name)
    return array.ctypes.data if array.size else 0, array.size, kernels.DTYPES.index(name), -1
