"""The renderer: tables that fit any terminal, HTML, and the files that every result writes."""

import csv
import io
import json
import math
from dataclasses import dataclass, replace

import pytest

from fewbit.errors import FewbitError, OutputExistsError
from fewbit.render import figures, html
from fewbit.render.formats import amount, digits, limit_text, share, short
from fewbit.render.result import Result
from fewbit.render.terminal import plain, shortened_alike
from fewbit.render.view import Column, View
from fewbit.sizes import counted

NAMES = [f"blocks.{block}.scaled_dot_product_attention [{i}]" for block in (0, 1) for i in (0, 1)]
ROWS = [(name, "in expectation", "2.125", "1111111", "22222222") for name in NAMES]


def columns(*given):
    """Columns that show the items of their rows, in the order given."""
    return [replace(column, cell=lambda row, i=i: row[i]) for i, column in enumerate(given)]


COLUMNS = columns(
    Column("layer", None, "name"),
    Column("kind", None, "word", drop=3),
    Column("bits", None),
    Column("one", None, drop=2),
    Column("two", None, drop=1),
)


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(120, ()), (84, ()), (83, ()), (56, ()), (50, ("two",)), (40, ("one", "two")), (31, ("kind", "one", "two"))],
)  # fmt: skip
def test_a_table_fits_any_width(width, left_out):
    """Columns go in their order, then names get shorter, no more than they must; numbers are whole."""
    text = plain(View("title", COLUMNS, ROWS, ["a note of several words " * 4]), width)
    assert max(map(len, text.splitlines())) <= width
    header, _, *lines = text.splitlines()[2:8]
    shown = [title for title in ("layer", "kind", "bits", "one", "two") if title not in left_out]
    assert header.split() == shown
    said = f"columns left out: {', '.join(left_out)}"
    assert " ".join(text.split()).endswith(said) if left_out else "left out" not in text
    names = [line.split("  ")[0] for line in lines]
    for name, short_name, line in zip(NAMES, names, lines, strict=True):
        assert short_name == name or short_name[-4:] == name[-4:] and "…" in short_name
        wanted = dict(zip(("kind", "bits", "one", "two"), ROWS[0][1:], strict=True))
        assert line.split()[-1] == wanted[shown[-1]]
        assert all((wanted[title] in line) == (title in shown) for title in wanted)
    assert len(set(names)) == 4
    assert names == NAMES if width >= 84 else len(lines[0]) == width - 1


def test_the_note_of_a_column_is_shown_with_the_column():
    notes = ["two: 22222222", "one: 1111111", "kind, bits: more"]
    for width, count in ((120, 3), (50, 2), (40, 1)):
        text = plain(View("title", COLUMNS, ROWS, notes), width)
        assert [note for note in notes if f"\n{note}" in text] == notes[3 - count :]
    assert all(note in html.page(View("title", COLUMNS, ROWS, notes)) for note in notes)


def test_names_are_shortened_to_beginnings_of_one_length():
    assert shortened_alike(NAMES[:2], 21) == [f"blocks…_attention [{i}]" for i in (0, 1)]
    ends = "ttention [0]", "ttention [1]"
    assert shortened_alike(NAMES, 21) == [f"blocks.{i}…{end}" for i in (0, 1) for end in ends]
    # A third, if no beginning tells them apart.
    alike = ["a" * 20 + letter + "a" * 20 for letter in "bc"]
    assert shortened_alike(alike, 21) == ["aaaaaa…aaaaaaaaaaaaaa"] * 2


def test_text_that_is_too_wide_is_continued():
    number, words = "123456789" * 3, "words that a narrow terminal wraps"
    shown = columns(Column("number", None), Column("text", None, "text"))
    text = plain(View("", shown, [(number, words)]), 36)
    assert max(map(len, text.splitlines())) <= 36 and len(text.splitlines()) > 3
    assert "".join(text.split()[3:]) != number + words  # they share lines
    assert sorted("".join(text.split()[3:])) == sorted((number + words).replace(" ", ""))


LONG = View(
    "sums",
    columns(Column("name", None, "name", once=True), Column("number", None)),
    [(f"part{i // 2}", str(i)) for i in range(100)],
    total=("all", "4950"),
    rest=lambda name, rows: (name, str(sum(int(number) for _, number in rows))),
)


