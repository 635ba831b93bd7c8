"""Functions that write a file completely or not at all, and the folder for files that can be computed again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fewbit.errors import FewbitError, OutputExistsError


def cache_folder(kind: str) -> Path | None:
    """Return the folder `kind` in `$FEWBIT_CACHE` or the user's cache folder, which may not exist yet; None if there is none."""
    if os.environ.get("FEWBIT_CACHE"):
        return Path(os.environ["FEWBIT_CACHE"])
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:
        return None
    found = user_cache_path("fewbit") / kind
    return found if found.is_absolute() else None


def check_writable(path: str | os.PathLike, force: bool = False) -> None:
    """Check that `write_atomic` can write a file, before its data is computed.

    Raises:
        OutputExistsError: The path exists, and `force` is false.
        FewbitError: The path is not a regular file, or its directory does not exist or is not writable.
    """
    target = _target_of(path, force)
    if not target.parent.is_dir():
        raise FewbitError(f"{path}: expected a path in an existing directory")
    if not os.access(target.parent, os.W_OK):
        raise FewbitError(f"{path}: expected a path in a directory that can be written")


def write_atomic(
    path: str | os.PathLike, data: str | bytes, force: bool = False, *, follow_links: bool = True
) -> None:
    """Write a file completely or not at all, by a temporary file in the same directory, or raise the exceptions of `check_writable`.

    Without `force` an existing file is never overwritten, even if another process creates it at the same time. A full disk
    raises FewbitError.

    Args:
        path: The path of the file.
        data: Bytes, or text, which is written as UTF-8.
        force: Whether an existing file may be overwritten.
        follow_links: Whether a symbolic link is followed or replaced. Pass False in the cache, where somebody else's link could redirect
            the write.
    """
    target = _target_of(path, force, follow_links)
    # The temporary file sits beside the target: a rename is atomic only within one file system.
    temporary = target.with_name(f".{target.name[:40]}.{os.urandom(8).hex()}.tmp")
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
        raise _unwritable(path, error) from None
    finally:
        _remove(temporary)


def _target_of(path, force: bool, follow_links: bool = True) -> Path:
    try:
        target = Path(path).resolve() if follow_links else Path(path)
        try:
            # If links are followed, a circle of links raises OSError here.
            mode = os.stat(target, follow_symlinks=follow_links).st_mode
        except FileNotFoundError:
            return target
    # RuntimeError means a circle of links, ValueError a null character in the path.
    except (OSError, RuntimeError, ValueError) as error:
        raise _unwritable(path, error) from None
    # A rename would replace a device by a file. The mode is that of a symbolic link only if `follow_links` is False.
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise FewbitError(f"{path}: expected a path to a regular file, got something else")
    if not force:
        raise OutputExistsError(path)
    return target


def _unwritable(path, error: Exception) -> FewbitError:
    reason = getattr(error, "strerror", None) or error
    return FewbitError(f"{path}: expected a writable path, got: {reason}")


def _write_durably(path: Path, payload: bytes) -> None:
    # os.open with 0o666, not tempfile, so that the file gets the permissions of the user's umask.
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
    )
    with os.fdopen(descriptor, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _publish_new(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`, or raise FileExistsError."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        # The file system has no hard links. An empty file reserves the name until the rename replaces that file.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.replace(temporary, target)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # the directory is missing or unreadable, so it contains no file of fewbit's
        pass
