"""The standard streams of the command line: closed, full, and unable to show a character."""

from __future__ import annotations

import io
import os
import select
import sys


class OutputLost(BaseException):
    """Standard output takes no more: it is closed or full, or who reads it has gone.

    No Exception, so that nobody on the way takes it for a failure of the work itself.
    """


class _Output(io.RawIOBase):
    """A descriptor that is written to as long as that works; then `_lose` decides, and the rest is dropped."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._is_lost = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data) -> int:
        while not self._is_lost:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:
                self._is_lost = True
                self._lose()
        return len(data)

    def _lose(self) -> None:
        raise OutputLost


class _Errors(_Output):
    """Standard error: there is nowhere to say that it is lost."""

    def _lose(self) -> None:
        pass


def secure() -> None:
    """Put streams in the places of the standard ones whose failures are `OutputLost`, or silent for standard error.

    A terminal that cannot show a character shows a question mark instead. What is closed stays closed for fewbit, but
    its number is taken, so that no file that is opened later gets it.
    """
    closed = {number for number in (0, 1, 2) if _is_closed(number)}
    sys.stdout = _stream(_Output(-1 if 1 in closed else 1), sys.stdout)
    sys.stderr = _stream(_Errors(-1 if 2 in closed else 2), sys.stderr)


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
        return True
    return False


def _stream(raw: _Output, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    encoding = getattr(before, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="replace", line_buffering=_is_terminal(raw)
    )


def _is_terminal(raw: _Output) -> bool:
    try:
        return raw.isatty()
    except OSError:
        return False
