"""The progress of measurements: a bar in a terminal or a notebook, else a line from time to time."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager

PATIENCE = 2.0
"""Seconds before the bar appears."""
INTERVAL = 15.0
"""Seconds before the first line and between lines."""


class StepsProgress:
    """The progress of a measurement on standard error, after PATIENCE seconds a bar, or a line every INTERVAL seconds."""

    def __init__(self, name: str, is_asked: bool):
        self._name, self._is_asked = name, is_asked
        self._console, self._bar = None, None
        self._done, self._started, self._next_line = 0, time.monotonic(), INTERVAL

    @contextmanager
    def shown(self):
        """Remove the bar when the block, which calls `step`, ends."""
        try:
            yield self
        finally:
            if self._bar is not None:
                self._bar.stop()

    def step(self, of: int) -> None:
        """Count one more step of `of` in the whole measurement."""
        self._done += 1
        seconds = time.monotonic() - self._started
        if not self._is_asked or seconds < PATIENCE:
            return
        if self._console is None:
            self._console = _console()
        if self._console and (self._console.is_terminal or self._console.is_jupyter):
            self._update_bar(of)
        elif seconds >= self._next_line:
            print(
                f"{self._name}: {self._done} of {of} steps after {seconds:.0f} s", file=sys.stderr
            )
            self._next_line = seconds + INTERVAL

    def _update_bar(self, of: int) -> None:
        if self._bar is None:
            from rich.progress import Progress as Bar

            self._bar = Bar(console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=None)
        self._bar.update(self._task, completed=self._done, total=of)


def _console():
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return False
    return Console(stderr=True)
