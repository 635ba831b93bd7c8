"""Conversion of the error-bound policy's knowledge to plain numbers, for a controller's state, and back."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict

from fewbit import functions
from fewbit.errors import FunctionError, InputError
from fewbit.policies.error_bound.estimates import (
    HISTORY,
    Estimate,
    Known,
    KnownActivation,
    Pair,
    Row,
)
from fewbit.policies.error_bound.probe import (
    EXPECTED,
    MEASURED,
    ActivationNorms,
    BoundsSeen,
    GradientConstraint,
    TensorNorms,
)
from fewbit.policies.error_bound.sums import number_of
from fewbit.policies.unobserved import FORGOTTEN
from fewbit.runtime.saved.probe import SPREAD
from fewbit.schema import shorten
from fewbit.schema.shapes import (
    MOST_ELEMENTS,
    MOST_RATIO,
    MOST_SLOTS,
    MOST_WEIGHT,
    choice,
    entries,
    flag,
    listed,
    optional,
    real,
    record,
    rows_by_name,
    text,
    whole,
    wrong,
)

MOST_BITS = 64
"""Largest number of bits of an element, including elements that are saved exactly."""
MOST_PARAMETER = 1e6
"""Largest absolute value of a parameter of an activation function."""


def plain_seen(seen: BoundsSeen) -> dict:
    """Of one observation."""
    return {
        "variables": [
            {
                "name": name,
                "input": slot,
                **asdict(each),
                "monitored": _monitored(seen, (name, slot)),
            }
            for (name, slot), each in seen.variables.items()
        ],
        "activations": [
            {"name": name, **asdict(each), "parameters": list(each.parameters)}
            for name, each in seen.activations.items()
        ],
    }


def read_seen(plain: Mapping, names: Container[str]) -> BoundsSeen:
    """Recreate an observation from plain numbers.

    Args:
        plain: an entry that the shape SEEN has checked.
        names: the names of the model's layers.

    Raises:
        InputError: the model lacks one of the layers, or lists in the entry have contradicting lengths.
    """
    variables, monitored = {}, {}
    for name, row in rows_by_name(plain["variables"], "pending.variables", names).items():
        parts = _parts_of(row)
        if len(row["squares"]) < parts:
            raise wrong(
                "pending.variables.squares", f"at least {parts} entries", len(row["squares"])
            )
        variables[name] = TensorNorms(
            row["average"],
            row["is_fixed"],
            row["elements"],
            row["samples"],
            row["squares"],
            row["error2"],
            row["dtype_bytes"],
            [GradientConstraint(**each) for each in row["demands"]],
            row["channel_weights"],
            row["is_known"],
        )
        if row["monitored"]:
            monitored[name] = [tuple(each) for each in row["monitored"]]
    for row in plain["activations"]:
        _check_parameters(row)
    activations = {
        row["name"]: ActivationNorms(
            row["function"], tuple(row["parameters"]), row["v2"], row["grad2"]
        )
        for row in plain["activations"]
    }
    return BoundsSeen(variables, activations, monitored)


def plain_known(known: Mapping, activations: Mapping[str, KnownActivation]) -> dict:
    """Entries of a controller's state."""
    return {
        "variables": [
            {
                "name": name,
                "input": slot,
                "average": each.average,
                "is_fixed": each.is_fixed,
                "is_known": each.is_known,
                "elements": each.elements,
                "samples": each.samples,
                "dtype_bytes": each.dtype_bytes,
                "spreads": [list(spread) for spread in each.spreads],
                "weights": None if each.weights is None else list(each.weights),
                "weighed": each.weighed,
                "demands": [_plain_estimate(demand) for demand in each.demands.values()],
                "missed": each.missed,
            }
            for (name, slot), each in known.items()
        ],
        "activations": [
            {
                "name": name,
                "function": each.function,
                "parameters": list(each.parameters),
                "rows": [list(row) for row in each.rows],
                "missed": each.missed,
            }
            for name, each in activations.items()
        ],
    }


def read_known(rows: list[dict], names: Container[str]) -> dict[tuple[str, int], Known]:
    """Recreate the policy's knowledge of each variable from plain numbers.

    Args:
        rows: entries that the shape KNOWN has checked.
        names: the names of the model's layers.

    Raises:
        InputError: the model lacks one of the layers, or lists in the entries have contradicting lengths.
    """
    return {name: _known(each) for name, each in rows_by_name(rows, "variables", names).items()}


