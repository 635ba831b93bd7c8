"""Run the tests on a sample of mutants, and report the mutants that no test notices.

    python tests/mutants                            300 mutants of fewbit/ and csrc/
    python tests/mutants --list                     show the mutants, and run nothing
    python tests/mutants --base BEFORE.json         the mutants of an earlier run; list those that only that run killed

A mutant is one small change of the sources, such as `<` to `<=`. It is killed if a test fails. Mutants are tried in copies
of the working tree. First the tests run once, to find the functions that each of them enters; this map is kept in
build/mutants for as long as no file changes. The results of a run that was interrupted are kept in FILE.json.part, and the
same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import Pipe
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants import reach, sample, trees  # noqa: E402

FOLDER = ROOT / "build" / "mutants"
SAVED_EVERY = 30
"""The seconds between two versions of a file that grows."""
STATUSES = "killed", "survived", "not reached", "does not compile"


def main(arguments=None) -> int:
    """Run the command line. Return 1 if a mutant survives that an earlier run killed."""
    options = _parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the workers
    base = json.loads(options.base.read_text()) if options.base else None
    gone = []
    if base:
        chosen, gone = sample.found_again(ROOT, list(base["mutants"]))
    else:
        chosen = sample.draw(ROOT, options.number, options.seed, options.only)
    if options.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    if options.output.exists() and not options.force:
        sys.exit(f"{options.output} exists: expected a new file, or --force")
    files = trees.files_of(ROOT)
    others = [file for file in files if not file.startswith("tests/mutants/")]
    results = _Results(options, trees.digest_of(ROOT, others), gone)
    left = [mutant for mutant in chosen if mutant.name not in results.record["mutants"]]
    if left:
        _run(options, files, left, results)
    results.finish(options.output)
    print(table(results.record["mutants"]))
    for name, found in results.record["mutants"].items():
        if found["status"] == "survived":
            capped = ", stopped at the cap" if found.get("capped") else ""
            print(f"survived ({found['tests']} tests{capped}): {name}")
    lost = compared(base["mutants"], results.record["mutants"]) if base else []
    for line in [f"no longer there: {name}" for name in gone] + lost:
        print(line)
    return 1 if lost else 0


def _parsed(arguments):
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=0, help="the seed of the sample")
    add("--number", type=int, default=300, help="the number of mutants")
    add("--only", default="*", metavar="GLOB", help="only mutants of files that match")
    add("--tier", choices=("fast", "all"), default="fast", help="the tests that run")
    add("--tests", nargs="+", default=["tests"], metavar="PATH", help="files and folders of tests")
    add("--cap", type=float, default=60, help="seconds of processor time for the tests of a mutant")
    add("--processes", type=int, default=os.cpu_count(), help="workers")
    add("--output", type=Path, default=FOLDER / "results.json", metavar="FILE.json")
    add("--base", type=Path, metavar="FILE.json", help="try its mutants, and compare")
    add("--list", action="store_true", help="show the mutants, and run nothing")
    add("--force", action="store_true", help="overwrite the results, and start anew")
    return parser.parse_args(arguments)


# -- results ---------------------------------------------------------------------------------------------


class _Results:
    """The record of a run, which is saved while it grows."""

    def __init__(self, options, digest: str, gone: list[str]):
        self.part = options.output.with_name(f"{options.output.name}.part")
        settings = {
            name: getattr(options, name)
            for name in ("seed", "number", "only", "tier", "tests", "cap")
        }
        settings["base"] = options.base and str(options.base)
        self.record = {
            "commit": _commit(),
            "tree": digest,
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "numpy", "pytest")},
            "settings": settings,
            "gone": gone,
            "mutants": {},
        }
        if self.part.exists() and not options.force:
            before = json.loads(self.part.read_text())
            changed = [name for name in self.record if name != "mutants"]
            changed = [name for name in changed if before[name] != self.record[name]]
            if changed:
                sys.exit(f"{self.part} is of another run ({', '.join(changed)}): use --force")
            self.record = before

    def add(self, name: str, found: dict) -> None:
        """Add the result of a mutant."""
        self.record["mutants"][name] = found
        write(self.part, self.record)

    def finish(self, output: Path) -> None:
        """Write the results, sorted by place, and delete the part."""
        mutants = self.record["mutants"]
        order = sorted(
            mutants, key=lambda name: (name.split(":")[0], int(name.split(":")[1]), name)
        )
        self.record["mutants"] = {name: mutants[name] for name in order}
        write(output, self.record)
        self.part.unlink(missing_ok=True)


def table(mutants: dict[str, dict]) -> str:
    """Return a table of the numbers of mutants by folder and status."""
    counts = Counter(
        (sample.folder_of(name.split(":")[0]), m["status"]) for name, m in mutants.items()
    )
    folders = sorted({folder for folder, _ in counts})
    lines = [f"{'folder':<24}" + "".join(f"{status:>18}" for status in STATUSES)]
    for folder in folders:
        lines.append(f"{folder:<24}" + "".join(f"{counts[folder, s]:>18}" for s in STATUSES))
    sums = [sum(counts[folder, status] for folder in folders) for status in STATUSES]
    return "\n".join([*lines, f"{'all':<24}" + "".join(f"{number:>18}" for number in sums)])


def compared(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """Return a line for each mutant that was killed before and is not killed now."""
    now = {_place_free(name): found["status"] for name, found in after.items()}
    lines = []
    for name, found in before.items():
        status = now.get(_place_free(name), "killed")
        if found["status"] == "killed" and status != "killed":
            lines.append(f"was killed by {found['test']}, now {status}: {name}")
    return lines


def _place_free(name: str) -> tuple[str, str]:
    file, _, _, change = name.split(":", 3)
    return file, change


def write(path: Path, content) -> None:
    """Write JSON in one piece: a reader finds the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def _commit() -> str:
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


