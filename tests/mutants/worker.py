"""A process that runs tests on mutants, in a copy of the repository.

The process imports torch and other packages once, which takes seconds, and forks for each task. The fork imports fewbit and
the tests, with the mutant in the files of the copy.
"""

from __future__ import annotations

import compileall
import ctypes
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager
from itertools import groupby, zip_longest
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import tiers  # noqa: E402

PACKAGES = "torch._dynamo numba scipy.linalg mpmath hypothesis matplotlib transformers click rich"
MORE_MEMORY = 8 * 2**30
"""The bytes of address space that tests may add, so that a mutant cannot take all memory."""
SLOWNESS, SLACK = 10, 20
"""A test is stopped after SLOWNESS times its usual processor time plus SLACK seconds, as a loop without an end."""
DEADLOCK = 600
"""A test that takes this many seconds of wall time is stopped, because it may be waiting for itself."""


def main(descriptor: str, options: str) -> None:
    """Run tasks until the other side closes the connection.

    A task is a dict with "names", the tests in order; "files", {path: contents} of the mutant; "usual", {test: seconds};
    "cap", the seconds of processor time; "all", whether to go on after a failure; "reach", whether to record functions.

    Args:
        descriptor: the file descriptor of the connection.
        options: the arguments of pytest that choose the tier, in JSON.
    """
    die_with_parent()
    tree, connection = Path.cwd(), Connection(int(descriptor))
    sys.path[0] = str(tree)  # in place of the folder of this script
    os.environ["PYTHONPATH"] = str(tree)  # for processes that tests start
    # Plugins may be among the packages that are imported before pytest, which would warn.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    compileall.compile_dir("fewbit", quiet=2)
    # Compiled mutants stay out of __pycache__: a mutant can be as large and as old as the next one.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    for name in PACKAGES.split():
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    gc.freeze()  # so that forks share memory for longer
    try:
        while True:
            task = connection.recv()
            with written(tree, task["files"]):
                connection.send(in_child(lambda send, t=task: run(json.loads(options), t, send)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the main process ended, and reports why


@contextmanager
def written(tree: Path, files: dict[str, bytes]):
    """Write files into the tree, and write those that were there again at the end."""
    before = {tree / file: ((tree / file).read_bytes(), (tree / file).stat()) for file in files}
    for file, data in files.items():
        (tree / file).unlink()  # a library that is in use must not change
        (tree / file).write_bytes(data)
    try:
        yield
    finally:
        for path, (data, status) in before.items():
            path.unlink()
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def in_child(work) -> dict:
    """Call work(send) in a fork, and return the last message that it sent, or how the fork died.

    Messages are dicts. Each updates the ones before.
    """
    receive, send = Pipe(duplex=False)
    folder = tempfile.mkdtemp(prefix="mutant-")
    child = os.fork()
    if not child:
        try:
            die_with_parent()
            os.setsid()
            receive.close()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MORE_MEMORY, hard))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work(send.send)
        except BaseException as error:
            send.send({"status": "killed", "how": "stopped pytest: " + repr(error)[:200]})
        finally:
            os._exit(0)
    send.close()
    found = {}
    try:
        while receive.poll(DEADLOCK):
            found |= receive.recv()
        found |= {"status": "killed", "how": "timeout"}
    except EOFError:
        pass
    # What tests have started and left is in the child's group, too.
    _kill_group(child)
    died = -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _kill_group(child)
    if "status" not in found:
        how = "timeout" if died == signal.SIGPROF else f"signal {died}"
        found |= {"status": "killed", "how": how}
    shutil.rmtree(folder, ignore_errors=True)
    return found


