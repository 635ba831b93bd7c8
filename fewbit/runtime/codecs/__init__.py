"""Codecs compress saved tensors so that the error stays within a bound (docs/concepts/codecs.md; AC-GC, section 5)."""

from __future__ import annotations

from fewbit.errors import InputError
from fewbit.runtime.codecs.error_bounded import ErrorBounded, library
from fewbit.runtime.codecs.jpeg import Jpeg
from fewbit.runtime.codecs.payload import Codec, Payload
from fewbit.runtime.codecs.quant import Quant
from fewbit.runtime.codecs.zero_value import ZeroValue

__all__ = ["CODECS", "DEFAULT", "Codec", "Payload", "check_codec", "codec"]

CODECS: dict[str, Codec] = {
    member.name: member for member in (Quant(), ZeroValue(), ErrorBounded(), Jpeg())
}
DEFAULT = "quant"
"""The name of the default codec, the fastest by far."""


def codec(name: str) -> Codec:
    """Return the codec with this name. Raises InputError if there is none."""
    if not isinstance(name, str) or name not in CODECS:
        raise InputError(f"codec: expected {', '.join(CODECS)}, got {name!r}")
    return CODECS[name]


def check_codec(name: str) -> None:
    """Raise InputError if no codec is named `name`, or if it needs a package that is not installed."""
    if isinstance(codec(name), ErrorBounded):
        library()
