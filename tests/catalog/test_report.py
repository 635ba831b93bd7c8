"""The reports: errors by function and bits, our errors beside the paper's, how they show themselves."""

import csv
import io
import json
import re

import pytest

import fewbit
from fewbit.catalog import paper, report
from fewbit.errors import FewbitError, FunctionError, OutputExistsError, SolveError
from fewbit.sizes import counted


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def comparison():
    return fewbit.compare()


# --- the paper ----------------------------------------------------------------------------------


def test_every_printed_digit_is_reproduced(comparison):
    printed = [row for row in comparison.rows if row.paper is not None]
    assert len(printed) == sum(map(len, paper.TABLE_3.values())) == 25
    for row in printed:
        assert f"{row.discrete:.4f}" == f"{row.paper:.4f}", row
        assert row.reproduced


def test_breaks_anywhere_are_never_worse_than_breaks_on_a_grid(comparison):
    for row in comparison.rows:
        if row.discrete is not None:
            assert row.intervals <= row.discrete * (1 + 1e-12), row
    # What the continuous optimum rounds to differs from the print in these two, downwards.
    differing = {
        (row.function, row.bits): round(row.paper - round(row.intervals, 4), 4)
        for row in comparison.rows
        if row.paper is not None and round(row.intervals, 4) != row.paper
    }
    assert differing == {("selu", 1): 0.0001, ("silu", 2): 0.0001}


def test_levels_are_nowhere_worse_and_much_better_where_promised(comparison):
    ratios = {(row.function, row.bits): row.ratio for row in comparison.rows}
    assert ratios.pop(("relu", 1)) is None
    assert min(ratios.values()) >= 1 - 1e-9
    promised = [(name, bits) for name in ("gelu", "silu", "mish") for bits in (3, 4)]
    for problem in [*promised, ("selu", 2)]:
        assert ratios[problem] >= 1.35, problem
    # The paper's parity trick is one of the ways to share levels.
    for name in paper.PARITY:
        for bits in (1, 2, 3, 4):
            assert ratios[name, bits] == pytest.approx(1, abs=1e-6)


def test_the_bounds_are_below_the_errors(comparison):
    for row in comparison.rows:
        assert (
            row.intervals_lower_bound <= row.intervals <= row.intervals_lower_bound * 1.01 + 1e-30
        )
        assert row.levels_lower_bound <= row.levels <= row.levels_lower_bound * 1.001 + 1e-30


def test_the_discrete_problem_converges_to_the_continuous_one():
    continuous = fewbit.solve("gelu", 3, form="intervals").error
    excess = [paper.discrete_optimum("gelu", 3, cells) - continuous for cells in (100, 1000, 10000)]
    assert excess[0] > excess[1] > excess[2] > 0
    assert excess[2] < 1e-3 * excess[0]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"bits": 3}, 0.0121),
        ({"bits": 3, "form": "intervals"}, 0.0121),
        ({"bits": 3, "parameters": {"beta": 1.0}}, 0.0121),
        ({"bits": 3, "parameters": {"beta": 2.0}}, None),
        ({"bits": 5}, None),
        ({"bits": 3, "weight": "normal"}, None),
        ({"bits": 3, "domain": (-10, 9)}, None),
        ({"bits": 3, "tails": "pinned"}, None),
        ({"bits": 3, "levels": 7}, None),
        ({"bits": 3, "objective": "minimax"}, None),
    ],
)
def test_the_counterpart_is_the_same_problem_only(request_, expected):
    assert paper.counterpart(fewbit.solve("softplus", **request_)) == expected


def test_an_exact_table_of_fewer_levels_has_a_counterpart():
    assert paper.counterpart(fewbit.solve("relu", 1)) == 0.0
    assert paper.counterpart(fewbit.solve("relu", 2)) is None


# --- compare ------------------------------------------------------------------------------------


