"""The arguments of `compress_` as plain JSON values, for settings files and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbit.config.configuration import Config
from fewbit.config.limits import plain_number
from fewbit.errors import InputError
from fewbit.printable import shorten


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `compress_`, {name: value}, as plain JSON values, which `compress_` takes too.

    Raises:
        InputError: a value has no form in JSON, such as a function in `include`, or a tensor in `sample`.
    """
    return {name: _plain(value, name) for name, value in arguments.items()}


def _plain(value, where: str):
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(one, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{where}[{number}]") for number, one in enumerate(value)]
    value = plain_number(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(f"{where}: expected a value that JSON can store, got {shorten(value)}")


def _key(key, where: str) -> str:
    if not isinstance(key, str):
        raise InputError(f"expected text as the keys of {where}, got {shorten(key)}")
    return key
