"""Leaves of the record: tensors, numbers and rows as values that JSON holds and that compare to the bit."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

LONGEST = 8
"""A list with more numbers than this is recorded by its hash."""


def leaf(value):
    """Return a value as JSON that is equal if and only if the value is equal to the bit.

    Tensors and arrays become one line with dtype, shape, strides if they are unusual, the norm and a SHA-256 of the
    bytes. Numbers that are not finite become text, as JSON has none.

    Args:
        value: a tensor, an array, a number, a boolean, None, a text, or a list or mapping of such values.

    Returns:
        What `json.dumps` writes.

    Raises:
        TypeError: the value is of another type.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value.detach())
    if isinstance(value, np.ndarray):
        return _tensor(torch.from_numpy(np.ascontiguousarray(value)))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): leaf(part) for name, part in value.items()}
    if isinstance(value, Iterable):
        return _list([leaf(part) for part in value])
    raise TypeError(f"expected a tensor, a number or a container of these, got {type(value)}")


def numbers(value) -> str:
    """Return one line for all numbers and booleans in a nested value, whatever their fields are called.

    The numbers are sorted, so that renaming or reordering fields changes nothing. Texts and None are left out.

    Args:
        value: lists and mappings of numbers, as a controller's state.
    """
    found = sorted(map(str, _numbers(value)))
    total = math.fsum(number for number in _numbers(value) if math.isfinite(number))
    return f"{len(found)} numbers, sum {total:.9g}, sha256 {_sha256(json.dumps(found).encode())}"


def rows(values: list) -> str:
    """Return one line for a list of rows: their number and a hash of their contents in order."""
    return f"{len(values)} rows, sha256 {_sha256(json.dumps(leaf(values)).encode())}"


def _numbers(value):
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield float(value)


def _list(values: list):
    is_long = len(values) > LONGEST and all(isinstance(number, int | float) for number in values)
    if not is_long:
        return values
    total = math.fsum(values)
    return f"{len(values)} numbers in order, sum {total:.9g}, sha256 {_sha256(json.dumps(values).encode())}"


def _tensor(x: torch.Tensor) -> str:
    if x.layout != torch.strided:
        x = x.to_dense()
    dtype = str(x.dtype).removeprefix("torch.")
    strides = "" if x.is_contiguous() else f" strides {list(x.stride())}"
    norm = float(x.double().norm()) if x.numel() else 0.0
    content = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{dtype}{list(x.shape)}{strides}, norm {norm:.9g}, sha256 {_sha256(content)}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