def test_compare_takes_names_and_aliases():
    rows = fewbit.compare(["swish", "softsign", "silu"], bits=2).rows
    assert [(row.function, row.bits, row.paper) for row in rows] == [
        ("silu", 2, 0.0479),
        ("softsign", 2, None),
    ]
    assert rows[1].discrete is None and rows[1].reproduced is None
    assert fewbit.compare("gelu", bits=(1, 2)).rows[1].bits == 2


def test_compare_of_an_even_derivative_counts_both_halves():
    (row,) = fewbit.compare("tanh", bits=3).rows
    half = fewbit.solve("tanh", 3, form="intervals", domain=(0, 10))
    assert row.parity
    assert row.intervals == 2 * half.error
    assert row.levels == fewbit.solve("tanh", 3).error


def test_compare_reports_its_progress():
    calls = []
    fewbit.compare(["relu", "gelu"], bits=[1, 2], progress=lambda *call: calls.append(call))
    assert calls == [
        ("relu, 1 bit", 0, 4),
        ("relu, 2 bits", 1, 4),
        ("gelu, 1 bit", 2, 4),
        ("gelu, 2 bits", 3, 4),
    ]


def test_compare_refuses_what_it_does_not_know():
    with pytest.raises(FunctionError, match="did you mean gelu"):
        fewbit.compare("gelo")
    with pytest.raises(SolveError, match="bits"):
        fewbit.compare("gelu", bits=0)


def test_the_comparison_shows_itself(comparison):
    text = str(comparison)
    assert max(map(len, text.splitlines())) <= 80
    assert "gives 25 of 25 printed figures" in text
    assert "lower than printed in 2, higher in 0" in text
    assert "nowhere above intervals" in text
    assert "* f' is even" in text and "\nsigmoid* " in text
    row = next(line for line in text.splitlines() if "0.008094" in line)
    assert row.split() == ["3", "0.0119", "0.0119", "0.0119", "0.008094", "1.47x", "0.008094"]


def test_records_are_json_and_csv(comparison, tmp_path):
    records = comparison.records()
    assert json.loads(json.dumps(records)) == records
    assert records[0]["function"] == "relu" and records[0]["ratio"] is None
    rows = list(csv.DictReader(io.StringIO(comparison.to_csv())))
    assert [float(row["levels"]) for row in rows] == [record["levels"] for record in records]
    path = tmp_path / "rows.csv"
    assert comparison.to_csv(path) == path.read_text()
    with pytest.raises(OutputExistsError):
        comparison.to_csv(path)
    comparison.to_csv(path, force=True)


def test_the_comparison_is_html(comparison):
    text = comparison._repr_html_()
    assert text.count("<tr>") == 1 + len(comparison.rows)
    assert text.count("<table>") == text.count("</table>") == 1
    assert "(f&#x27; - q)^2" in text


# --- error tables -------------------------------------------------------------------------------


def test_the_error_table_holds_the_errors_of_the_tables():
    table = fewbit.error_table(["gelu", "swish"], bits=(1, 2, 3))
    expected = {
        name: {bits: fewbit.load_table(name, bits).error for bits in (1, 2, 3)}
        for name in ("gelu", "silu")
    }
    assert table.values() == expected
    assert [row.function for row in table.rows] == ["gelu", "silu"]


def test_the_error_table_has_other_settings():
    table = fewbit.error_table(
        "gelu", 2, weight="normal", form="intervals", metric="relative_error"
    )
    wanted = fewbit.solve("gelu", 2, weight="normal", form="intervals")
    assert table.values() == {"gelu": {2: pytest.approx(wanted.relative_error, rel=1e-9)}}
    (record,) = table.records()
    assert record["error"] == pytest.approx(wanted.error, rel=1e-9)
    assert (record["form"], record["levels"], record["pieces"]) == ("intervals", 4, 4)
    assert json.loads(json.dumps(record)) == record
    assert "normal weight" in str(table)


