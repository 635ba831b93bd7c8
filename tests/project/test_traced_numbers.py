"""The numbers in tables of the pages are those of benchmarks/results/.

A comment above a table, such as `<!-- numbers: pretrained: mib, 100 * error; demo: mean -->`, names files of results and what
of them the table shows: keys, or formulas of keys. Every number in the table, apart from the first column, code and numbers
of bits, must be the value of one of these in some record of its file, rounded to the digits that are shown.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"^ *<!-- numbers: (.+?) -->\n+((?: *\|.*\n)+)", re.MULTILINE)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?")
NO_MEASUREMENT = re.compile(r"`[^`]*`|\b\d+ bits?\b|\d+ x \d+")
# Pages all of whose tables with measured numbers have the comment, or are written by a script between marks.
WHOLLY_TRACED = [
    "concepts/quantizer.md",
    "gpu.md",
    "guides/compile.md",
    "guides/fit.md",
    "guides/lora.md",
    "results/index.md",
    "results/levels.md",
    "results/memory.md",
]


def tables():
    """A pytest.param of the comment's content and the lines of each table that has the comment."""
    found = []
    for page in PAGES:
        text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
        for number, (sources, lines) in enumerate(TABLE.findall(text)):
            found.append(pytest.param(sources, lines, id=f"{name}, {number}"))
    return found


def records(document):
    """Every object within a JSON document."""
    if isinstance(document, dict):
        yield document
    for value in document.values() if isinstance(document, dict) else document:
        if isinstance(value, dict | list):
            yield from records(value)


def measured(sources):
    """The values of the formulas in all records of their files that have the keys."""
    found = []
    for source in sources.split("; "):
        file, formulas = source.split(": ")
        document = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text("utf-8"))
        for formula in formulas.split(", "):
            names = set(re.findall(r"[a-z_]\w*", formula))
            values = [
                eval(formula, {}, record)
                for record in records(document)
                if all(isinstance(record.get(name), int | float) for name in names)
            ]
            assert values, f"{file}.json: no record has {sorted(names)}"
            found += values
    return found


def numbers(lines):
    """The text of every number in a table's body that should be a measurement."""
    for line in lines.splitlines()[2:]:
        _, *cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        for cell in cells:
            yield from NUMBER.findall(NO_MEASUREMENT.sub("", cell))


def unit(text):
    """The value of the last digit that is shown; final zeros of a number like 3,800 are not counted as shown."""
    mantissa, _, exponent = text.partition("e")
    decimals = len(mantissa.partition(".")[2])
    zeros = len(mantissa) - len(mantissa.rstrip("0")) if "," in mantissa and not decimals else 0
    return 10.0 ** (zeros - decimals + int(exponent or 0))


def is_rounded(text, values, shift=0):
    """Return whether the number, plus `shift` units of its last digit, is one of the values, rounded."""
    number = float(text.replace(",", "")) + shift * unit(text)
    return any(abs(value - number) <= 0.5001 * unit(text) for value in values)


@pytest.mark.parametrize(("sources", "lines"), tables())
def test_the_numbers_are_measured(sources, lines):
    values, shown = measured(sources), list(numbers(lines))
    assert shown
    assert [text for text in shown if not is_rounded(text, values)] == []


@pytest.mark.parametrize(("sources", "lines"), tables())
def test_a_changed_number_is_noticed(sources, lines):
    """Most numbers that differ by five units of the last digit are no values of the formulas."""
    values, shown = measured(sources), list(numbers(lines))
    noticed = [not is_rounded(text, values, shift) for text in shown for shift in (-5, 5)]
    assert sum(noticed) >= 0.5 * len(noticed)


@pytest.mark.parametrize("page", WHOLLY_TRACED)
def test_every_table_of_a_page_is_traced(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = TABLE.sub("", text)
    left = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [
        lines for lines in left if any(re.search(r"\d\.\d", text) for text in numbers(lines))
    ] == []
