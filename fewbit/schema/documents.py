"""Read JSON from untrusted files: too large or too deeply nested documents are refused before parsing."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from typing import Any, BinaryIO

from fewbit.errors import FewbitError
from fewbit.printable import shorten

MOST_BYTES = 2**23
"""The most bytes of a document's text, thirty times those of the largest shipped file."""
MOST_DEPTH = 16
"""The most levels of nested arrays and objects; a table has 4."""
MOST_CONTAINERS = 2**17
"""The most arrays and objects in a document."""
MOST_DIGITS = 1000
"""The most characters of a number; a float64 has at most 767 significant digits."""

# An unclosed string matches up to the end of the text, so that the search never backtracks.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file, or a link to one, in binary. Pipes, devices and folders are refused, since reading them could block.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except (TypeError, ValueError) as error:  # it is no path, or contains a null character
        raise OSError(str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: str | os.PathLike, error: type[FewbitError] = FewbitError) -> str:
    """Read a UTF-8 text file of at most `MOST_BYTES`.

    Raises:
        FewbitError: The file cannot be read, is too large or is not UTF-8.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as failure:
        reason = failure.strerror or failure
        raise error(f"{path}: expected a readable file, got: {reason}") from None
    if len(data) > MOST_BYTES:
        raise error(
            f"{path}: expected a document of at most {MOST_BYTES >> 20} MiB, got a larger file"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{path}: expected JSON text in UTF-8, got other bytes") from None


def parse_json(text: str, prefix: str = "", error: type[FewbitError] = FewbitError) -> Any:
    """Parse JSON. Numbers must be finite, keys unique, and size and nesting within this module's limits.

    Args:
        text: The JSON text.
        prefix: The beginning of error messages, such as `gelu.json: `.
        error: The exception class to raise.

    Raises:
        FewbitError: The text is not JSON, or breaks these rules. The class of the exception is `error`.
    """
    if len(text) > MOST_BYTES:
        raise error(
            f"{prefix}expected a document of at most {MOST_BYTES >> 20} MiB, got a larger text"
        )
    if text.startswith("\ufeff"):
        raise error(f"{prefix}expected JSON, got a byte order mark before it")
    problem = _find_nesting(text)
    if problem:
        raise error(f"{prefix}expected {problem}")

    def refuse(literal):
        raise error(f"{prefix}expected finite numbers, got {shorten(literal)}")

    def finite(convert):
        def parse(literal):
            try:
                value = convert(literal) if len(literal) <= MOST_DIGITS else math.inf
                usable = math.isfinite(value)
            except (OverflowError, ValueError):  # the integer is too large for float64
                usable = False
            return value if usable else refuse(literal)

        return parse

    def unique(pairs):
        found = {}
        for name, value in pairs:
            if name in found:
                raise error(f"{prefix}expected every field once, got {shorten(name)} twice")
            found[name] = value
        return found

    try:
        return json.loads(
            text,
            parse_constant=refuse,
            parse_float=finite(float),
            parse_int=finite(int),
            object_pairs_hook=unique,
        )
    except json.JSONDecodeError as failure:
        raise error(f"{prefix}expected JSON, got other text: {failure}") from None


def _find_nesting(text: str) -> str:
    """Return the text "at most ..., got more" for too much nesting, or ""."""
    depth = containers = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        character = text[match.start()]
        if character in "[{":
            depth, containers = depth + 1, containers + 1
            if depth > MOST_DEPTH:
                return f"at most {MOST_DEPTH} arrays and objects inside one another, got more"
            if containers > MOST_CONTAINERS:
                return f"at most {MOST_CONTAINERS} arrays and objects, got more"
        elif character in "]}":
            depth -= 1
    return ""
