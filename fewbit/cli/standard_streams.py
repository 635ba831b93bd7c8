"""Standard streams that handle closed and full outputs, and replace characters that cannot be shown."""

from __future__ import annotations

import io
import os
import select
import sys


class OutputLost(BaseException):
    """Raised if standard output is closed or full, or its reader has ended; not caught by `except Exception`."""


class _Output(io.RawIOBase):
    """A raw stream. After a failed write, `_lose` is called, and later output is dropped."""

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
    def _lose(self) -> None:
        pass


def secure() -> None:
    """Replace sys.stdout and sys.stderr. A failed write raises `OutputLost` on stdout, and is ignored on stderr.

    Characters that the encoding lacks become question marks, and a closed stream the null device.
    """
    closed = {number for number in (0, 1, 2) if _is_closed(number)}
    sys.stdout = _stream(_Output(-1 if 1 in closed else 1), sys.stdout)
    sys.stderr = _stream(_Errors(-1 if 2 in closed else 2), sys.stderr)


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `number`
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
