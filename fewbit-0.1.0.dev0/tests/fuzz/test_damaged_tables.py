"""Files of tables with random damage: refused in one line, or a table that is usable for everything."""

import json
import os
import random
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cases import CHUNKS, seeds
from mutations import mutate

import fewbit
from fewbit.catalog.store import tables_directory
from fewbit.catalog.table_report import TableReport, tables_report
from fewbit.catalog.verification import recompute_error
from fewbit.errors import FewbitError, TableError
from fewbit.render.terminal import plain
from fewbit.runtime.format.encoding import Encoding
from fewbit.table import dumps_tables, load_file, loads

ROOT = Path(__file__).parents[2]
SECONDS = 30.0
"""The longest that a case may take, on a busy machine. Most cases take a few thousandths of a second."""
PLOTTED, VERIFIED, COMMANDS = 25, 25, 1000
"""Every PLOTTED-th case is also plotted, every VERIFIED-th recomputed, every COMMANDS-th given to the command line."""

pytestmark = pytest.mark.slow

REQUESTS = [
    ("gelu", {"bits": 2, "objective": "unbiased"}),
    ("relu6", {"bits": 1}),
    ("elu", {"bits": 2, "parameters": {"alpha": 2.0}}),
    ("silu", {"bits": 3, "form": "intervals"}),
    ("tanh", {"bits": 1, "objective": "minimax"}),
    ("gelu", {"bits": 1, "weight": ([-1.0, 0.5, 2.0], [1.0, 2.0])}),
    ("gelu", {"bits": 2, "weight": "normal:1,0.3", "tails": "pinned"}),
    ("numpy:tanh", {"bits": 1}),
]
X = np.concatenate(
    [np.linspace(-12, 12, 41), [-np.inf, np.inf, np.nan, 0.0, -0.0, 1e300, -1e300, 5e-324]]
)


@cache
def documents():
    solved = [fewbit.solve(name, **request) for name, request in REQUESTS]
    shipped = load_file(tables_directory() / "softplus.json")
    several = dumps_tables("softplus", [shipped[0], shipped[1], shipped[9]])
    return [*(table.document() for table in solved), shipped[3].document(), json.loads(several)]


def damaged(rng):
    """Return the bytes of a file."""
    document = rng.choice(documents())
    if rng.random() < 0.75:
        text = json.dumps(mutate(document, rng))
        if rng.random() < 0.9:
            return text.encode("utf-8", "surrogatepass")
    else:
        text = json.dumps(document)
    data = bytearray(text.encode())
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice((1, 2, 10, 1000)))
        kind = rng.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:end]
        elif kind == 2:
            data[place:place] = data[place:end]
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            data[place:place] = rng.choice(PIECES)
        elif kind == 5 and place < len(data):
            data[place] = rng.choice(b'0123456789-+.eE,:[]{}"\\ \x00\xff')
    return bytes(data)


PIECES = [
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"NaN", b"Infinity", b"1e999", b"0x10", b"//", b"{", b"[" * 50,
    b'"a":1,', b"1" * 5000, b"null", b"\\ud800", b"\xe2\x80\xae", b"1_000", b"\xd9\xa1", b"1e-400", b"-0", b",,",
]  # fmt: skip


def check_usable(tables, seed, folder):
    for table in tables:
        values, codes = table(X), table.code(X)
        assert values.shape == codes.shape == X.shape and np.isfinite(values).all()
        assert ((codes >= 0) & (codes < len(table.levels))).all()
        if table.objective == "unbiased":
            drawn = table.sample_code(X[np.isfinite(X)], seed)
            assert ((drawn >= 0) & (drawn < len(table.levels))).all()
        assert Encoding.of(table).text
        (again,) = loads(table.dumps())
        assert again == table and again.dumps() == table.dumps()
        assert repr(table).isprintable()
        shown = plain(TableReport(table))
        assert shown and shown.replace("\n", "").isprintable()
        if seed % PLOTTED == 0:
            table.plot(folder / f"{seed}.svg", force=True)
            assert "<svg" in (folder / f"{seed}.svg").read_text()
            assert table._repr_html_()
        if seed % VERIFIED == 1:
            try:
                recompute_error(table)
            except FewbitError as error:
                assert "\n" not in str(error)
    plain(tables_report("several", tables))


def check(seed, folder):
    """Run one case, and return whether the file was accepted."""
    path = folder / f"{seed}.json"
    path.write_bytes(damaged(random.Random(seed)))
    try:
        tables = load_file(path)
    except TableError as error:
        text = str(error).removeprefix(f"{path}: ")
        assert text.isprintable() and 0 < len(text) < 500 and text != str(error)
        tables = None
    else:
        check_usable(tables, seed, folder)
    if seed % COMMANDS == 0:
        check_commands(path, tables)
    path.unlink()
    return tables is not None


def check_commands(path, tables):
    codes = {"show": {0}, "verify": {0, 1, 2}} if tables else {"show": {0, 2}, "verify": {2}}
    if tables is not None and len(tables) == 1:
        codes["plot"] = {0}
    for command, allowed in codes.items():
        options = ["-o", str(path.with_suffix(".png")), "--force"] if command == "plot" else []
        result = subprocess.run(
            [sys.executable, ROOT / "cli.py", command, str(path), *options],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
        )
        assert result.returncode in allowed, result.stderr
        if tables is None:
            assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr
        assert (result.stdout + result.stderr).replace("\n", "").isprintable()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_damaged_tables(chunk, tmp_path):
    for seed in seeds(chunk):
        started = time.perf_counter()
        try:
            check(seed, tmp_path)
        except BaseException as error:
            error.add_note(f"case: check(seed={seed}, folder=...)")
            raise
        limit = SECONDS if seed % COMMANDS else 10 * SECONDS
        assert time.perf_counter() - started < limit, seed
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
