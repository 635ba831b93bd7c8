"""Functions that make a text safe to print on a terminal."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches

_REPR = reprlib.Repr()  # formats only the beginning of a large value
_REPR.maxlevel, _REPR.maxother = 6, 200
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _REPR.maxarray = 20
_REPR.maxstring = _REPR.maxlong = 120


def printable(text: str) -> str:
    r"""Escape every character that a terminal would interpret, or that a reader cannot see or could misread.

    Escapes such as `\x1b` and `\u202e` replace control characters, line breaks, marks that change the direction of writing, invisible
    and unassigned characters, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def one_line(error: BaseException, limit: int = 160) -> str:
    """Describe foreign code's exception by its type and at most `limit` characters of its message."""
    try:
        message = printable(" ".join(str(error).split()))
    except Exception:  # the exception's own __str__ may raise
        message = ""
    name = type(error).__name__
    return f"{name}: {message[:limit]}" if message else name


def shorten(value, limit: int = 60) -> str:
    """Describe a value by its `repr` on one printable line of at most `limit` characters."""
    try:
        text = printable(" ".join(_REPR.repr(value).split()))
    except ValueError:  # an integer with more digits than Python converts to a string
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def meant(name: object, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the known name most like an unknown one, or ""."""
    near = get_close_matches(name, [*known], n=1) if isinstance(name, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""
