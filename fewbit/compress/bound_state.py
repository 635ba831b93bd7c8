"""What the error-bound policy knows as plain numbers, for a controller's state, and back.

Readers raise InputError, KeyError, TypeError or ValueError for anything that was not written here.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import asdict

from fewbit.compress.bound_observation import ActivationSeen, BoundsSeen, Demand, VariableSeen
from fewbit.compress.bound_tables import number_of
from fewbit.compress.estimates import Estimate, Known, KnownActivation, Pair, Row
from fewbit.compress.observing import check_step
from fewbit.errors import InputError


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
    """names: of the model's layers."""
    variables, monitored = {}, {}
    for row in plain["variables"]:
        name = _name(row, names)
        weights = row["channel_weights"]
        variables[name] = VariableSeen(
            *_facts(row)[:2],
            *_facts(row)[3:5],
            _numbers(row["squares"]),
            _number(row["error2"]),
            _facts(row)[5],
            [_demand(each) for each in row["demands"]],
            None if weights is None else _numbers(weights),
            bool(row["is_known"]),
        )
        if row["monitored"]:
            monitored[name] = [
                (str(label), _number(hat2), _number(exact2))
                for label, hat2, exact2 in row["monitored"]
            ]
    activations = {
        str(row["name"]): ActivationSeen(
            str(row["function"]),
            tuple(map(float, row["parameters"])),
            _number(row["v2"]),
            _number(row["grad2"]),
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


def read_known(rows, names: Container[str]) -> dict[tuple[str, int], Known]:
    """names: of the model's layers."""
    return {
        _name(row, names): Known(
            *_facts(row),
            tuple(tuple(_numbers(spread)) for spread in row["spreads"]),
            None if row["weights"] is None else tuple(_numbers(row["weights"])),
            check_step(row["weighed"]),
            {number_of(str(each["label"])): _estimate(each) for each in row["demands"]},
            check_step(row["missed"]),
        )
        for row in rows
    }


def read_activations(rows) -> dict[str, KnownActivation]:
    return {
        str(row["name"]): KnownActivation(
            str(row["function"]),
            tuple(map(float, row["parameters"])),
            tuple(_row(each, 2) for each in row["rows"]),
            check_step(row["missed"]),
        )
        for row in rows
    }


def read_pairs(rows) -> tuple[Pair, ...]:
    return tuple(Pair(*_row(each, 2)) for each in rows)


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


def _estimate(plain) -> Estimate:
    return Estimate(
        str(plain["label"]),
        str(plain["kind"]),
        tuple(Row(*_row(each, 3)) for each in plain["rows"]),
        read_pairs(plain["pairs"]),
        check_step(plain["missed"]),
    )


def _demand(plain) -> Demand:
    numbers = (_number(plain[each]) for each in ("v2", "first", "second"))
    return Demand(str(plain["label"]), str(plain["kind"]), *numbers)


def _facts(row) -> tuple:
    """average, is_fixed, is_known, elements, samples, dtype_bytes."""
    sizes = (check_step(row[each]) for each in ("elements", "samples", "dtype_bytes"))
    return _number(row["average"]), bool(row["is_fixed"]), bool(row["is_known"]), *sizes


def _name(row, names) -> tuple[str, int]:
    name = str(row["name"])
    if name not in names:
        raise InputError(
            f"expected the state of this model's controller, got one with a layer {name!r}, which it lacks"
        )
    return name, check_step(row["input"])


def _row(values, count: int) -> tuple[float, ...]:
    numbers = tuple(_numbers(values))
    if len(numbers) != count:
        raise InputError(f"expected {count} numbers, got {len(numbers)}")
    return numbers


def _numbers(values) -> list[float]:
    return [_number(each) for each in values]


def _number(value) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise InputError(f"expected a finite number of 0 or more, got {value!r}")
    return number
