"""Write a file completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from fewbit.errors import FewbitError, OutputExistsError


def write_atomic(path: str | os.PathLike, data: str | bytes, force: bool = False) -> None:
    """Write `data` (text as UTF-8) to `path`; a reader sees the old file or the whole new one.

    Without `force` an existing file is never overwritten, even if another process creates it meanwhile.
    A symbolic link is followed. Whatever interrupts the write, no temporary file stays behind.

    Raises OutputExistsError if `path` exists and `force` is false; FewbitError if the directory is missing
    or cannot be written, or `path` is not a regular file.
    """
    target = Path(path).resolve()
    if target.exists():
        if not target.is_file():  # renaming over a device node would destroy it
            raise FewbitError(f"{path}: expected a path to a regular file, got something else")
        if not force:
            raise OutputExistsError(path)
    # The temporary file sits beside the target: a rename is atomic only within one file system.
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(8).hex()}.tmp")
    payload = data.encode("utf-8") if isinstance(data, str) else data
    try:
        _write_durably(temporary, payload)
        if force:
            os.replace(temporary, target)
        else:
            _publish_new(temporary, target)
    except FileExistsError:
        raise OutputExistsError(path) from None
    except OSError as error:
        raise FewbitError(
            f"{path}: expected a writable path, got: {error.strerror or error}"
        ) from None
    finally:
        _remove(temporary)


def _write_durably(path: Path, payload: bytes) -> None:
    # os.open with 0o666 rather than tempfile: the result gets the permissions the user's umask asks for.
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
    )
    with os.fdopen(descriptor, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _publish_new(temporary: Path, target: Path) -> None:
    """Give `temporary` the name `target`; FileExistsError if somebody has it already."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except (
        OSError
    ):  # no hard links on this file system: reserve the name first, then move onto our own file
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.replace(temporary, target)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # the directory itself is missing or unreadable: there is nothing of ours in it
        pass
