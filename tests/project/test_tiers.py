"""The choice of the tests that `make test` runs."""

import os
import subprocess
import sys
from pathlib import Path

import dispatch
import pytest

TESTS = Path(__file__).parents[1]
SAMPLE = """
import pytest

@pytest.mark.parametrize("bits", range(10))
@pytest.mark.parametrize("kind", "abc")
def test_sweep(kind, bits): pass

@pytest.mark.parametrize("n", range(8))
def test_few(n): pass

@pytest.mark.fast(2)
@pytest.mark.parametrize("n", range(5))
def test_said(n): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_case(n): pass
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """A function of arguments to pytest: the names of the tests that it would run, in order."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    fast\n    cuda\n")

    def collect(*arguments):
        options = ["--collect-only", "-q", "-p", "no:randomly", "-p", "conftest"]
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode in (0, 5), done.stdout + done.stderr
        return [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]

    return collect


@pytest.mark.processes
def test_every_test_is_in_one_tier(collected):
    fast, slow = collected(), collected("-m", "slow")
    assert len(fast) + len(slow) == len({*fast, *slow}) == 30 + 8 + 5 + 1 + 2
    assert "test_slow" in slow and "test_one_case[1]" in slow and "test_one_case[0]" in fast
    assert sum(name.startswith("test_few") for name in fast) == 8
    assert sum(name.startswith("test_said") for name in fast) == 2
    sweep = [name[len("test_sweep[") : -1].split("-") for name in fast if "sweep" in name]
    assert {kind for kind, _ in sweep} == set("abc")
    assert {bits for _, bits in sweep} == set(map(str, range(10)))
    assert len(sweep) <= 12
    assert fast == collected()


@pytest.mark.processes
def test_what_is_named_runs(collected):
    assert collected("test_sample.py::test_slow") == ["test_slow"]
    assert len(collected("test_sample.py::test_sweep")) == 30
    assert collected("test_sample.py::test_one_case[1]") == ["test_one_case[1]"]
    assert len(collected("test_sample.py::test_said", "test_sample.py::test_slow")) == 6
    assert len(collected("-m", "slow or not slow")) == 46


@pytest.mark.processes
def test_an_order_is_that_of_its_seed(collected):
    plain, one, two = collected(), collected("--shuffle", "1"), collected("--shuffle", "2")
    assert sorted(one) == sorted(two) == sorted(plain)
    assert one != plain and one != two and one == collected("--shuffle", "1")


def test_every_value_of_dispatch_is_covered():
    runs = dispatch.RUNS
    assert {run.blas for run in runs} == {"Haswell", "SkylakeX", "Zen", "Sandybridge", "Prescott"}
    assert {run.aten for run in runs} >= {"default", "avx2"}
    assert {run.fewbit for run in runs} == {"avx512", "avx2", "baseline"}
    assert {run.threads for run in runs} == {1, 4}
    assert len({run.order for run in runs}) == len(runs)
    assert {bool(run.numpy) for run in runs} == {True, False}


def test_a_setting_that_is_not_followed_is_noticed():
    run = dispatch.RUNS[0]
    found = {"blas": ["Haswell"], "numpy": ["X86_V2"], "aten": "avx2", "fewbit": "avx2"}
    assert dispatch.not_followed(run, found) == []
    for name, other, words in (
        ("blas", ["Haswell", "SkylakeX"], "BLAS is Haswell, SkylakeX"),
        ("aten", "avx512", "torch is at avx512"),
        ("fewbit", "baseline", "fewbit is at baseline"),
    ):
        assert dispatch.not_followed(run, {**found, name: other}) == [words]
    if run.disabled():
        kept = {**found, "numpy": run.disabled()}
        assert dispatch.not_followed(run, kept) == ["NumPy keeps what is taken from it"]


def test_a_processor_without_an_instruction_set_leaves_runs_out(monkeypatch):
    kernels = pytest.importorskip("fewbit._kernels")
    monkeypatch.setattr(dispatch.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernels, "cpu_isas", lambda: ("avx2", "baseline"))
    left_out = [bool(dispatch.cannot_run(run)) for run in dispatch.RUNS]
    assert left_out == [False, True, True, False, False]
    monkeypatch.setattr(dispatch.platform, "machine", lambda: "aarch64")
    assert all(map(dispatch.cannot_run, dispatch.RUNS))
