"""Functions that all benchmarks use: they describe the machine, measure times, and save results."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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


def device_seconds(call, device, repeats, warm=3):
    """Return the sorted times of `repeats` calls on a device, in seconds: on a GPU between CUDA events, else wall times.

    Args:
        call: a function without arguments.
        device: "cuda" or "cpu".
        repeats: the number of calls that are timed.
        warm: the number of calls before, which are not timed.
    """
    import torch

    for _ in range(warm):
        call()
    if device == "cpu":
        return seconds(call, repeats, warm=False)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return sorted(1e-3 * a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))


def copy_bandwidth(n, device, repeats):
    """Return the bytes per second that torch's copy of n float32 elements reads and writes."""
    import torch

    source, target = torch.randn(n, device=device), torch.empty(n, device=device)
    times = device_seconds(lambda: target.copy_(source), device, repeats)
    return 2 * 4 * n / statistics.median(times)


def most_bytes(run) -> int:
    """Return by how many bytes the CPU's memory has grown at most while run() runs, from the profiler's list of allocations."""
    from torch.autograd.profiler import profile

    with profile(profile_memory=True, use_kineto=True) as profiler:
        run()
    now = most = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def spread(times):
    """Format sorted times as `median (min .. max)`, in s or ms."""
    return f"{show(statistics.median(times))} ({show(times[0])} .. {show(times[-1])})"


def show(value):
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def resident_bytes() -> int:
    """Return the resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def watched(now):
    """Call now() every millisecond in another thread while the block runs.

    Yields:
        An object whose attribute `most` is the greatest result so far.
    """
    found, done = SimpleNamespace(most=now()), threading.Event()

    def watch():
        while not done.wait(0.001):
            found.most = max(found.most, now())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def in_process(function, *arguments):
    """Call a function in a new process, and return its result."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def stored(name):
    """Return the rows of RESULTS/<name>.json, or [] if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def run_missing(name, about, function, tasks, jobs, *settings):
    """Run tasks whose results are not stored, in several processes, and store each result when it is there.

    Args:
        name: the name of the results, as in `save`.
        about: the machine, as in `save`.
        function: a function of a task's values and of `settings`. It returns a dict, which is added to the task.
        tasks: dicts with the same keys, which are fields of the rows.
        jobs: the number of processes.
        *settings: further arguments of the function, the same for all tasks.

    Returns:
        All rows: those stored before, and those of the tasks.
    """
    rows = stored(name)
    todo = [task for task in tasks if not any(task.items() <= row.items() for row in rows)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = {pool.submit(function, *task.values(), *settings): task for task in todo}
        for number, future in enumerate(as_completed(running), 1):
            rows.append({**running[future], **future.result()})
            print(f"{number}/{len(todo)}", rows[-1], flush=True)
            save(name, about, rows)
    return rows


def save(name, about, rows):
    """Write RESULTS/<name>.json: the machine `about` and the rows, a list of dicts, each on a line of its own."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = f'{{"machine": {json.dumps(about)},\n "rows": [\n{lines}\n]}}\n'
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
