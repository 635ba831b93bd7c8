"""A progress bar for measurements."""

from __future__ import annotations

import time
from contextlib import contextmanager

from fewbit.runtime.interop.interrupts import undo_after

PATIENCE = 2.0  # seconds before progress is shown


class Progress:
    """A progress bar on standard error, which appears after PATIENCE seconds in a terminal or a notebook.

    Args:
        name: The text beside the bar.
        is_asked: Whether the user wants a bar. If not, none is shown.
    """

    def __init__(self, name: str, is_asked: bool):
        self._name, self._is_asked = name, is_asked
        self._bar, self._done, self._started = None, 0, time.monotonic()

    @contextmanager
    def shown(self):
        """Return a context manager for the block that calls `step`. The bar disappears when the block ends."""
        with undo_after(lambda: self._bar is None or self._bar.stop()):
            yield self

    def step(self, of: int) -> None:
        """Count one more step.

        Args:
            of: The number of steps in the whole measurement.
        """
        self._done += 1
        if not self._is_asked or time.monotonic() - self._started < PATIENCE:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress as Bar

            console = Console(stderr=True)
            self._is_asked = console.is_terminal or console.is_jupyter
            if not self._is_asked:
                return
            self._bar = Bar(console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=None)
        self._bar.update(self._task, completed=self._done, total=of)
