"""Where load_table finds a table: shipped, cached on disk, or solved."""

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import fewbit
from fewbit import store
from fewbit.errors import FunctionError, SolveError


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


@pytest.mark.parametrize(("name", "request_"), REQUESTS)
def test_other_tables_are_solved_once(cache, name, request_, monkeypatch):
    first = fewbit.load_table(name, **request_)
    (path,) = cache.iterdir()
    assert fewbit.Table.load(path) == first
    monkeypatch.setattr("fewbit.solver.solve.solve", None)
    assert fewbit.load_table(name, **request_) == first
    if "parameters" in request_:
        slope = first(np.array([-1e-3]))[0]
        assert slope > 1, "alpha = 2 has slopes above 1 left of 0"


def test_different_requests_have_different_files(cache):
    for name, request in REQUESTS:
        fewbit.load_table(name, **request)
    assert len(list(cache.iterdir())) == len(REQUESTS)


def test_damaged_cache_is_replaced(cache):
    table = fewbit.load_table("elu", bits=1, parameters={"alpha": 2.0})
    (path,) = cache.iterdir()
    path.write_text('{"schema": "fewbit.table/1", "levels": [')
    assert fewbit.load_table("elu", bits=1, parameters={"alpha": 2.0}) == table
    assert json.loads(path.read_text())["function"] == "elu"


def test_unwritable_cache_is_a_warning(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FEWBIT_CACHE", str(blocked / "below"))
    with pytest.warns(UserWarning, match="solved but not cached"):
        table = fewbit.load_table("elu", bits=1, parameters={"alpha": 2.0})
    assert table.parameters == {"alpha": 2.0}


@pytest.mark.slow
def test_two_processes_at_once(cache):
    code = "import fewbit; print(repr(fewbit.load_table('elu', bits=3, parameters={'alpha': 3.0})))"
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    shown = {job.communicate()[0] for job in jobs}
    assert all(job.returncode == 0 for job in jobs)
    assert len(shown) == 1
    assert len(list(cache.iterdir())) == 1


def test_callables_are_solved_and_not_cached(cache):
    table = fewbit.load_table(np.tanh, bits=1)
    assert len(table.levels) == 2
    fewbit.load_table("gelu", bits=1, weight=lambda x: np.exp(-np.abs(x)))
    assert not cache.exists()


def test_default_cache_is_the_users(monkeypatch):
    monkeypatch.delenv("FEWBIT_CACHE", raising=False)
    assert "fewbit" in store.cache_directory().parts
    assert os.path.isabs(store.cache_directory())


def test_errors():
    with pytest.raises(FunctionError, match="gelu"):
        fewbit.load_table("gelo", bits=3)
    with pytest.raises(FunctionError, match="beta"):
        fewbit.load_table("elu", bits=3, parameters={"beta": 1.0})
    with pytest.raises(SolveError, match="bits"):
        fewbit.load_table("gelu", bits=9)


def test_loading_does_not_warn_about_unbounded_derivatives(cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fewbit.load_table("relu_squared", bits=2).bits == 2
