"""Text that came from a file, an argument or another program, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape every character that a terminal or a reader could take for something else than itself.

    Control characters (also line breaks, terminal sequences), marks that change the direction of writing,
    invisible and unassigned characters, and lone surrogates become escapes such as `\\x1b` and `\\u202e`.

    Args:
        text: any string.

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
    """Describe an exception of foreign code in one printable line: its type, then the message cut at `limit`."""
    try:
        message = printable(" ".join(str(error).split()))
    except Exception:  # a __str__ of the user's that fails
        message = ""
    name = type(error).__name__
    return f"{name}: {message[:limit]}" if message else name
