"""A function that runs tasks in several processes and reports their progress."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from fewbit.errors import FewbitError

POLL = 0.2
"""Seconds between progress updates."""

_worker = None


class Stopped(Exception):
    """Raised by `step` in a worker, to end the task after a failure or an interrupt."""


def run_all(
    work: Callable, tasks: Sequence, processes: int, progress: Callable[[int, int], None]
) -> list:
    """Return `[work(task, step) for task in tasks]`, computed in several processes.

    Args:
        work: Calls `step(steps done)` after each step of the task; picklable for several processes.
        tasks: The tasks, started in reverse order, so the slowest should be last.
        processes: With 1 the tasks run in this process, in order.
        progress: Called in this process as `progress(index of a task, steps done in it)`.
    """
    if processes == 1:
        return [
            work(task, lambda n, index=index: progress(index, n))
            for index, task in enumerate(tasks)
        ]
    context = multiprocessing.get_context("spawn")  # torch's thread pools hang in forked processes
    steps, stop = context.RawArray("q", len(tasks)), context.RawValue("b", 0)
    # The arguments are pickled here, since multiprocessing would send tensors through shared memory, which containers
    # often lack.
    arguments = (pickle.dumps((work, tasks)), steps, stop)
    pool = ProcessPoolExecutor(processes, context, _begin, arguments)
    before = set(multiprocessing.active_children())
    try:
        with _interrupts_ignored():  # workers inherit this: a terminal sends Ctrl-C to them too
            running = [pool.submit(_run, index) for index in reversed(range(len(tasks)))]
        workers = set(multiprocessing.active_children()) - before
        while wait(running, POLL, FIRST_EXCEPTION).not_done:
            # The pool itself notices the end of its last started worker only after another worker has finished a task.
            if not all(worker.is_alive() for worker in workers):
                raise BrokenProcessPool
            for index, done in enumerate(steps):
                if done:
                    progress(index, done)
            for future in running:
                if future.done():
                    future.result()
        return [future.result() for future in reversed(running)]
    except BrokenProcessPool:
        raise FewbitError("a process of the demo was ended before it was done") from None
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


def _begin(pickled, steps, stop):
    global _worker
    _worker = (*pickle.loads(pickled), steps, stop)


def _run(index):
    work, tasks, steps, stop = _worker

    def step(n):
        steps[index] = n
        if stop.value:
            raise Stopped

    return work(tasks[index], step)


@contextmanager
def _interrupts_ignored():
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