# -- running ---------------------------------------------------------------------------------------------


def _run(options, files, mutants, results) -> None:
    with tempfile.TemporaryDirectory(prefix="fewbit-mutants-") as scratch:
        scratch = Path(scratch)
        kernels = None
        if any(mutant.file.startswith("csrc") for mutant in mutants):
            print("compiling the kernels that mutants are compared with", flush=True)
            kernels = trees.built_kernels(ROOT, files, FOLDER)
        with _workers(options, files, scratch) as workers:
            found = workers[0].found
            tests = _map(options, workers, results.record["tree"])
            broken = [name for name, (outcome, *_) in tests.items() if outcome == "failed"]
            print(f"{len(tests)} tests; left out, because they fail in a copy: {len(broken)}")
            print(*broken, sep="\n", end="\n" if broken else "")
            entered = reach.Reach(found["imported"], tests)
            for number, (mutant, result) in enumerate(
                _each(workers, mutants, lambda w, m: _tried(options, w, m, entered, kernels)), 1
            ):
                results.add(mutant.name, result)
                how = f", {result['how']}" if result.get("how", "failed") != "failed" else ""
                print(
                    f"{number}/{len(mutants)} {result['status']}{how}, {result['tests']} tests, "
                    f"{result['seconds']:.1f} s: {mutant.name}",
                    flush=True,
                )


class _Worker:
    """A process of worker.py and its copy of the repository."""

    def __init__(self, options, files, folder: Path):
        self.tree, self.log = folder / "tree", folder / "log"
        trees.copy(ROOT, files, self.tree)
        self.connection, other = Pipe()
        tier = ["-m", "slow or not slow"] if options.tier == "all" else []
        given = {"tree": str(self.tree), "tests": options.tests, "options": tier}
        script = str(ROOT / "tests" / "mutants" / "worker.py")
        command = [sys.executable, script, str(other.fileno()), json.dumps(given)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.tree, env=environment, pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        other.close()
        self.found = None

    def do(self, task: dict) -> dict:
        self.connection.send(task)
        return self.receive()

    def receive(self) -> dict:
        try:
            return self.connection.recv()
        except EOFError:
            end = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"a worker ended: {end}") from None


@contextmanager
def _workers(options, files, scratch: Path):
    """Start the workers, which collect the tests at the same time, and end them at the end."""
    workers = []
    try:
        for number in range(options.processes):
            folder = scratch / str(number)
            folder.mkdir()
            workers.append(_Worker(options, files, folder))
        print(f"collecting tests in {len(workers)} processes", flush=True)
        for worker in workers:
            worker.found = worker.receive()
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()  # with which its forks end
        for worker in workers:
            worker.process.wait()


