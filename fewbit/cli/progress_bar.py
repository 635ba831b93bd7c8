"""The progress bar on standard error."""

from __future__ import annotations

import sys
import threading


class Progress:
    """A bar on a terminal, if the work takes longer than 1 second, for the argument `progress` of the library."""

    PATIENCE = 1.0
    """Seconds before the bar appears."""

    def __init__(self):
        self._state = ("solving", 0, 0)
        self._compilations = _Compilations()
        self._thread = None
        self._finished = threading.Event()

    def __call__(self, stage, done, total):
        """Show that `done` of `total` steps are done."""
        self._state = (stage, done, total)

    def __enter__(self):
        if sys.stderr.isatty():
            self._compilations.listen()
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._finished.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self):
        if self._finished.wait(self.PATIENCE):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        console = Console(stderr=True, highlight=False, emoji=False, markup=False)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            while not self._finished.wait(0.1):
                self._compilations.listen()
                stage, done, total = self._state
                if self._compilations.running:
                    stage, done, total = "compiling the solver (first run only)", 0, 0
                bar.update(task, description=stage, completed=done, total=total or None)


class _Compilations:
    """The number of functions that numba is compiling, which takes seconds in a first run."""

    def __init__(self):
        self.running = 0
        self._listening = False

    def listen(self):
        event = sys.modules.get("numba.core.event")
        if self._listening or not hasattr(event, "register"):
            return
        self._listening = True
        compilations = self

        class Listener(event.Listener):
            def on_start(self, _event):
                compilations.running += 1

            def on_end(self, _event):
                # The compilation may have started before the listener was registered.
                compilations.running = max(0, compilations.running - 1)

        event.register("numba:compile", Listener())
