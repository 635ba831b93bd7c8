"""Interrupts (Ctrl-C) take effect even if they arrive while a library calls Python code from C."""

from __future__ import annotations

import _thread
import sys
import threading

DELAY = 0.1
"""The time in seconds after which a lost interrupt is raised again."""


def repeat_lost() -> None:
    """Raise a lost KeyboardInterrupt again in the main thread, after `DELAY` seconds.

    An interrupt is lost if Python cannot pass it on to the caller. The compiler of Numba calls Python functions from C. If Ctrl-C is pressed meanwhile, Python raises KeyboardInterrupt in such
    a function, cannot pass the exception through the C code, and would only print it.
    """
    others = sys.unraisablehook

    def hook(unraisable):
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            return others(unraisable)
        # Raised at once, the interrupt would end this function and be lost again.
        timer = threading.Timer(DELAY, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