def _each(workers, things, do):
    """Yield (thing, do(worker, thing)) for each thing, as they are done, with all workers at the same time."""
    todo, done = queue.SimpleQueue(), queue.SimpleQueue()
    for thing in things:
        todo.put(thing)

    def work(worker):
        try:
            while True:
                thing = todo.get_nowait()
                done.put((thing, do(worker, thing)))
        except queue.Empty:
            pass
        except BaseException as error:
            done.put((None, error))

    for worker in workers:
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    for _ in things:
        thing, result = done.get()
        if thing is None:
            raise result
        yield thing, result


def _map(options, workers, digest: str) -> dict[str, list]:
    """Run every test, and return {node id: [outcome, seconds, keys of the functions that it enters]}."""
    path = FOLDER / f"reach-{options.tier}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    tests = known["tests"] if known.get("tree") == digest else {}
    files = workers[0].found["files"]
    left = [file for file, names in files.items() if any(name not in tests for name in names)]
    saved = time.monotonic()
    for number, (file, run) in enumerate(
        _each(workers, left, lambda worker, file: _entered(worker, files[file])), 1
    ):
        tests |= run
        print(f"{number}/{len(left)} files of tests, {len(run)} tests: {file}", flush=True)
        if number == len(left) or time.monotonic() - saved > SAVED_EVERY:
            write(path, {"tree": digest, "tests": tests})
            saved = time.monotonic()
    names = {name for file in files.values() for name in file}
    return {name: found for name, found in tests.items() if name in names}


def _entered(worker, names: list[str]) -> dict[str, list]:
    """Run the tests of a file. Those that fail run again without a record of functions, which may have disturbed them."""
    task = {"names": names, "usual": {}, "cap": float("inf"), "all": True}
    run = {
        name: list(found)
        for name, found in worker.do(task | {"reach": True}).get("run", {}).items()
    }
    again = [name for name in names if run.get(name, ["failed"])[0] == "failed"]
    if again:
        for name, found in worker.do(task | {"names": again}).get("run", {}).items():
            run[name] = [*found[:2], run[name][2] if name in run else []]
    return {name: run.get(name, ["failed", 0.0, []]) for name in names}


def _tried(options, worker, mutant, entered: reach.Reach, kernels: Path | None) -> dict:
    """Try a mutant, and return its result."""
    trial = entered.trial(ROOT, mutant)
    started = time.monotonic()
    result = {"status": "not reached", "tests": 0, "seconds": 0.0}
    if not trial.names:
        return result
    source = mutant.mutation.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
    files = {mutant.file: source.encode()}
    if kernels:
        if mutant.file.startswith("csrc"):
            try:
                library = trees.mutated_kernels(
                    kernels, mutant.file, source, worker.tree.parent / "k"
                )
            except trees.CompileError as error:
                return result | {"status": "does not compile", "how": str(error)[-200:]}
            files[trees.KERNELS] = library
    task = {
        "names": trial.names, "usual": entered.usual(trial.names), "cap": options.cap, "files": files,
        "codes": trial.codes, "anew": not trial.codes, "numba": "njit" in source,
    }  # fmt: skip
    while unfit := _failing_anyway(worker, task, found := worker.do(task)):
        print("left out for a mutant, because they also fail without it:", *unfit, sep="\n")
        task["names"] = [name for name in task["names"] if name not in unfit]
    result |= {key: value for key, value in found.items() if key != "files"}
    result["seconds"] = round(time.monotonic() - started, 1)
    if result["status"] == "survived":
        result.pop("test", None)
    return result


def _failing_anyway(worker, task: dict, found: dict) -> list[str]:
    """Return the tests that killed a mutant, if they also fail in the same way without it: then they prove nothing."""
    if found["status"] == "survived":
        return []
    names = [found["test"]] if "test" in found else []
    for file in () if names else found.get("files", ()):  # whose collection failed
        names.append(next(name for name in task["names"] if name.split("::")[0] == file))
    same = worker.do(task | {"names": names, "files": {}, "codes": [], "cap": float("inf")})
    return [] if same["status"] == "survived" else names


if __name__ == "__main__":
    sys.exit(main())
