"""Work in several processes that say how far they are."""

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
"""Seconds between two looks at how far the processes are."""

_worker = None


class Stopped(Exception):
    """Raised in a worker's step when the process that waits for it has given up."""


def run_all(
    work: Callable, tasks: Sequence, processes: int, progress: Callable[[int, int], None]
) -> list:
    """Return ``[work(task, step) for task in tasks]``, done in so many processes.

    Args:
        work: Called with a task and with ``step(n)``, which it tells each step done. It is pickled if there are
            several processes.
        tasks: The last are begun first: put those that take longest there.
        processes: With 1 nothing is started; tasks are done in order.
        progress: Called as ``progress(index of a task, its steps done)``, in this process.

    Raises:
        FewbitError: A process was ended from outside.
    """
    if processes == 1:
        return [
            work(task, lambda n, index=index: progress(index, n))
            for index, task in enumerate(tasks)
        ]
    context = multiprocessing.get_context("spawn")  # forked threads of torch would hang
    steps, stop = context.RawArray("q", len(tasks)), context.RawValue("b", 0)
    # Pickled here, since multiprocessing would send tensors through shared memory, which containers often lack.
    arguments = (pickle.dumps((work, tasks)), steps, stop)
    pool = ProcessPoolExecutor(processes, context, _begin, arguments)
    try:
        with _interrupts_ignored():  # by the new processes: Ctrl-C reaches them too
            running = [pool.submit(_run, index) for index in reversed(range(len(tasks)))]
        while wait(running, POLL, FIRST_EXCEPTION).not_done:
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
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
