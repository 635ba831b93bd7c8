"""Files that are written completely or not at all, and sizes as text."""

import os
import pickle
import stat

import pytest

from fewbit.errors import FewbitError, OutputExistsError
from fewbit.files import write_atomic
from fewbit.sizes import format_size, parse_size


def test_writes_text_and_bytes(tmp_path):
    write_atomic(tmp_path / "a", "é\n")
    write_atomic(tmp_path / "b", b"\x00\xff")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_only_force_overwrites(tmp_path):
    path = tmp_path / "gelu.json"
    write_atomic(path, "first")
    with pytest.raises(OutputExistsError) as caught:
        write_atomic(path, "second")
    assert str(caught.value) == f"{path} exists; pass force=True to overwrite it"
    assert path.read_text() == "first" and caught.value.path == path
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    write_atomic(path, "second", force=True)
    assert path.read_text() == "second" and os.listdir(tmp_path) == ["gelu.json"]


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, FULL])
@pytest.mark.parametrize(
    "force, broken", [(False, "fsync"), (False, "link"), (True, "fsync"), (True, "replace")]
)
def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch, failure, force, broken):
    path = tmp_path / "gelu.json"
    if force:
        path.write_text("old")

    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(os, broken, fail)
    if broken == "link" and failure is FULL:
        write_atomic(path, "new")  # a file system without hard links is served by another way
        assert path.read_text() == "new" and os.listdir(tmp_path) == ["gelu.json"]
        return
    with pytest.raises(FewbitError if failure is FULL else failure):
        write_atomic(path, "new", force=force)
    assert os.listdir(tmp_path) == (["gelu.json"] if force else [])
    assert not force or path.read_text() == "old"


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_is_kept(tmp_path, monkeypatch, links):
    path = tmp_path / "gelu.json"
    fsync, link = os.fsync, os.link

    def appear(descriptor):
        fsync(descriptor)
        path.write_text("theirs")

    def no_link(*arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fsync", appear)
    monkeypatch.setattr(os, "link", link if links else no_link)
    with pytest.raises(OutputExistsError):
        write_atomic(path, "ours")
    assert path.read_text() == "theirs" and os.listdir(tmp_path) == ["gelu.json"]


def test_places_that_cannot_be_written(tmp_path):
    path = tmp_path / "nowhere" / "gelu.json"
    with pytest.raises(FewbitError) as caught:
        write_atomic(path, "x")
    assert str(caught.value) == f"{path}: expected a writable path, got: No such file or directory"
    for force in (False, True):
        with pytest.raises(FewbitError, match="regular file"):
            write_atomic(tmp_path, "x", force=force)


@pytest.mark.parametrize(
    "points_to, follow", [("target", True), ("target", False), ("nothing", False), ("link", False)]
)
def test_symbolic_links(tmp_path, points_to, follow):
    """A link is followed, or replaced if the caller asks for that."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(tmp_path / points_to)
    with pytest.raises(OutputExistsError):
        write_atomic(link, "new", follow_links=follow)
    write_atomic(link, "new", force=True, follow_links=follow)
    assert link.is_symlink() == follow and link.read_text() == "new"
    assert target.read_text() == ("new" if follow else "old")
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link"}


def test_permissions_follow_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        write_atomic(tmp_path / "gelu.json", "x")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "gelu.json").stat().st_mode) == 0o640


SIZES = {1: "1 B", 1023: "1023 B", 1024: "1 KB", 1536: "1.5 KB", 32 * 2**30: "32 GB", 2**50: "1024 TB"}  # fmt: skip
SPELLINGS = {"24GiB": 24 << 30, "11264 mb": 11 << 30, ".5tb": 512 << 30, "7b": 7}
NO_SIZES = ["", "7", "GB", "-1GB", "0GB", ".1 B", "1 XB", "1 Mb", "2Gib", "1 iGB", "1e3GB", "nan", "9" * 400 + " GB", "9" * 40000 + "!"]  # fmt: skip


def test_sizes_as_text():
    """A size is printed with the largest unit that fits."""
    for size, text in SIZES.items():
        assert format_size(size) == text and parse_size(text) == size
    for text, size in SPELLINGS.items():
        assert parse_size(text) == size


@pytest.mark.parametrize("text", NO_SIZES, ids=lambda text: text[:9])
def test_text_that_is_no_size(text):
    with pytest.raises(FewbitError, match="^expected a size such as 32GB"):
        parse_size(text)
