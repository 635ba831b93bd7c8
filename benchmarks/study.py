"""Smaller measurements, each of which one page of the documentation quotes.

    python benchmarks/study.py                     # the names of all studies, and what they measure
    python benchmarks/study.py rotated_bias        # one of them
    python benchmarks/study.py codecs --quick      # options are those of the study

A study is a module in studies/, whose docstring says what it measures, how long it takes and what it writes.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

STUDIES = {path.stem: path for path in sorted((Path(__file__).parent / "studies").glob("*.py"))}


def summary(path: Path) -> str:
    """Return the first line of a module's docstring, without importing the module."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[0]


def main():
    if len(sys.argv) == 1:
        width = max(map(len, STUDIES)) + 2
        for name, path in STUDIES.items():
            print(f"{name:{width}}{summary(path)}")
        return
    name = sys.argv.pop(1)
    if name not in STUDIES:
        sys.exit(f"expected a study ({', '.join(STUDIES)}), got {name}")
    import_module(f"studies.{name}").main()


if __name__ == "__main__":
    main()
