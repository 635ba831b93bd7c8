"""The choice of tests: the fast tier, and the order of a shuffled run. See CONTRIBUTING.md."""

import random
import zlib
from collections import defaultdict
from pathlib import Path

FEW = 8
"""A test with at most so many cases is no sweep: all of them are fast, unless they are marked."""


def rest_of_sweeps(items):
    """Yield the cases of parametrized tests that the fast tier can do without.

    It keeps so many cases of each test that every value of every parameter occurs, or as many as its mark
    ``fast(n)`` says. Which ones depends on their names alone, so that all processes of a run choose alike.
    """
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("slow", "cuda"))):
            cases[item.nodeid.split("[")[0]].append(item)
    for sweep in cases.values():
        sweep.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        mark = sweep[0].get_closest_marker("fast")
        if mark:
            yield from sweep[mark.args[0] :]
        elif len(sweep) > FEW:
            yield from _with_nothing_new(sweep)


def _with_nothing_new(sweep):
    seen = set()
    for item in sweep:
        values = set(
            enumerate(item.callspec._idlist)
        )  # the names of its values, one a parametrization
        if values <= seen:
            yield item
        seen |= values


def named(config):
    """Return a function that says whether a test was asked for by name, as file::test."""
    here = config.invocation_params.dir
    asked = [argument.partition("::") for argument in config.args]
    asked = [(Path(here, file).resolve(), names) for file, _, names in asked if names]

    def is_named(item):
        own = item.nodeid.partition("::")[2]
        return any(
            item.path == file and (own == names or own.startswith((f"{names}[", f"{names}::")))
            for file, names in asked
        )

    return is_named


def shuffled(items, seed):
    """Return the items in an order drawn from the seed. Those of a file stay together, so that they share fixtures."""
    files = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    draw = random.Random(seed)
    order = list(files.values())
    draw.shuffle(order)
    for file in order:
        draw.shuffle(file)
    return [item for file in order for item in file]
