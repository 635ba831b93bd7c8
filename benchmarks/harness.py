"""What every benchmark shares: the machine it ran on, medians with their spread, files of results."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import statistics
import time
from pathlib import Path

# $OUT, for a machine whose working copy is thrown away.
RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
IMAGES = Path(__file__).parent.parent / "docs" / "images"


def machine(*packages):
    """Processor, cores, Python and the versions of ``packages``, as they go into every result."""
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
    """Wall times of ``repeats`` calls, sorted; one call before them unless ``warm`` is False."""
    if warm:
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)


def spread(times):
    """``median (min .. max)`` in readable units."""
    return f"{show(statistics.median(times))} ({show(times[0])} .. {show(times[-1])})"


def show(value):
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def save(name, about, rows):
    """``results/<name>.json`` (machine and rows) and ``.csv`` (rows)."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {"machine": about, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