@pytest.mark.parametrize(("count", "shown"), [(21, 21), (22, 20), (100, 20)])
def test_long_tables_are_cut_and_repeated_names_stand_once(count, shown):
    view = replace(LONG, rows=LONG.rows[:count])
    lines = [line.split() for line in plain(view).splitlines()[4:]]
    assert lines[:3] == [["part0", "0"], ["1"], ["part1", "2"]]
    rest = [["…", "and", str(count - shown), "more", str(sum(range(shown, count)))]] * (
        shown < count
    )
    assert lines[shown:] == [*rest, [], ["all", "4950"]]
    page = html.block(view)
    assert page.count("part0") == 2 and page.count("<tr>") == 2 + min(count, 61)


def test_html_escapes_every_text():
    bad, safe = "<b>&'\"", "&lt;b&gt;&amp;&#x27;&quot;"
    bar = [(bad, 0.25, "#123456")]
    part = View(bad, is_folded=True)
    picture = View(bad, figure=lambda: figures.new_figure())
    table = View(bad, [Column(bad, str)], [bad], [bad], bar=bar, more=[part, picture])
    page = html.page(table)
    assert bad not in page and page.count(safe) == 10
    assert f"<details><summary>{safe}</summary></details>" in page and "width:25.000%" in page
    assert page.count("data:image/png;base64,iVBOR") == 1 and "http" not in page
    for tag in ("div", "table", "thead", "tbody", "tr", "td", "th", "html", "body"):
        assert page.count(f"<{tag}>") + page.count(f"<{tag} ") == page.count(f"</{tag}>")
    assert html.block(View("a & b")).endswith("<b>a &amp; b</b></div>")


@dataclass(frozen=True, repr=False)
class Found(Result):
    """A result of one name and some numbers."""

    name: str = "a" * 120
    values: tuple = (1.5, math.nan)

    def records(self):
        return [{"name": self.name, "value": value} for value in self.values]

    def view(self):
        columns = Column("name", lambda row: row["name"], "name"), Column("value", lambda row: "1")
        return View("found", columns, self.records())


@pytest.mark.parametrize(("terminal", "width"), [("60", 80), ("132", 132), ("", 100)])
def test_text_is_as_wide_as_the_terminal_and_80_characters_at_least(terminal, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", terminal)
    assert max(map(len, str(Found()).splitlines())) == min(width, 128)
    assert str(Found()) == repr(Found()) == plain(Found(), width)


def test_files_of_a_result(tmp_path):
    found = Found("a")
    for ending in ("csv", "json", "html"):
        path = tmp_path / f"found.{ending}"
        found.save(path)
        assert path.read_text() == getattr(found, f"to_{ending}")()
        with pytest.raises(OutputExistsError):
            found.save(path)
        found.save(path, force=True)
    records = [{"name": "a", "value": 1.5}, {"name": "a", "value": None}]
    assert json.loads(found.to_json()) == records
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [float(row["value"]) for row in rows] == pytest.approx([1.5, math.nan], nan_ok=True)
    assert replace(found, values=()).to_csv() == "\n"
    assert found._repr_html_() in found.to_html() and found.title == "found"
    with pytest.raises(FewbitError, match="expected a result that has a picture, got Found"):
        found.save(tmp_path / "found.png")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (counted(0, "tensor"), "0 tensors"),
        (counted(1, "batch"), "1 batch"),
        (counted(2, "batch"), "2 batches"),
        (counted(1.5, "bit"), "1.5 bits"),
        (counted(1.0, "bit"), "1 bit"),
        (counted(1234567, "byte"), "1234567 bytes"),
        (short(0), "0"),
        (short(0.14104), "0.1410"),
        (short(0.001), "0.0010"),
        (short(0.00099), "9.9e-4"),
        (short(2.5e-13), "2.5e-13"),
        (short(137.1849), "137.18"),
        (short(9.99999), "10.0000"),
        (short(123456.0), "1.2e5"),
        (digits(0.98765), "0.988"),
        (digits(1.234e-05), "1.2e-5"),
        (digits(math.inf), "-"),
        (amount(0), "0 B"),
        (amount(1023), "1,023 B"),
        (amount(1536), "1.50 KiB"),
        (amount(3 << 30), "3.00 GiB"),
        (share(1, 10_000), "<0.1%"),
        (share(0, 0), "0.0%"),
        (limit_text(1.5), "1.5"),
        (limit_text(1 + 1e-6), "1 + 1e-06"),
    ],
)  # fmt: skip
def test_numbers_as_text(text, expected):
    assert text == expected
