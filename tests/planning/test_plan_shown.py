"""The recommendation of a plan, and its titles, tables, files and pictures, from made-up numbers."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from fewbit.errors import InputError, OutputExistsError
from fewbit.planning.candidates import Candidate
from fewbit.planning.training_plan import Planned, TrainingPlan
from fewbit.render.terminal import plain


def made(*rows, sampling=1.0, share=0.1):
    """A plan of made-up numbers; a row: (policy, bits, bytes, error)."""
    times = 2.0, 1.6, 2.5
    planned = [
        Planned(Candidate(policy, bits), size, error, 0.01, error, math.nan, 0.0, *times)
        for policy, bits, size, error in rows
    ]
    about = "Net<1>", "cpu", 2, 8, 2, share, 4096, 1.0, 0.875, 1.25, None, None, 3.0, sampling
    return TrainingPlan(*about, math.nan, "2 batches of 8", tuple(planned))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("a", 8, 1000, 0.01), ("a", 4, 500, 0.09), ("a", 2, 250, 0.11)], 1),
        ([("a", 4, 500, 0.1)], 0),  # at most the share
        ([("a", 4, 500, 0.09), ("b", 4, 500, 0.08)], 1),  # of as many bytes the one of less error
        ([("a", 4, 500, math.nan), ("a", 8, 900, 0.01)], 1),
        ([("a", 8, 4096, 0.0), ("a", 2, 250, 0.2)], None),  # keeps as much as the exact model
        ([("a", 2, 250, 0.2), ("a", 3, 300, 0.15)], None),
    ],
)
def test_the_cheapest_within_the_share_is_recommended(rows, expected):
    found = made(*rows)
    assert found.recommended is (None if expected is None else found.rows[expected])
    assert [row["recommended"] for row in found.records()].count(True) == (expected is not None)
    title = " ".join(found.title.split())
    if expected is None:
        least = min((row for row in found.rows if row.saved_bytes < 4096), key=lambda x: x.error)
        assert found.closest is least
        assert (
            "no setting keeps its error within 10% of the variance between minibatches; " in title
        )
        assert f"{least.label} comes closest, with {100 * least.error:.0f}% of it" in title
        assert "*" not in re.sub(r"\*:", "", str(found))
    else:
        row = found.rows[expected]
        assert f"{row.label} saves {row.saved_bytes} B in place of 4.00 KiB" in title
        assert "2.00 times as long (1.6 to 2.5)" in title
        assert f"{row.label}*" in str(found) and row.candidate.call in str(found)


@pytest.mark.parametrize(
    ("share", "sampling", "bits"), [(0.02, 1.0, 8), (0.1, 1.0, 4), (0.5, 1.0, 2), (0.1, 5.0, 2)]
)
def test_the_share_says_what_is_allowed(share, sampling, bits):
    rows = ("a", 8, 1000, 0.01), ("a", 4, 500, 0.09), ("a", 2, 250, 0.3)
    found = made(*rows, share=share, sampling=sampling)
    assert found.recommended.label == f"{bits} bits"


@pytest.mark.slow
def test_names_in_a_file_are_no_formulas():
    document = made(("a", 2, 300, 0.04)).to_dict()
    document["model"] = document["rows"][0]["candidate"]["policy"] = r"$\nonsense{$"
    assert "<img" in TrainingPlan.from_json(json.dumps(document))._repr_html_()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(schema="fewbit.table/1"), "expected the schema"),
        (lambda document: document.pop("share"), 'expected the field "share", got none'),
        (lambda document: document["rows"][0].update(candidate={}), 'expected the field "policy"'),
        (lambda document: document["rows"][0]["candidate"].update(bits={"kind": "x"}), "expected a kind out of fixed"),
        (lambda document: document["rows"][0]["candidate"]["bits"].update(bits=9), "expected a whole number from 1 to 8"),
        (lambda document: document.update(model="\x1b[2J"), "model: expected printable characters"),
        (lambda document: document["rows"][0]["candidate"].update(options={"\r": 1}), "expected printable characters"),
    ],
)  # fmt: skip
def test_files_that_are_no_plan(change, message, tmp_path):
    document, path = made(("a", 2, 10, 0.1)).to_dict(), tmp_path / "plan.json"
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"plan.json: .*{message}"):
        TrainingPlan.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="expected JSON"):
        TrainingPlan.load(path)


@pytest.mark.parametrize(
    ("width", "left_out"), [(89, ""), (88, "passes"), (60, "less, ±, random, passes")]
)
def test_a_narrow_terminal_leaves_out_passes_first(width, left_out):
    rows = [("pre-activation", 2, 8_876_932, 1.2345e-3), ("error-bound", 1.5, 88_769_320, 0.9876)]
    found = replace(made(*rows, sampling=1e-1), exact_bytes=1_034_567_890)
    rows = tuple(replace(row, error_error=row.error / 9) for row in found.rows)
    text = " ".join(plain(replace(found, rows=rows), width).split())
    assert text.endswith(f"columns left out: {left_out}") if left_out else "left out" not in text
    assert "pre-activation 2 bits" in text, "columns are left out before names are shortened"


@pytest.mark.slow
def test_times_come_with_the_spread_of_their_passes():
    found = made(("a", 2, 300, 0.04), ("b", 2, 300, 0.04))
    found = replace(found, rows=(replace(found.rows[0], seconds_least=1.25), found.rows[1]))
    first, second = found.records()
    names = "time_ratio", "time_least", "time_most"
    assert [first[name] for name in names] == [2.0, 1.25, 2.5]
    assert [second[name] for name in names] == [2.0, 1.6, 2.5]
    narrow, wide = plain(found, 70), str(found)
    assert "median of 2 passes" in " ".join(narrow.split())
    assert "1.25 to 2.5" in wide and "0.875 to 1.25" in wide and "1.6 to 2.5" in found._repr_html_()
    assert f"<pre>{found.recommended.candidate.call}</pre>" in found._repr_html_()
    assert "<pre>" not in made(("a", 2, 300, 5.0))._repr_html_()
    (exact,) = [line for line in narrow.splitlines() if line.startswith("exact")]
    assert exact.endswith("  1.00") and "0.875 to" not in narrow


def test_what_is_random_is_shown_within_the_error_and_kept_as_it_came():
    (row,) = made(("a", 2, 300, 0.04)).rows
    for variance, shown, told in (
        (0.0412, "100%", True),
        (0.04, "100%", False),
        (0.03, "75%", False),
        (-0.001, "0%", False),
    ):
        row = replace(row, variance=variance, bias=0.04 - variance)
        found = replace(made(("a", 2, 300, 0.04)), rows=(row,))
        assert re.search(rf"2 bits\*? .* {shown} +4%  2.00", plain(found, 120))
        assert ("by chance it came out above the error" in " ".join(str(found).split())) == told
        assert (found.records()[0]["variance"], found.records()[0]["bias"]) == (variance, row.bias)


def test_notes_on_what_cannot_be_said():
    """0.01 is the standard error of the errors here."""
    unsure, sure = made(("a", 2, 300, 0.04)), made(("a", 2, 300, 0.06))
    assert "give more of them" in str(unsure) and "give more" not in str(sure)
    title = made(("a", 8, 4096, 0.0), ("a", 4, 5000, 0.2)).title
    nothing = "no setting saves less than the 4.00 KiB of the exact model"
    assert nothing in " ".join(title.split())
    assert "0 of the variance" in made(("a", 2, 300, 0.0), sampling=0.0).title
    assert "% of it" in made(("a", 2, 300, 5.0)).title


@pytest.mark.slow
def test_the_picture_has_a_curve_for_each_policy_and_marks_what_is_recommended(tmp_path):
    rows = ("a", 8, 1024, 0.01), ("a", 2, 256, 0.3), ("b", 4, 512, 0.05), ("c", 1, 2048, 0.0)
    found = made(*rows)
    (axes,) = found.plot(tmp_path / "plan.svg").axes
    assert (tmp_path / "plan.svg").read_bytes().startswith(b"<?xml")
    curves = {line.get_label(): line.get_xydata() for line in axes.lines}
    np.testing.assert_allclose(curves["a"], [[0.25, 0.3], [1, 0.01]])
    np.testing.assert_allclose(curves["recommended"], curves["b"])
    np.testing.assert_allclose(curves["variance between minibatches"][:, 1], 1.0)
    np.testing.assert_allclose(curves["10% of it"][:, 1], 0.1)
    np.testing.assert_allclose(curves["exact"][:, 0], 4.0)
    assert curves["c"][0, 1] == axes.get_ylim()[0]  # an error of 0 lies on the edge
    assert {label.get_text() for label in axes.texts} == {"8 bits", "4 bits", "2 bits", "1 bit"}
    assert axes.get_xscale() == axes.get_yscale() == "log"
    # A policy without a known error takes no room.
    assert made(*rows, ("d", 8, 0, math.nan)).plot().axes[0].get_position().y0 < 0.25
    labels = {line.get_label() for line in made(rows[1]).plot().axes[0].lines}
    assert "recommended" not in labels
    with pytest.raises(OutputExistsError):
        found.plot(tmp_path / "plan.svg")


CROWD = [("a", 8 - i, 1100 - 100 * i, 0.004 * 2.5**i) for i in range(7)]
CROWD += [("b", 8 - i, 1070 - 90 * i, 0.005 * 2.2**i) for i in range(7)]
CROWD += [("c", 4 - i, 700 - 130 * i, 0.02 * 4**i) for i in range(3)]


NEAR_LIMITS = [("a", 8, 1100, 0.012), ("a", 4, 800, 0.09), ("a", 3, 600, 0.12), ("a", 2, 420, 0.9)]
NEAR_LIMITS += [("b", 8, 900, 0.02), ("b", 4, 560, 0.1), ("b", 3, 450, 0.3), ("b", 2, 330, 1.1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "has_room", "dpi"),
    [
        (CROWD, False, 80),
        (CROWD, False, 160),
        ([CROWD[0], *CROWD[7:]], False, 160),
        (CROWD[:1], True, 80),
        (CROWD[7:], True, 80),
        (NEAR_LIMITS, True, 160),
        (NEAR_LIMITS[:4], True, 80),
    ],
)
def test_labels_cover_neither_each_other_nor_points_nor_lines(rows, has_room, dpi):
    found = made(*rows)
    (axes,) = (figure := found.plot()).axes
    figure.set_dpi(dpi)
    figure.draw_without_rendering()
    extents = [label.get_window_extent() for label in axes.texts]
    labels = [(box.x0, box.y0, box.x1, box.y1) for box in extents]
    for (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) in itertools.combinations(labels, 2):
        assert ax1 <= bx0 or bx1 <= ax0 or ay1 <= by0 or by1 <= ay0
    places = axes.transData.transform([(row.saved_bytes / 1024, row.error) for row in found.rows])
    if has_room:
        corners = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
        segments = [pair for corner in corners for pair in itertools.pairwise(corner)]
        places = np.concatenate([places, *(np.linspace(*pair, 5000) for pair in segments)])
        assert len(labels) == len(rows)
    frame = axes.get_window_extent()
    for x0, y0, x1, y1 in labels:
        assert not ((places > (x0, y0)) & (places < (x1, y1))).all(1).any()
        assert frame.x0 <= x0 and x1 <= frame.x1
    assert len(labels) >= 0.8 * len(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ((1000, 1000), ["960", "970", "980", "990", "1000"]),
        ((300, 1000), ["300", "400", "500", "700", "1000"]),
        ((10, 1000), ["10", "30", "100", "300", "1000"]),
        ((0, 1000), ["1", "10", "100", "1000"]),
        ((2**30, 2**50), ["1", "10", "100", "1000", "10000", "1e5", "1e6"]),
    ],
)
def test_ticks_are_plain_numbers_and_enough(sizes, ticks):
    found = made(*(("a", 2, size, 0.05) for size in sizes))
    (axes,) = replace(found, exact_bytes=sizes[1]).plot().axes
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert shown == ticks
    assert [float(text) for text in shown] == pytest.approx(list(axes.get_xticks()))
    low, high = axes.get_xlim()
    assert all(low < item < high for item in (*axes.get_xticks(), *axes.lines[0].get_xdata()))


def test_settings_without_names_of_policies():
    text = plain(made(("", 4, 500, 0.01), ("", 2, 250, 0.5)), 100)
    assert text.startswith("Net<1>: 4 bits saves 500 B in place of")
    table = [line.split() for line in text.splitlines()]
    assert ["setting", "KiB"] in [line[:2] for line in table]
    assert {"exact", "4", "2"} <= {line[0] for line in table if line}
