"""Functions that make a text safe to print.

The text may come from a file, an argument or another program, and may contain characters that control a terminal.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape every character that a terminal would interpret, or that a reader cannot see or could misread.

    Escapes such as `\x1b` and `\u202e` replace control characters (among them line breaks), marks that change the
    direction of writing, invisible and unassigned characters, and lone surrogates.

    Args:
        text: Any string.

    Returns:
        One line that can be encoded in UTF-8; `text` itself if there is nothing to escape.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def one_line(error: BaseException, limit: int = 160) -> str:
    """Describe an exception from foreign code in one printable line.

    The line consists of the type of the exception and at most `limit` characters of the message.
    """
    try:
        message = printable(" ".join(str(error).split()))
    except Exception:  # the exception's own __str__ may raise
        message = ""
    name = type(error).__name__
    return f"{name}: {message[:limit]}" if message else name
