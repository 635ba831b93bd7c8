"""Interrupts (Ctrl-C) take effect even if they arrive while a library calls Python code from C."""

from __future__ import annotations

import signal
import sys
import threading

DELAY = 0.1
"""Seconds after which a lost interrupt is raised again."""


def repeat_lost() -> None:
    """Raise a KeyboardInterrupt again that Python could only print, because Numba's compiler called it from C."""
    others = sys.unraisablehook

    def hook(unraisable):
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            return others(unraisable)
        # Sent at once, the signal would end this function and be lost again.
        timer = threading.Timer(DELAY, _interrupt)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def _interrupt() -> None:
    if hasattr(signal, "pthread_kill"):
        # This also ends a wait of the main thread, for example for a lock.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)
