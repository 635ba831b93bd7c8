"""The choice of tests: the fast tier, and the order of a shuffled run. See CONTRIBUTING.md."""

import random
import zlib
from collections import defaultdict
from pathlib import Path

FEW = 8
"""The number of cases up to which all cases of a test are fast, unless they are marked."""


def rest_of_sweeps(items):
    """Yield the cases of parametrized tests that the fast tier leaves out.

    The fast tier has enough cases of a test for every value of every parameter to occur, or n cases if the test is marked
    ``fast(n)``. The choice depends on the names of the cases alone, so that all processes of a run choose alike.
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
    """Return a function of a test, which is true if the command line names the test as file::test."""
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