def _known(row: dict) -> Known:
    where = f"variables: {shorten(row['name'])}"
    parts, latest = _parts_of(row), len(row["spreads"][-1])
    if latest != parts:
        raise wrong(f"{where}: spreads", f"{parts} entries in the last one", latest)
    if (row["weights"] is None) != (row["weighed"] == 0):
        raise wrong(f"{where}: weighed", "0 without weights, and more with them", row["weighed"])
    demands = {number_of(each["label"]): _estimate(each) for each in row["demands"]}
    if len(demands) < len(row["demands"]):
        labels = [each["label"] for each in row["demands"]]
        raise wrong(f"{where}: demands", "different labels", labels)
    return Known(
        row["average"],
        row["is_fixed"],
        row["is_known"],
        row["elements"],
        row["samples"],
        row["dtype_bytes"],
        tuple(map(tuple, row["spreads"])),
        None if row["weights"] is None else tuple(row["weights"]),
        row["weighed"],
        demands,
        row["missed"],
    )


def read_activations(rows: list[dict]) -> dict[str, KnownActivation]:
    """Recreate the policy's knowledge of each activation from plain numbers.

    Args:
        rows: entries that the shape ACTIVATION has checked.

    Raises:
        InputError: an activation is listed twice, or its parameters are not valid for its function.
    """
    for row in rows:
        _check_parameters(row)
    found = {
        row["name"]: KnownActivation(
            row["function"], tuple(row["parameters"]), tuple(row["rows"]), row["missed"]
        )
        for row in rows
    }
    if len(found) < len(rows):
        raise wrong("activations", "different names", [row["name"] for row in rows])
    return found


def _check_parameters(row: dict) -> None:
    name, values = row["function"], row["parameters"]
    names = functions.get(name).parameters if name else ()
    where = f"activations: {shorten(row['name'])}: parameters"
    if len(values) != len(names):
        raise wrong(where, f"{len(names)} of {name or 'no function'}", values)
    if name:
        try:
            functions.get(name, dict(zip(names, values, strict=True)))
        except FunctionError as error:
            raise InputError(f"{where}: {error}") from None


def _parts_of(row: dict) -> int:
    """Return the number of groups into which a variable's samples are divided."""
    return min(row["samples"], SPREAD) or 1


def _monitored(seen: BoundsSeen, name) -> list:
    return [list(each) for each in seen.monitored.get(name, ())]


def _plain_estimate(demand: Estimate) -> dict:
    return {
        "label": demand.label,
        "kind": demand.kind,
        "rows": [list(row) for row in demand.rows],
        "pairs": [list(pair) for pair in demand.pairs],
        "missed": demand.missed,
    }


def _estimate(plain: dict) -> Estimate:
    return Estimate(
        plain["label"],
        plain["kind"],
        tuple(Row(*each) for each in plain["rows"]),
        tuple(Pair(*each) for each in plain["pairs"]),
        plain["missed"],
    )


def _function_name(value, where) -> str:
    """Check the name of a built-in function, or "" if only other processes have seen the activation."""
    name = text(value, where)
    if name and name not in functions.names():
        raise wrong(where, "the name of a function that fewbit has", value)
    return name


_VARIABLE = {
    "name": text,
    "input": whole(0, MOST_SLOTS - 1),
    "average": real(0, MOST_BITS),
    "is_fixed": flag,
    "is_known": flag,
    "elements": whole(0, MOST_ELEMENTS),
    "samples": whole(0, MOST_ELEMENTS),
    "dtype_bytes": whole(1, 16),
}
_KIND = choice(EXPECTED, MEASURED, "")
_PARAMETERS = listed(real(-MOST_PARAMETER, MOST_PARAMETER), 0, 8)
_ESTIMATE = record(
    label=text,
    kind=_KIND,
    rows=listed(entries(real(), real(0, MOST_RATIO), real(0, MOST_RATIO)), 1, HISTORY),
    pairs=listed(entries(real(), real()), 0, HISTORY),
    missed=whole(0, FORGOTTEN),
)
KNOWN = listed(
    record(
        **_VARIABLE,
        spreads=listed(listed(real(), 1, SPREAD), 1, HISTORY),
        weights=optional(listed(real(0, MOST_WEIGHT), 1)),
        weighed=whole(0, HISTORY),
        demands=listed(_ESTIMATE),
        missed=whole(0, FORGOTTEN),
    )
)
ACTIVATION = listed(
    record(
        name=text,
        function=_function_name,
        parameters=_PARAMETERS,
        rows=listed(entries(real(), real()), 1, HISTORY),
        missed=whole(0, FORGOTTEN),
    )
)
SEEN = record(
    variables=listed(
        record(
            **_VARIABLE,
            squares=listed(real(), 1, SPREAD),
            error2=real(),
            demands=listed(record(label=text, kind=_KIND, v2=real(), first=real(), second=real())),
            channel_weights=optional(listed(real(0, MOST_WEIGHT), 1)),
            monitored=listed(entries(text, real(), real())),
        )
    ),
    activations=listed(
        record(name=text, function=_function_name, parameters=_PARAMETERS, v2=real(), grad2=real())
    ),
)
"""The shapes of the entries of a state: the knowledge of variables and of activations, and one observation."""
