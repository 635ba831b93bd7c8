"""Functions that all benchmarks use: they describe the machine, measure times, and save results."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import statistics
import time
from pathlib import Path

# $OUT is for machines whose working copy is discarded after the run.
RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
IMAGES = Path(__file__).parent.parent / "docs" / "images"


def machine(*packages):
    """Return a description of the machine, with the versions of `packages`, as it is stored with every result."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _processor():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def seconds(call, repeats, warm=True):
    """Return the sorted wall times of `repeats` calls, in seconds. If `warm` is true, an untimed call precedes them."""
    if warm:
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)


def spread(times):
    """Format sorted times as `median (min .. max)`, in s or ms."""
    return f"{show(statistics.median(times))} ({show(times[0])} .. {show(times[-1])})"


def show(value):
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def save(name, about, rows):
    """Write RESULTS/<name>.json (the machine `about` and the rows, a list of dicts) and <name>.csv (the rows)."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {"machine": about, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
