"""Mutations of C++ code, by tokens. Comments, texts, preprocessor lines, static assertions and templates stay as they are."""

from __future__ import annotations

import re

from mutants.python_code import Mutation

TOKEN = re.compile(
    r"""
    (?P<skipped> //[^\n]* | /\*.*?\*/ | ^[ \t]*\#(?:\\\n|[^\n])* | R"\((?:.*?)\)" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])'
               | \bstatic_assert\s*\((?:[^;])*; | \btemplate\s*<[^{;()]*?>\s )
  | (?P<number>  (?<![\w.]) (?:0[xX][0-9a-fA-F]+ | \d+(?:\.\d*)?(?:[eE][-+]?\d+)?) [uUlLfF]* (?![\w.]) )
  | (?P<word>    \b(?:true|false|return)\b )
  | (?P<joined>  <= | >= | == | != | && | \|\| | \+= | -= | \+\+ | -- | -> )
  | (?P<spaced>  (?<=\ ) (?: << | >> | [-+*/%<>&|^] ) (?=\ ) )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
OPERATORS = {
    "<=": ("comparison", "<"), ">=": ("comparison", ">"), "<": ("comparison", "<="), ">": ("comparison", ">="),
    "==": ("comparison", "!="), "!=": ("comparison", "=="), "&&": ("and or", "||"), "||": ("and or", "&&"),
    "+=": ("arithmetic", "-="), "-=": ("arithmetic", "+="), "+": ("arithmetic", "-"), "-": ("arithmetic", "+"),
    "*": ("arithmetic", "/"), "/": ("arithmetic", "*"), "%": ("arithmetic", "/"), "<<": ("arithmetic", ">>"),
    ">>": ("arithmetic", "<<"), "&": ("arithmetic", "|"), "|": ("arithmetic", "&"), "^": ("arithmetic", "&"),
    "true": ("constant", "false"), "false": ("constant", "true"),
}  # fmt: skip


def mutations(source: str) -> list[Mutation]:
    """Return all mutations of a C++ file, in the order of their places."""
    found = []
    for token in TOKEN.finditer(source):
        text = token.group()
        if token["number"]:
            changes = [("constant", number) for number in _neighbors(text)]
        else:
            changes = [OPERATORS[text]] if text in OPERATORS and not token["skipped"] else []
        first = source.rfind("\n", 0, token.start()) + 1
        last = source.find("\n", token.end())
        line = source[first : last if last >= 0 else len(source)]
        column = token.start() - first
        start, end = (len(source[:place].encode()) for place in token.span())
        for kind, other in changes:
            after = line[:column] + other + line[column + len(text) :]
            place = source.count("\n", 0, first) + 1, column
            texts = (" ".join(code.split()) for code in (line, after))
            found.append(Mutation(*place, kind, *texts, start, end, other))
    return found


def _neighbors(number: str) -> list[str]:
    """Return the literals of a number plus and minus 1, with the same suffix. 0 gets no number below it."""
    is_hex = number[:2] in ("0x", "0X")
    digits = number.rstrip("uUlL" if is_hex else "uUlLfF")
    suffix = number[len(digits) :]
    if is_hex or digits.isdigit():
        value = int(digits, 16 if is_hex else 10)
        return [f"{other}{suffix}" for other in (value + 1, value - 1) if other >= 0]
    value = float(digits)
    return [f"{other!r}{suffix}" for other in (value + 1, value - 1) if other != value]
