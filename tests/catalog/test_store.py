"""The places in which load_table finds a table: shipped, cached on disk, or solved."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from fresh_process import run

import fewbit
from fewbit.catalog import store
from fewbit.files import cache_folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("FEWBIT_CACHE", str(directory))
    return directory


@pytest.fixture
def no_solving(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("this was to be found, not solved")

    monkeypatch.setattr("fewbit.solver.solve.solve", refuse)


def test_shipped_tables_need_no_solving(cache, no_solving):
    table = fewbit.load_table("gelu", bits=3)
    assert table is fewbit.load_table("gelu", bits=3)
    assert len(table.levels) == 8
    assert fewbit.load_table("swish", bits=2).function == "silu"
    assert fewbit.load_table("elu", bits=2, parameters={"alpha": 1.0}).parameters == {"alpha": 1.0}
    assert fewbit.load_table("gelu", bits=2, weight="normal").weight["kind"] == "normal"
    assert fewbit.load_table("gelu", bits=2, form="intervals").form == "intervals"
    assert fewbit.load_table("gelu", bits=3, domain=[-10, 10]) is table
    assert not cache.exists()


REQUESTS = [
    ("elu", {"bits": 2, "parameters": {"alpha": 2.0}}),
    ("gelu", {"bits": 2, "objective": "unbiased"}),
    ("gelu", {"bits": 2, "tails": "pinned"}),
    ("gelu", {"bits": 2, "domain": (-3, 3)}),
    ("gelu", {"levels": 5}),
    ("gelu", {"bits": 2, "weight": "normal:0.5,2"}),
    ("gelu", {"bits": 2, "weight": ([-1.0, 0.0, 2.0], [1.0, 3.0])}),
]


def test_a_file_is_no_function():
    with pytest.raises(
        fewbit.FunctionError, match="name of a function, got 'g.json'; fewbit.Table.load"
    ):
        fewbit.load_table("g.json")


def test_other_tables_are_solved_once_and_stored_in_a_file_each(cache, monkeypatch):
    tables = [fewbit.load_table(name, **request) for name, request in REQUESTS]
    documents = [json.loads(path.read_text()) for path in cache.iterdir()]
    assert len(documents) == len(REQUESTS)
    stored = [fewbit.Table.from_document(document["table"]) for document in documents]
    assert all(table in stored for table in tables)
    for table, document in zip(stored, documents, strict=True):
        assert document["asked"]["function"] == table.function
    monkeypatch.setattr("fewbit.solver.solve.solve", None)
    assert [fewbit.load_table(name, **request) for name, request in REQUESTS] == tables


ELU = {"bits": 2, "parameters": {"alpha": 2.0}}
"""A request for a table of elu that is not shipped."""
OTHERS = [
    {"bits": 3},
    {"levels": 3},
    {"domain": (-5, 5)},
    {"objective": "minimax"},
    {"tails": "pinned"},
    {"form": "intervals"},
    {"weight": "normal:0,2"},
    {"parameters": {"alpha": 3.0}},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("forged", [False, True])
def test_the_cache_compares_all_that_was_asked(cache, other, forged):
    """Another table in the cache file is not used, even if the file claims to answer the same request."""
    if forged and "levels" in other:
        return  # fewer levels than asked for are no contradiction: f' may not need more
    table = fewbit.load_table("elu", **ELU)
    (path,) = cache.iterdir()
    document = json.loads(path.read_text())
    document["table"] = fewbit.solve("elu", **{**ELU, **other}).document()
    if not forged:
        document["asked"]["bits"] = 7
    path.write_text(json.dumps(document))
    assert fewbit.load_table("elu", **ELU) == table
    assert json.loads(path.read_text())["table"]["levels"] == table.levels.tolist()


@pytest.mark.parametrize("key", ["schema", "version"])
def test_the_cache_of_another_version_is_not_used(cache, key):
    table = fewbit.load_table("elu", **ELU)
    (path,) = cache.iterdir()
    document = json.loads(path.read_text())
    document["asked"][key] = "older"
    document["table"]["levels"] = [0.25, 0.75, 1.0, 2.0]
    path.write_text(json.dumps(document))
    assert fewbit.load_table("elu", **ELU) == table


IN_ITS_PLACE = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a circle of links": lambda path: path.symlink_to(path),
    "an empty file": Path.touch,
    "half a file": lambda path: path.write_text('{"schema": "fewbit.table/1", "levels": ['),
    "a file of brackets": lambda path: path.write_text("[" * 10**6),
}


@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_anything_in_the_place_of_a_file_of_the_cache(cache, kind):
    table = fewbit.load_table("elu", **ELU)
    (path,) = cache.iterdir()
    path.unlink()
    IN_ITS_PLACE[kind](path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fewbit.load_table("elu", **ELU) == table
    if "file" in kind:
        assert json.loads(path.read_text())["table"]["function"] == "elu"


@pytest.mark.parametrize("content", ["precious", None])
def test_a_link_in_the_cache_is_replaced_not_followed(cache, tmp_path, content):
    table = fewbit.load_table("elu", **ELU)
    (path,) = cache.iterdir()
    path.unlink()
    target = tmp_path / "target"
    if content is not None:
        target.write_text(content)
    path.symlink_to(target)
    assert fewbit.load_table("elu", **ELU) == table
    assert (target.read_text() if target.exists() else None) == content
    assert not path.is_symlink() and json.loads(path.read_text())["table"]["function"] == "elu"


UNUSABLE = {
    "a file": lambda tmp_path: _written(tmp_path / "file") / "below",
    "a long name": lambda tmp_path: tmp_path / ("x" * 300),
    "a circle of links": lambda tmp_path: _linked(tmp_path / "circle") / "below",
    "nothing writable": lambda tmp_path: "/proc/fewbit",
    "a full disk": lambda tmp_path: "/dev/full",
}


def _written(path):
    path.write_text("")
    return path


def _linked(path):
    path.symlink_to(path)
    return path


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_unusable_cache_is_one_warning(what, tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(UNUSABLE[what](tmp_path)))
    with pytest.warns(UserWarning, match="solved but not cached") as caught:
        for alpha in (2.0, 3.0):
            table = fewbit.load_table("elu", bits=1, parameters={"alpha": alpha})
            assert table.parameters == {"alpha": alpha}
    assert len(caught) == 1
    # A training goes on if warnings are errors.
    monkeypatch.setattr(store, "_unusable", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fewbit.load_table("elu", **ELU).bits == 2


def test_without_a_home_nothing_is_cached(tmp_path, monkeypatch):
    monkeypatch.delenv("FEWBIT_CACHE")
    cached = cache_folder("tables")
    assert "fewbit" in cached.parts and os.path.isabs(cached)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache") / name)
    monkeypatch.chdir(tmp_path)
    assert cache_folder("tables") is None
    assert fewbit.load_table("elu", **ELU).bits == 2
    assert not list(tmp_path.iterdir())


def test_a_cached_table_needs_no_solver(cache):
    fewbit.load_table("elu", bits=1, parameters={"alpha": 2.0})
    code = (
        "import sys, fewbit; fewbit.load_table('elu', bits=1, parameters={'alpha': 2.0})\n"
        "assert not {'numba', 'scipy'} & set(sys.modules)"
    )
    run(code)


def test_callables_are_solved_and_not_cached(cache):
    table = fewbit.load_table(np.tanh, bits=1)
    assert len(table.levels) == 2
    fewbit.load_table("gelu", bits=1, weight=lambda x: np.exp(-np.abs(x)))
    assert not cache.exists()
    # Loading does not warn about unbounded derivatives.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fewbit.load_table("relu_squared", bits=2).bits == 2


REFUSED = {
    "bits": [2.5, "3", True, np.True_, 10**400, np.array([2, 3])],
    "levels": [2.5, "3", True],
    "form": [["levels"], b"levels", np.array(["levels", "levels"]), {1}, None],
    "objective": [{1}, b"mse", object()],
    "tails": [object(), [], np.array(["free"])],
    "parameters": ["x", 1, [("alpha", 2.0)]],
    "domain": [(-(10**400), 10**400), "ab", 3],
    "weight": [
        {"kind": "normal", "mean": 10**400, "std": 1},
        {"kind": "histogram", "edges": [0, 10**400], "density": [1]},
        {"kind": ["normal"]},
        [1, 10**400],
    ],
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("call", [fewbit.load_table, fewbit.solve])
def test_a_wrong_argument_is_one_line(cache, call, name):
    request = {"parameters": {"alpha": 2.0}, **({} if name == "levels" else {"bits": 2})}
    for value in REFUSED[name]:
        with pytest.raises(fewbit.FewbitError, match=r"expected|too large") as refusal:
            call("elu", **{**request, name: value})
        assert "\n" not in str(refusal.value) and name in str(refusal.value) or name == "weight"