def die_with_parent() -> None:
    """Let this process be killed when its parent ends, if the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _kill_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(options: list[str], task: dict, send) -> None:
    """Collect and run the tests of a task in this process, first those of one file, then of two more, of four more, ..."""
    groups = [(file, list(own)) for file, own in groupby(task["names"], _file_of)]
    if any(b"njit" in data for data in task["files"].values()):
        # Numba's cache on disk does not see that a function in another file has changed.
        importlib.import_module("numba").config.CACHE_DIR = tempfile.gettempdir()
        os.environ["NUMBA_CACHE_DIR"] = tempfile.gettempdir()
    left, size = groups, 1
    while left:
        chunk, left = left[:size], left[size:]
        size *= 2
        files = list(dict.fromkeys(file for file, _ in chunk))
        send({"files": files})
        plugin = Chosen([name for _, own in chunk for name in own], task, send)
        code = pytest.main([*files, *options, "-s", "-p", "no:cacheprovider"], [plugin])
        if plugin.ended:
            return
        if code not in (0, 5) and not task["all"] or not plugin.collected:
            send({"status": "killed", "how": f"pytest's exit code {int(code)}"})
            return
    send({"status": "survived"})


def _file_of(name: str) -> str:
    return name.split("::")[0]


class Chosen:
    """The plugin of a session that runs some tests in a given order, until one fails or too much time has passed.

    Args:
        names: of the tests, in order; a name without "::" stands for all tests of the file.
        task: see `main`.
        send: sends messages.
    """

    def __init__(self, names: list[str], task: dict, send):
        self.names, self.task, self.send = names, task, send
        self.ended = self.collected = False
        self.outcomes, self.run = {}, task.setdefault("run", {})
        self.reach = Reach(Path.cwd()) if task["reach"] else None

    def pytest_runtestloop(self, session):
        """Run the tests."""
        self.collected = True
        if session.testsfailed and not self.task["all"]:
            return None
        items = {item.nodeid: item for item in session.items}
        names = [name for name in self.names if name in items]
        names += [name for name in items if name.split("::")[0] in self.names]
        for name, following in zip_longest(names, names[1:]):
            if _seconds_used() > self.task["cap"]:
                self.send({"status": "survived", "capped": True})
                self.ended = True
            elif self._fails(items[name], items.get(following)) and not self.task["all"]:
                self.send({"status": "killed", "how": "failed"})
                self.ended = True
            if self.ended:
                break
        if self.task["all"]:
            self.send({"run": self.run})
        return True

    def _fails(self, item, following) -> bool:
        name, started = item.nodeid, _seconds_used()
        self.send({"test": name})
        usual = self.task["usual"].get(name, DEADLOCK / SLOWNESS)
        signal.setitimer(signal.ITIMER_PROF, SLOWNESS * usual + SLACK)
        if self.reach:
            self.reach.start()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        entered = self.reach.stop(item.fixturenames) if self.reach else []
        signal.setitimer(signal.ITIMER_PROF, 0)
        outcome = self.outcomes.get(name, "failed")
        self.run[name] = outcome, _seconds_used() - started, entered, tiers.is_fast(item)
        self.send({"tests": len(self.run), "processor": round(_seconds_used(), 2)})
        return outcome == "failed"

    def pytest_runtest_logreport(self, report):
        """Note the outcome of each test."""
        if report.outcome != "passed" or report.when == "call":
            if self.outcomes.get(report.nodeid) != "failed":
                self.outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """Note the functions that a fixture of several tests enters, for all of these tests."""
        if self.reach is None or fixturedef.scope == "function":
            return (yield)
        with self.reach.shared_by(fixturedef.argname):
            return (yield)


def _seconds_used() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


class Reach:
    """The functions of fewbit that are entered between `start` and `stop`, as "file:qualified name".

    Args:
        tree: the copy of the repository.
    """

    def __init__(self, tree: Path):
        self.tree, self.seen, self.keys, self.fixtures = str(tree), {}, {}, {}

    def start(self) -> None:
        """Begin to record."""
        self.seen = {}

        def enter(frame, event, argument):
            self.seen[id(frame.f_code)] = frame.f_code

        threading.settrace(enter)
        sys.settrace(enter)

    @contextmanager
    def shared_by(self, fixture: str):
        """Record in the context the functions of a fixture, which the tests that use it share."""
        before, self.seen = self.seen, self.fixtures.setdefault(fixture, {})
        try:
            yield
        finally:
            self.seen = before

    def stop(self, fixtures=()) -> list[str]:
        """End, and return the functions entered since `start`, and those that the fixtures entered."""
        sys.settrace(None)
        threading.settrace(None)
        found = set()
        for codes in (self.seen, *(self.fixtures.get(name, {}) for name in fixtures)):
            for number, code in codes.items():
                # The code is kept, so that no other one gets its id.
                self.keys.setdefault(number, (code, self._key(code)))
                found.add(self.keys[number][1])
        return sorted(found - {""})

    def _key(self, code) -> str:
        file = code.co_filename.removeprefix(f"{self.tree}/")
        return f"{file}:{code.co_qualname}" if file.startswith("fewbit/") else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
