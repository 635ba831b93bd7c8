"""Run the tests on a sample of mutants, and report the mutants that no test notices.

    python tests/mutants                            300 mutants of fewbit/ and csrc/
    python tests/mutants --list                     show the mutants, and run nothing
    python tests/mutants --base BEFORE.json         the mutants of an earlier run; list those that only that run killed

A mutant is one small change of the sources, such as `<` to `<=`. It is killed if a test fails. Mutants are tried in copies
of the working tree. First the tests run once, to find the functions that each of them enters; this map is kept in
build/mutants for as long as no file changes.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import tiers  # noqa: E402

from mutants import sample, trees  # noqa: E402
from mutants.reach import Reach  # noqa: E402

FOLDER = ROOT / "build" / "mutants"
STATUSES = "killed", "killed slowly", "survived", "not reached", "does not compile"
"""The results of mutants. "killed slowly": by a test of another tier than the fast one."""
KILLED = STATUSES[:2]


def main(arguments=None) -> int:
    """Run the command line. Return 1 if a mutant survives that an earlier run killed."""
    options = _parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the workers
    base, gone = {}, []
    if options.base:
        base = json.loads(options.base.read_text())["mutants"]
        chosen, gone = sample.found_again(ROOT, list(base))
    else:
        chosen = sample.draw(ROOT, options.number, options.seed, options.only)
    if options.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    if options.output.exists():
        sys.exit(f"{options.output} exists: expected a new file")
    results = _run(options, chosen)
    write(options.output, {"mutants": {mutant.name: results[mutant.name] for mutant in chosen}})
    print(table(results))
    for name, found in results.items():
        if found["status"] == "survived":
            capped = ", stopped at the cap" if found.get("capped") else ""
            print(f"survived ({found['tests']} tests{capped}): {name}")
    lost = compared(base, results)
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
    return parser.parse_args(arguments)


# -- results ---------------------------------------------------------------------------------------------


def table(mutants: dict[str, dict]) -> str:
    """Return a table of the numbers of mutants by folder and status."""
    counts = Counter(
        (folder, found["status"])
        for name, found in mutants.items()
        for folder in (sample.folder_of(name.split(":")[0]), "all")
    )
    folders = [*sorted({folder for folder, _ in counts} - {"all"}), "all"]
    lines = [f"{'folder':<24}" + "".join(f"{status:>18}" for status in STATUSES)]
    for folder in folders:
        lines.append(f"{folder:<24}" + "".join(f"{counts[folder, s]:>18}" for s in STATUSES))
    return "\n".join(lines)


def compared(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """Return a line for each mutant that was killed before and is not killed now."""
    now = {_place_free(name): found["status"] for name, found in after.items()}
    lines = []
    for name, found in before.items():
        status = now.get(_place_free(name), "killed")
        if found["status"] in KILLED and status not in KILLED:
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


# -- running ---------------------------------------------------------------------------------------------


def _run(options, mutants) -> dict[str, dict]:
    """Try mutants, and return {name: result}. FILE.json.part has the results until all are there; a later run goes on."""
    files, results, kernels = trees.files_of(ROOT), {}, None
    part = options.output.with_name(f"{options.output.name}.part")
    digest = trees.digest_of(ROOT, files)
    known = json.loads(part.read_text()) if part.exists() else {}
    if known.get("tree") == digest:
        results = known["mutants"]
    with tempfile.TemporaryDirectory(prefix="fewbit-mutants-") as scratch:
        if any(mutant.file.startswith("csrc") for mutant in mutants):
            print("compiling the kernels that mutants are compared with", flush=True)
            kernels = trees.built_kernels(ROOT, files, FOLDER)
        with _workers(options, files, Path(scratch)) as workers:
            tests = _map(options, files, workers)
            broken = [name for name, (outcome, *_) in tests.items() if outcome == "failed"]
            print(f"{len(tests)} tests; left out, because they fail in a copy: {len(broken)}")
            print(*broken, sep="\n", end="\n" if broken else "")
            reach = Reach(tests)
            left = [mutant for mutant in mutants if mutant.name not in results]
            for mutant, result in _each(
                workers, left, lambda w, m: _tried(options, w, m, reach, kernels)
            ):
                results[mutant.name] = result
                write(part, {"tree": digest, "mutants": results})
                how = f", {result['how']}" if result.get("how", "failed") != "failed" else ""
                print(
                    f"{len(results)}/{len(mutants)} {result['status']}{how}, {result['tests']} tests, "
                    f"{result['seconds']:.1f} s: {mutant.name}",
                    flush=True,
                )
    part.unlink(missing_ok=True)
    return results


class _Worker:
    """A process of worker.py and its copy of the repository."""

    def __init__(self, options, files, folder: Path):
        self.tree, self.log = folder / "tree", folder / "log"
        trees.copy(ROOT, files, self.tree)
        self.connection, other = Pipe()
        tier = ["-m", "slow or not slow"] if options.tier == "all" else []
        script = str(ROOT / "tests" / "mutants" / "worker.py")
        command = [sys.executable, script, str(other.fileno()), json.dumps(tier)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.tree, env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        other.close()

    def do(self, names, *, files=None, usual=None, cap=float("inf"), all=False, reach=False):
        """Run a task (see worker.py), and return what its last message says."""
        task = {"names": names, "files": files or {}, "usual": usual or {}, "cap": cap}
        self.connection.send(task | {"all": all, "reach": reach})
        try:
            return self.connection.recv()
        except EOFError:
            end = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"a worker ended: {end}") from None


@contextmanager
def _workers(options, files, scratch: Path):
    """Start the workers, and end them at the end."""
    workers = []
    try:
        for number in range(options.processes):
            folder = scratch / str(number)
            folder.mkdir()
            workers.append(_Worker(options, files, folder))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()  # with which its forks end
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


def _map(options, files, workers) -> dict[str, list]:
    """Run every test, and return {node id: [outcome, seconds, functions that it enters, is in the fast tier]}."""
    path = FOLDER / f"reach-{options.tier}.json"
    digest = trees.digest_of(ROOT, [f for f in files if not f.startswith("tests/mutants/")])
    known = json.loads(path.read_text()) if path.exists() else {}
    found = known["files"] if known.get("tree") == digest else {}
    wanted = _files_of_tests(options, files)
    left = [file for file in wanted if file not in found]
    for number, (file, tests) in enumerate(_each(workers, left, _entered), 1):
        found[file] = tests
        print(f"{number}/{len(left)} files of tests, {len(tests)} tests: {file}", flush=True)
        write(path, {"tree": digest, "files": found})
    return {name: test for file in wanted for name, test in found[file].items()}


def _files_of_tests(options, files) -> list[str]:
    """Return the files below the given paths. Folders of other tiers than the fast one must be given by themselves."""
    found = []
    for given in options.tests:
        for file in files:
            is_below = Path(given) in (Path(file), *Path(file).parents)
            tier = tiers.of_folder(ROOT / file)
            is_wanted = options.tier == "all" or tier is None or tiers.of_folder(ROOT / given)
            if is_below and is_wanted and Path(file).match("test_*.py"):
                found.append(file)
    return list(dict.fromkeys(found))


def _entered(worker, file: str) -> dict[str, list]:
    """Run the tests of a file. Those that fail run again without a record of functions, which may have disturbed them."""
    first = worker.do([file], all=True, reach=True)
    if not {"run", "test"} & first.keys():
        raise RuntimeError(f"{file}: pytest ran no test: {first.get('how', first)}")
    run = first.get("run", {})
    again = [name for name, (outcome, *_) in run.items() if outcome == "failed"] if run else [file]
    for name, found in worker.do(again, all=True).get("run", {}).items() if again else ():
        run[name] = *found[:2], run[name][2] if name in run else [], found[3]
    return {name: list(found) for name, found in run.items()}


def _tried(options, worker, mutant, reach: Reach, kernels: Path | None) -> dict:
    """Try a mutant, and return its result."""
    names, started = reach.tests_of(ROOT, mutant), time.monotonic()
    result = {"status": "not reached", "tests": 0, "seconds": 0.0}
    if not names:
        return result
    source = mutant.mutation.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
    files = {mutant.file: source.encode()}
    if mutant.file.startswith("csrc"):
        try:
            target = worker.tree.parent / "kernels"
            files[trees.KERNELS] = trees.mutated_kernels(kernels, mutant.file, source, target)
        except trees.CompileError as error:
            return result | {"status": "does not compile", "how": str(error)[-200:]}
    usual = {name: reach.tests[name][1] for name in names}
    while True:
        found = worker.do(names, files=files, usual=usual, cap=options.cap)
        unfit = _failing_anyway(worker, names, usual, found)
        if not unfit:
            break
        print("left out for a mutant, because they also fail without it:", *unfit, sep="\n")
        names = [name for name in names if name not in unfit]
    result |= {key: value for key, value in found.items() if key not in ("files", "run")}
    if result["status"] == "survived":
        result.pop("test", None)
    elif "test" in result and not reach.tests[result["test"]][3]:
        result["status"] = "killed slowly"
    return result | {"seconds": round(time.monotonic() - started, 1)}


def _failing_anyway(worker, names: list[str], usual: dict, found: dict) -> list[str]:
    """Return the tests that killed a mutant, if they also fail in the same way without it: then they prove nothing."""
    if found["status"] == "survived":
        return []
    killing = [found["test"]] if "test" in found else []
    for file in () if killing else found.get("files", ()):  # whose collection failed
        killing.append(next(name for name in names if name.split("::")[0] == file))
    same = worker.do(killing, usual=usual)
    return [] if same["status"] == "survived" else killing


if __name__ == "__main__":
    sys.exit(main())
