"""The choice of tests: the tiers, and the order of a shuffled run. See CONTRIBUTING.md."""

import functools
import random
import zlib
from collections import defaultdict
from pathlib import Path

TIERS = "slow", "inductor", "frameworks", "processes", "fuzz"
"""The markers of the tiers besides the fast one. A test without these markers belongs to the fast tier."""
TESTS = Path(__file__).parent
FOLDERS = {"frameworks": "integrations", "fuzz": "fuzz"}
"""The folders whose tests belong to one tier all. A run of the fast tier does not import their files."""
FEW = 8
"""The number of cases up to which all cases of a test are fast, unless they are marked."""


def is_fast(item):
    """Return whether a test belongs to the fast tier."""
    return not any(map(item.get_closest_marker, TIERS))


@functools.cache
def of_folder(path):
    """Return the tier of all tests below a path of FOLDERS, or None."""
    return next(
        (tier for tier, folder in FOLDERS.items() if TESTS / folder in (path, *path.parents)), None
    )


def skips_folder(path, config):
    """Return whether a run leaves out a folder of FOLDERS, because the command line names neither tiers nor the folder."""
    if config.option.markexpr or path not in [TESTS / folder for folder in FOLDERS.values()]:
        return False
    here = config.invocation_params.dir
    asked = [Path(here, argument.partition("::")[0]).resolve() for argument in config.args]
    return not any(path in (name, *name.parents) for name in asked)


def rest_of_sweeps(items):
    """Yield the cases of parametrized tests that a short run leaves out.

    The fast tier has enough cases of a test for every value of every parameter to occur, or n cases if the test is marked
    ``fast(n)``. Other tiers have at least FEW. The choice depends on the names of the cases alone, so that all processes of a
    run choose alike.
    """
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("cuda"):
            cases[item.nodeid.split("[")[0], is_fast(item)].append(item)
    for (_, fast), sweep in cases.items():
        sweep.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        mark = sweep[0].get_closest_marker("fast")
        if not fast:
            yield from sweep[FEW:]
        elif mark:
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
    """Return a function of a test, which is true if the command line names the test.

    It may name the test itself, as file::test, or a folder of FOLDERS or one of its files.
    """
    asked = [
        (
            Path(config.invocation_params.dir, argument.partition("::")[0]).resolve(),
            argument.partition("::")[2],
        )
        for argument in config.args
    ]

    def is_named(item):
        own = item.nodeid.partition("::")[2]
        return any(
            own == names or own.startswith((f"{names}[", f"{names}::"))
            if names
            else of_folder(path) is not None
            for path, names in asked
            if path in (item.path, *item.path.parents)
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
