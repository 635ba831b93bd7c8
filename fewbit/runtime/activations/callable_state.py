"""The state that a callable's values depend on, as far as it can be found without calling the callable.

The state is a list of everything that can be reached from the callable: the parameters, buffers and attributes of a
module; the attributes of any other object; the enclosed variables and the defaults of a function, and the global
variables that its code names. Numbers and text are compared by value. Tensors are compared by identity and by version,
the number of their in-place changes. CPU tensors of at most 64 elements are also compared by value, because a change
through `.data` or NumPy leaves the version as it is. Nothing is read from a GPU, so nothing synchronizes.

If the content of an object cannot be listed (an array, or an object that has __slots__ or comes from a C extension),
the state counts as unknown. A state with more than 1000 entries counts as unknown, too. Class attributes, and the code
that a method calls, are assumed to be constant.
"""

from __future__ import annotations

import functools
import types
from typing import NamedTuple

import torch

from fewbit.runtime.interop.closures import contents
from fewbit.runtime.interop.tensor_kinds import is_plain

State = list

_MOST_PARTS = 1000
_MOST_ELEMENTS = 64
_VALUES = (
    int, float, complex, str, bytes, bool, types.NoneType, types.EllipsisType, torch.dtype, torch.device, torch.Size
)  # fmt: skip
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules"}
_HEAP_TYPE = 1 << 9  # CPython's flag of classes that are written in Python


class _UnseenError(Exception):
    """Raised if the state contains an object whose content cannot be listed, or has too many entries."""


class _Same(NamedTuple):
    """An entry of the state that is compared by identity and version; the reference keeps the object alive."""

    part: object
    version: int = 0

    def __eq__(self, other):
        return self.part is other.part and self.version == other.version

    __hash__ = None


def state_of(function) -> State | None:
    """Return the state of a callable, or None if the state is unknown."""
    parts: State = []
    try:
        _visit(function, parts, set())
    except _UnseenError:
        return None
    return parts


def is_same(before: State | None, now: State | None) -> bool:
    """Return whether both states are known and equal."""
    if before is None or now is None or len(before) != len(now):
        return False
    return all(type(a) is type(b) and a == b for a, b in zip(before, now, strict=True))


def _visit(value, parts: State, visited: set) -> None:
    if len(parts) > _MOST_PARTS:
        raise _UnseenError
    if isinstance(value, _VALUES):
        parts.append(value)
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    for inner in _inside(value, parts):
        _visit(inner, parts, visited)


def _inside(value, parts: State):
    """Append an entry for the value itself to `parts`, and return the values that are inside of it."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, parts)
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, list | tuple):
        parts.append(len(value))
        return value
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, types.FunctionType):
        return _function(value, parts)
    if isinstance(value, types.BuiltinMethodType):
        parts.append(value.__name__)
        return (value.__self__,)
    if isinstance(value, type | types.ModuleType):
        parts.append(_Same(value))
        return ()
    return _object(value, parts)


def _tensor(value, parts):
    if value.is_inference():
        raise _UnseenError
    parts.append(_Same(value, value._version))
    if is_plain(value) and value.device.type == "cpu" and value.numel() <= _MOST_ELEMENTS:
        parts.append(str(value.tolist()))  # as text, in which NaN equals NaN
    return ()


def _function(value, parts):
    if value.__module__ is not None and value.__module__.split(".")[0] == "torch":
        parts.append(_Same(value))
        return ()
    parts.append(_Same(value.__code__))
    names = [name for name in _names(value.__code__) if name in value.__globals__]
    used = [value.__globals__[name] for name in names]
    return (*contents(value), value.__defaults__, value.__kwdefaults__, *used)


def _names(code):
    """Yield the names that the code, and the code of functions inside it, looks up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _object(value, parts):
    kind = type(value)
    ours = [base for base in kind.__mro__ if base is not object]
    if isinstance(value, torch.jit.ScriptModule) or not all(map(_is_transparent, ours)):
        raise _UnseenError
    parts.append(_Same(kind))
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        skipped = _attributes_of_modules()
        attributes = {name: part for name, part in attributes.items() if name not in skipped}
    method = getattr(kind, "forward" if isinstance(value, torch.nn.Module) else "__call__", None)
    return attributes, method


def _is_transparent(kind: type) -> bool:
    """Return whether the __dict__ of an instance of the class contains everything that the instance holds."""
    slots = vars(kind).get("__slots__")
    is_seen = not slots if slots is not None else kind.__dictoffset__  # a lock has neither
    return bool(kind.__flags__ & _HEAP_TYPE and is_seen)


@functools.cache
def _attributes_of_modules() -> set[str]:
    """Return the names of the attributes that every torch module has and that are no part of the state: hooks and flags.

    A hook that records results often changes with each call, and the values would be compared each time. A hook that is added
    after the first call and changes results is therefore not noticed.
    """
    return set(vars(torch.nn.Module())) - _OF_MODULES
