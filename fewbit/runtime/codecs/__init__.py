"""Codecs: what a layer keeps of a tensor within a bound on its error, behind one protocol (docs/codecs.md).

payload = codec("quant").compress(tensor, bound)
values = codec("quant").decompress(payload)
"""

from __future__ import annotations

from fewbit.errors import InputError
from fewbit.runtime.codecs.error_bounded import ErrorBounded, check_library
from fewbit.runtime.codecs.jpeg import Jpeg
from fewbit.runtime.codecs.payload import Codec, Payload
from fewbit.runtime.codecs.quant import Quant
from fewbit.runtime.codecs.zero_value import ZeroValue

__all__ = ["CODECS", "DEFAULT", "Codec", "Payload", "check_codec", "codec"]

CODECS: dict[str, Codec] = {
    each.name: each for each in (Quant(), ZeroValue(), ErrorBounded(), Jpeg())
}
DEFAULT = "quant"
"""The fastest by far (docs/codecs.md, "Measured")."""


def codec(name: str) -> Codec:
    """The codec of that name. Raises InputError for any other."""
    if not isinstance(name, str) or name not in CODECS:
        raise InputError(f"expected {', '.join(CODECS)} for a codec, got {name!r}")
    return CODECS[name]


def check_codec(name: str) -> None:
    """Raises InputError if there is none of that name, or it needs a package that is not there."""
    if isinstance(codec(name), ErrorBounded):
        check_library()