def test_the_error_table_fits_80_columns_with_all_bits():
    table = fewbit.error_table(["relu", "relu_squared"])
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split()[:5] == ["function", "1", "bit", "2", "bits"]
    assert lines[4].split() == ["relu", *"00000000"]
    assert re.fullmatch(r"relu_squared +137\.\d\d +26\.80\d .*", lines[5])


def test_the_error_table_is_html_and_csv():
    table = fewbit.error_table(["relu", "gelu"], bits=(1, 2))
    text = table._repr_html_()
    assert text.count("<tr>") == 3
    assert ">0.1410</td>" in text
    assert len(list(csv.DictReader(io.StringIO(table.to_csv())))) == 4


def test_the_error_table_refuses_an_unknown_metric():
    with pytest.raises(FewbitError, match="metric: expected error or relative_error"):
        fewbit.error_table("gelu", metric="gap")


@pytest.mark.parametrize("width", range(50, 121, 10))
def test_numbers_of_tables_are_never_cut(comparison, width):
    errors = fewbit.error_table(["relu_squared", "gelu"])
    for found in (comparison, errors):
        text = report.render_plain(found, width)
        before, table = text[: text.index("\n──")], text[text.index("\n──") + 1 :].split("\n\n")[0]
        assert max(map(len, text.splitlines())) <= width
        header = re.split(" {2,}", before.splitlines()[-1])
        assert ("no room here for" in text) == (len(header) < len(found._header))
        assert header == [name for name in found._header if name in header]
        shown = table.splitlines()[1:]
        for line, cells in zip(shown, found._cells(), strict=True):
            wanted = dict(zip(found._header, cells, strict=True))
            assert line.split()[1 - len(header) :] == [wanted[name] for name in header[1:]]


class Named(report._Report):
    """Names of two columns beside a number."""

    title, _header, _names = "names", ("layer", "from", "bits"), (0, 1)

    def __init__(self, *rows):
        self._rows = rows

    def _cells(self):
        return list(self._rows)

    def _notes(self):
        return []


LONG = "encoder.layers.11.attention.output"
LONGER = LONG + ".dense.weight"


@pytest.mark.parametrize("width", [25, 40, 66, 86, 87, 88, 120])
def test_names_are_shortened_no_more_than_the_width_demands(width):
    lines = report.render_plain(Named((LONG, LONGER, "3.5"), ("a", "b", "12")), width).splitlines()
    rows = [line.split() for line in lines[4:6]]
    natural = len(LONG) + len(LONGER) + len("bits") + 2 * report.GAP + 1
    assert natural == 90
    assert rows[1] == ["a", "b", "12"]
    first, second, _ = rows[0]
    assert max(map(len, lines)) <= width
    used = len(first) + len(second)
    assert used == min(width - natural, 0) + len(LONG) + len(LONGER)
    # The longer one gives way first.
    assert first == LONG or abs(len(second) - len(first)) <= 1


NUMBERED = [
    f"blocks.{block}.scaled_dot_product_attention [{i}]" for block in (0, 1) for i in (0, 1)
]


@pytest.mark.parametrize("width", range(37, 70))
def test_different_names_stay_different(width):
    rows = [(name, name, "3.5") for name in NUMBERED]
    text = report.render_plain(Named(*rows), width)
    shown = [re.split(" {2,}", line.strip()) for line in text.splitlines()[4:8]]
    assert max(map(len, text.splitlines())) <= width and "…" in text
    for cells in zip(*(each[:2] for each in shown), strict=True):
        assert len(set(cells)) == 4
        assert all(cell.endswith(name[-4:]) for cell, name in zip(cells, NUMBERED, strict=True))


