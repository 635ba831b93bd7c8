"""The choice of the tests that `make test` and `make dispatch` run."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import budget
import dispatch
import pytest
import tiers

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
TIMES = """
import time
import budget
import pytest

budget.SECONDS, budget.FIXTURE_SECONDS = 0.05, 5

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture
def own():
    work(0.5)

@pytest.fixture(scope="module")
def shared():
    work(0.5)

runs = []

def test_waits(): time.sleep(0.5)

def test_shares(shared): pass

def test_has_a_first_run():
    runs.append(0)
    work(0.5 / len(runs) ** 9)

def test_works(): work(0.5)

def test_has_an_expensive_fixture(own): pass

def test_fails(): assert False, "as expected"

@pytest.mark.slow
def test_slow(): work(0.5)
"""
RUNS = {
    "fast": [],
    "slow": ["-m", "slow"],
    "all": ["-m", "slow or not slow"],
    "third": ["-m", "slow or not slow", "--share", "3"],
    "one test": ["test_sample.py::test_slow"],
    "one case": ["test_sample.py::test_one_case[1]"],
    "every case": ["test_sample.py::test_sweep"],
    "two tests": ["test_sample.py::test_said", "test_sample.py::test_slow"],
    "order 1": ["--shuffle", "1"],
    "order 2": ["--shuffle", "2"],
    "order 1 again": ["--shuffle", "1"],
}
SCRIPT = """
import sys
import pytest

for arguments in {runs!r}:
    print("run", flush=True)
    code = pytest.main(["-q", "-p", "no:randomly", "-p", "conftest", *arguments])
    assert code in (0, 1), code
"""


def pytest_in(folder, sample, *runs):
    """Return the lines that runs of pytest print, with this project's settings, for a file of tests in a folder."""
    (folder / "test_sample.py").write_text(sample)
    markers = "".join(f"    {name}\n" for name in ("fast", "cuda", *tiers.TIERS))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}")
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(runs=runs)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.processes
def test_the_budget(tmp_path):
    """Only a test that works for too long twice fails. Waiting, shared fixtures and first runs do not count."""
    lines = pytest_in(tmp_path, TIMES, ["--budget", "-m", "slow or not slow", "-rf"])
    failed = {line.split("::")[1].split(" - ")[0] for line in lines if line.startswith("FAILED")}
    assert failed == {"test_works", "test_has_an_expensive_fixture", "test_fails"}
    assert sum("s of processor time, expected at most" in line for line in lines) >= 2
    assert lines[-1].startswith("3 failed, 4 passed")


@pytest.mark.processes
def test_the_tests_of_a_run(tmp_path):
    collected = []
    runs = [["--collect-only", *arguments] for arguments in RUNS.values()]
    for line in pytest_in(tmp_path, SAMPLE, *runs):
        if line == "run":
            collected.append([])
        elif "::" in line:
            collected[-1].append(line.split("::")[1])
    names = dict(zip(RUNS, collected, strict=True))
    fast, slow = names["fast"], names["slow"]
    # Every test is in one tier.
    assert len(fast) + len(slow) == len({*fast, *slow}) == len(names["all"]) == 30 + 8 + 5 + 1 + 2
    assert "test_slow" in slow and "test_one_case[1]" in slow and "test_one_case[0]" in fast
    assert sum(name.startswith("test_few") for name in fast) == 8
    assert sum(name.startswith("test_said") for name in fast) == 2
    sweep = [name[len("test_sweep[") : -1].split("-") for name in fast if "sweep" in name]
    assert {kind for kind, _ in sweep} == set("abc")
    assert {bits for _, bits in sweep} == set(map(str, range(10)))
    assert len(sweep) <= 12
    # A share leaves no fast test out.
    rest = len(slow) - 2
    assert {*fast} < {*names["third"]} and len(names["third"]) == len(fast) + 2 + (rest + 2) // 3
    # A test that is named runs, whatever its tier.
    assert names["one test"] == ["test_slow"] and names["one case"] == ["test_one_case[1]"]
    assert len(names["every case"]) == 30 and len(names["two tests"]) == 6
    # An order is that of its seed.
    one, two = names["order 1"], names["order 2"]
    assert sorted(one) == sorted(two) == sorted(fast)
    assert one != fast and one != two and one == names["order 1 again"]


def test_folders_of_one_tier():
    here, config = TESTS.parent, SimpleNamespace(option=SimpleNamespace(markexpr=""))
    config.invocation_params = SimpleNamespace(dir=here)
    for names, left_out in (
        (["tests"], {"integrations", "fuzz"}),
        (["tests/fuzz"], {"integrations"}),
        (["tests/integrations/test_lora.py::test_x", "tests/table"], {"fuzz"}),
    ):
        config.args = names
        found = {path.name for path in TESTS.iterdir() if tiers.skips_folder(path, config)}
        assert found == left_out
    config.option.markexpr = "slow"
    assert not any(tiers.skips_folder(path, config) for path in TESTS.iterdir())
    assert tiers.of_folder(TESTS / "fuzz" / "cases.py") == "fuzz"
    assert tiers.of_folder(TESTS / "table" / "test_table.py") is None


def test_what_has_a_budget_of_its_own_exists():
    for name, (seconds, reason) in budget.ALLOWED.items():
        path, _, function = name.partition("::")
        assert f"def {function}(" in (TESTS.parent / path).read_text(), name
        assert seconds > budget.SECONDS and reason


def test_a_setting_that_is_not_followed_is_noticed():
    (run,) = (run for run in dispatch.RUNS if run.blas == "Haswell")
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
    left_out = {run.blas for run in dispatch.RUNS if dispatch.cannot_run(run)}
    assert left_out == {"SkylakeX", "Zen"}
    monkeypatch.setattr(dispatch.platform, "machine", lambda: "aarch64")
    assert all(map(dispatch.cannot_run, dispatch.RUNS))
