"""Print the tables of decision 5 from the results of `default_table.py`.

python benchmarks/default_table_summary.py

A choice is the (weight, tails, objective) of a table, and a field is the name of a number in the results.
"""

from __future__ import annotations

import json
import statistics

import harness
from scipy import stats

DEFAULT = ("uniform", "free", "mse")
BITS = (1, 2, 3, 4)


def rows(name):
    path = harness.RESULTS / f"default_table_{name}.json"
    return json.loads(path.read_text())["rows"]


def choice(row):
    return row["weight"], row["tails"], row["objective"]


def title(chosen):
    weight, tails, objective = chosen
    return ", ".join([weight, *(["pinned"] if tails == "pinned" else []), objective])


def line(*cells):
    print("| " + " | ".join(cells) + " |")


def gradients(field):
    """Print the errors of each choice divided by those of the default, and the errors of the default in percent."""
    found = {}
    for row in rows("gradients"):
        if field in row:
            place = row["network"], row["when"]
            found.setdefault((choice(row), row["bits"]), {})[place] = row[field]
    choices = list(dict.fromkeys(chosen for chosen, _ in found))
    print(f"\n{field}, relative to {title(DEFAULT)}: geometric mean over 6 cases (least .. most)\n")
    line("table", *(f"{bits} bit{'s' * (bits > 1)}" for bits in BITS))
    line(*["---"] * 5)
    for chosen in choices:
        cells = []
        for bits in BITS:
            ours, base = found.get((chosen, bits)), found[DEFAULT, bits]
            if ours is None:
                cells.append("refused")
                continue
            ratios = [ours[place] / base[place] for place in base]
            mean = statistics.geometric_mean(ratios)
            cells.append(f"{mean:.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
        line(title(chosen), *cells)
    print(f"\n{field} of {title(DEFAULT)}, percent\n")
    line("network", *(f"{bits} bit{'s' * (bits > 1)}" for bits in BITS))
    line(*["---"] * 5)
    for network, when in found[DEFAULT, 1]:
        cells = (f"{100 * found[DEFAULT, bits][network, when]:.2f}" for bits in BITS)
        line(f"{network}, {when}", *cells)


def losses(network, field):
    """Print the mean differences of losses from exact training, in pairs of equal seeds, with standard errors."""
    here = [row for row in rows("training") if row["network"] == network]
    exact = {row["seed"]: row[field] for row in here if row["bits"] == 0}
    std = statistics.stdev(exact.values())
    mean = statistics.fmean(exact.values())
    print(
        f"\n{network}, {field}: exact {mean:.5f}, std {std:.5f} over {len(exact)} seeds; "
        "mean difference ± standard error\n"
    )
    line("table", "1 bit", "2 bits", "3 bits")
    line(*["---"] * 4)
    choices = list(dict.fromkeys(choice(row) for row in here if row["bits"]))
    for chosen in choices:
        cells = []
        for bits in (1, 2, 3):
            found = {
                row["seed"]: row[field] - exact[row["seed"]]
                for row in here
                if choice(row) == chosen and row["bits"] == bits
            }
            if len(found) < 2:
                cells.append("-")
                continue
            values = list(found.values())
            error = stats.sem(values)
            cells.append(f"{statistics.fmean(values):+.5f} ± {error:.5f} (n={len(values)})")
        line(title(chosen), *cells)


def main():
    for field in ("below_error", "model_error", "model_error_of_mean"):
        gradients(field)
    for network in dict.fromkeys(row["network"] for row in rows("training")):
        for field in ("final", "train"):
            losses(network, field)


if __name__ == "__main__":
    main()