def test_names_begin_no_longer_than_keeps_them_apart():
    def fitted(*names):
        return [cell for (cell,) in report.fitted(("",), [(each,) for each in names], (0,), 21)]

    ends = "tention [0]", "tention [1]"
    assert fitted(*NUMBERED[:2]) == [
        f"blocks…{each}" for each in ("attention [0]", "attention [1]")
    ]
    assert fitted(*NUMBERED) == [f"blocks.{block}…{end}" for block in (0, 1) for end in ends]
    # A third, where no beginning tells them apart.
    alike = ["a" * 20 + each + "a" * 20 for each in "bc"]
    assert fitted(*alike) == ["aaaaaa…aaaaaaaaaaaaa"] * 2


class Wide(Named):
    """Numbers, of which a terminal leaves out the last, then the first."""

    _header, _names, _spare = ("layer", "one", "two", "three"), (0,), (3, 1)


@pytest.mark.parametrize(
    ("width", "left_out"), [(60, ""), (40, ""), (39, "three"), (27, "three"), (26, "one, three")]
)
def test_numbers_are_shown_in_full_or_not_at_all(width, left_out):
    cells = ("layer.of.a.long.name", "1111111", "2222222", "33333333333")
    text = report.render_plain(Wide(cells), width)
    row = text.splitlines()[4].split()
    kept = [
        each for each, name in zip(cells[1:], Wide._header[1:], strict=True) if name not in left_out
    ]
    assert row[1:] == kept and max(map(len, text.splitlines())) <= width
    assert ("…" in row[0]) == (row[0] != cells[0])
    assert (" ".join(text.split()).endswith(f"no room here for: {left_out}")) == bool(left_out)
    assert "no room" not in Wide(cells)._repr_html_()


def test_what_is_too_wide_without_all_that_can_go_is_continued():
    text = report.render_plain(Wide(("a.long.name.of.it", "1", "123456789" * 3, "3")), 25)
    table = text[: text.index("no room")]
    assert "".join(re.findall(r"\d+", table)) == "123456789" * 3
    assert max(map(len, text.splitlines())) <= 25


@pytest.mark.parametrize(("columns", "width"), [("60", 80), ("80", 80), ("132", 132), ("", 80)])
def test_text_is_as_wide_as_the_terminal_but_80_columns_at_least(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    found = Named(("a" * 100, "b" * 40, "3"))
    line = str(found).splitlines()[4]
    assert len(line) == width - 1  # and a space
    assert str(found) == repr(found) == report.render_plain(found, width)


def test_html_has_names_in_full_and_a_repeated_name_stands_once():
    found = Named((LONG, LONGER, "3"), (LONG, "b", "4"), (LONG + "2", "b", "5"))
    page, text = found._repr_html_(), str(found)
    assert page.count(LONG) == 4 and LONGER in page and "…" not in page
    assert max(map(len, text.splitlines())) <= 80 and text == report.render_plain(found, 80)
    starts = [line.split()[0] for line in text.splitlines()[4:7]]
    assert starts == [LONG, "b", LONG + "2"] and "…" in text


def test_nothing_to_show_shows():
    empty = fewbit.error_table([], bits=(1, 2))
    assert empty.records() == [] and empty.to_csv() == "\n"
    assert "function" in str(empty)
    assert "function" in str(report.Comparison(()))


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "tensor", "0 tensors"),
        (1, "tensor", "1 tensor"),
        (2, "batch", "2 batches"),
        (1, "batch", "1 batch"),
        (1.5, "bit", "1.5 bits"),
        (2.0, "bit", "2 bits"),
        (1.0, "bit", "1 bit"),
        (1234567, "byte", "1234567 bytes"),
    ],
)
def test_counts(count, noun, text):
    assert counted(count, noun) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.14104, "0.1410"),
        (0.001, "0.0010"),
        (0.00099, "9.9e-4"),
        (8.18e-6, "8.2e-6"),
        (2.5e-13, "2.5e-13"),
        (137.1849, "137.18"),
        (9.99999, "10.0000"),
        (123456.0, "1.2e5"),
    ],
)
def test_short_numbers(value, text):
    assert report.short(value) == text
    assert len(text) <= 7
