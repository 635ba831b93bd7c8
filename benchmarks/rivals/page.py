"""The tables of docs/results/alternatives.md, which are made from results/alternatives.json. This file needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "results" / "alternatives.md"
MARKER = re.compile(r"<!-- table: ([^>]+) -->\n.*?<!-- end of table -->", re.DOTALL)
LADDER = "GPT-2, one option at a time"
"""The title of the second table of GPT-2."""
LEFT_OUT = "save_on_cpu", "fewbit, 2 bits, everything", "+ everything"
"""Options that the page does not show: `save_on_cpu` needs a GPU, and `everything` changes nothing on these networks."""
MIB = 2**20
COLUMNS = "option", "saved, MiB", "saved in bfloat16", "peak, MiB", "step time", "gradient error"


def tables(rows) -> dict[str, str]:
    """Return {title: table in Markdown}."""
    rows = [row for row in rows if row["arm"] not in LEFT_OUT]
    found = {}
    for network in dict.fromkeys(row["network"] for row in rows):
        own = {row["arm"]: row for row in rows if row["network"] == network}
        steps = [arm for arm in own if arm.startswith("+ ") or arm.startswith("fused ")]
        found[network] = _table(own, [arm for arm in own if arm not in steps])
        if steps:
            found[LADDER] = _table(own, ["exact", *steps])
    return found


def rewrite(rows) -> None:
    """Write the tables between their markers in the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


def with_tables(page: str, rows) -> str:
    """Return the text of the page, with the tables of `rows`."""
    found = tables(rows)

    def fill(match):
        return f"<!-- table: {match[1]} -->\n\n{found[match[1]]}\n<!-- end of table -->"

    return MARKER.sub(fill, page)


def _table(rows, arms) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [_cells(arm, rows[arm], rows.get("exact", {})) for arm in arms]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(arm, row, exact) -> list[str]:
    if row.get("failure"):
        return [arm, row["failure"].replace("|", "/"), *[""] * (len(COLUMNS) - 2)]
    return [
        arm,
        _bytes(row, exact, "saved_bytes"),
        _bytes(row, exact, "bfloat16_saved_bytes"),
        _bytes(row, exact, "peak_bytes"),
        _ratio(arm, row),
        _error(row),
    ]


def _bytes(row, exact, key) -> str:
    if row.get(key) is None:
        return ""
    shown = f"{row[key] / MIB:.1f}"
    if row is exact or key not in exact or key != "saved_bytes":
        return shown
    factor = exact[key] / row[key]
    if 0.95 < factor < 1.05:
        return shown
    return f"{shown} ({factor:.1f}x)" if factor > 1 else f"{shown} ({1 / factor:.1f}x more)"


def _error(row) -> str:
    if "error" not in row:
        return ""
    if row["error"] is None:
        return "not finite"
    return f"{row['error']:.1%}" if row["error"] >= 5e-4 else "0"


def _ratio(arm, row) -> str:
    if "ratio" not in row or arm == "exact":
        return "1" if arm == "exact" else ""
    backend = ", aot_eager" if row.get("backend") == "aot_eager" else ""
    return f"{row['ratio']:.2f}{backend}"
