"""A process that runs tests on mutants, in a copy of the repository.

Importing torch and collecting all tests takes a minute, and running the tests of a mutant often less than a second. So a
worker collects all tests once, and forks for each mutant. In the fork, functions get their mutated code, wherever the
function objects are. A mutant that acts while modules are imported, such as a changed default, needs modules imported anew:
its fork comes from a process that has imported torch and other packages, but neither fewbit nor a test.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.metadata
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import types
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

GIB = 2**30
MORE_MEMORY = 8 * GIB
"""The bytes of address space that tests may add, so that a mutant cannot take all memory."""
SLOWNESS, SLACK = 10, 20
"""A test is stopped after SLOWNESS times its usual processor time plus SLACK seconds, as a loop without an end."""
DEADLOCK = 600
"""A test that takes this many seconds of wall time is stopped, because it may be waiting for itself."""


def main(descriptor: str, options: str) -> None:
    """Collect the tests, say so, and run tasks until the other side closes the connection.

    Args:
        descriptor: the file descriptor of the connection.
        options: the arguments of `Worker`, in JSON.
    """
    die_with_parent()
    try:
        worker = Worker(Connection(int(descriptor)), **json.loads(options))
        worker.run()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the main process ended, and reports why


class Worker:
    """The process without fewbit and tests, which forks another one that has collected all tests.

    Args:
        connection: to the main process.
        tree: the copy of the repository, which is the current folder. Mutants are written there.
        tests: files and folders.
        options: of pytest, which choose the tier.
    """

    def __init__(self, connection: Connection, tree: str, tests: list[str], options: list[str]):
        self.connection, self.tree, self.options = connection, Path(tree), options
        sys.path[0] = tree  # in place of the folder of this script
        os.environ["PYTHONPATH"] = tree  # for processes that tests start
        self.collected, other = Pipe()
        if not os.fork():
            die_with_parent()
            self.collected.close()
            try:
                plugin = Collected(other, self.tree)
                run_pytest([*tests, "--continue-on-collection-errors", *options], plugin)
            finally:
                os._exit(1)
        other.close()

    def run(self) -> None:
        """Run tasks."""
        found = self.collected.recv()
        write_no_bytecode()
        for name in found.pop("modules"):
            try:
                importlib.import_module(name)
            except Exception:
                continue  # a module that only its package can import; a test imports it when it needs it
        gc.freeze()
        self.connection.send(found)
        while True:
            task = self.connection.recv()
            with written(self.tree, task):
                self.connection.send(self._done(task))

    def _done(self, task: dict) -> dict:
        if task.get("anew"):
            return in_child(lambda send: run_anew(self.options, task, send))
        self.collected.send(task)
        return self.collected.recv()


class written:
    """A context in which the file of a mutant is written into the tree, where processes that tests start find it."""

    def __init__(self, tree: Path, task: dict):
        self.contents = {tree / file: data for file, data in task.get("files", {}).items()}

    def __enter__(self):
        self.before = {path: (path.read_bytes(), path.stat()) for path in self.contents}
        for path, data in self.contents.items():
            path.unlink()  # a library that is in use must not change
            path.write_bytes(data)

    def __exit__(self, *_):
        for path, (data, status) in self.before.items():
            path.unlink()
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def run_pytest(arguments: list[str], plugin) -> int:
    """Run pytest without its output, and without files that several workers would share."""
    return pytest.main([*arguments, "-s", "-p", "no:cacheprovider"], [plugin])


def write_no_bytecode() -> None:
    """Keep compiled mutants out of __pycache__: a mutant can be as large and as old as the next one."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


# -- running tests in a fork -----------------------------------------------------------------------------


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
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = folder
            tempfile.tempdir = folder
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
    status = os.waitpid(child, 0)[1]
    _kill_group(child)
    if "status" not in found:
        died = -os.waitstatus_to_exitcode(status)
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


def run_items(items: list, outcomes: dict, task: dict, send, reach: Reach | None = None) -> bool:
    """Run tests until one fails or `task["cap"]` seconds of processor time have passed.

    Args:
        items: pytest's, in order.
        outcomes: {node id: "failed" or another outcome}, which a plugin fills.
        task: "usual": {node id: seconds}; "cap": seconds; "all": whether to go on after a failure.
        send: sends messages.
        reach: records the functions that each test enters, or None.

    Returns:
        Whether to go on, because no test failed and time is left.
    """
    for item, following in zip(items, [*items[1:], None], strict=True):
        if seconds_used() > task["cap"]:
            send({"status": "survived", "capped": True})
            return False
        name = item.nodeid
        send({"test": name})
        limit = SLOWNESS * task["usual"].get(name, DEADLOCK / SLOWNESS) + SLACK
        signal.setitimer(signal.ITIMER_PROF, limit)
        started = seconds_used()
        if reach:
            reach.start()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        entered = reach.stop(item.fixturenames) if reach else []
        signal.setitimer(signal.ITIMER_PROF, 0)
        run = task.setdefault("run", {})
        run[name] = outcomes.get(name, "failed"), seconds_used() - started, entered
        send({"tests": len(run), "processor": round(seconds_used(), 2)})
        if run[name][0] == "failed" and not task.get("all"):
            send({"status": "killed", "how": "failed"})
            return False
    return True


def seconds_used() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


class Outcomes:
    """A plugin that notes the outcome of each test. Subclasses choose the tests."""

    def __init__(self):
        self.outcomes = {}

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed" or report.when == "call":
            if self.outcomes.get(report.nodeid) != "failed":
                self.outcomes[report.nodeid] = report.outcome


# -- functions with mutated code, in a session that has collected all tests --------------------------------


class Collected(Outcomes):
    """The plugin of the session that has collected all tests. It forks for each task.

    Args:
        connection: to the worker.
        tree: the copy of the repository.
    """

    def __init__(self, connection: Connection, tree: Path):
        super().__init__()
        self.connection, self.tree = connection, tree
        self.before = set(sys.modules)
        self.importing, self.reach = Reach(tree), None
        self.importing.start()

    def pytest_runtestloop(self, session):
        """Run tasks instead of tests, until the worker ends."""
        imported = self.importing.stop()
        write_no_bytecode()
        items = {item.nodeid: item for item in session.items}
        files = {}
        for name in items:
            files.setdefault(name.split("::")[0], []).append(name)
        found = {"files": files, "imported": imported, "modules": self._packages()}
        self.functions = self._functions()
        gc.collect()
        gc.freeze()  # so that forks share memory for longer
        self.connection.send(found)
        while True:
            try:
                task = self.connection.recv()
            except EOFError:
                os._exit(0)
            chosen = [items[name] for name in task["names"] if name in items]
            self.connection.send(in_child(lambda send, c=chosen, t=task: self._run(c, t, send)))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """Note the functions that a fixture of several tests enters, for all of these tests."""
        if self.reach is None or fixturedef.scope == "function":
            return (yield)
        with self.reach.shared_by(fixturedef.argname):
            return (yield)

    def _run(self, items, task, send) -> None:
        for code in task.get("codes", ()):
            self._put(code, task)
        self.reach = Reach(self.tree) if task.get("reach") else None
        if run_items(items, self.outcomes, task, send, self.reach):
            send({"status": "survived"})
        if task.get("all"):
            send({"run": task["run"]})

    def _put(self, key: str, task) -> None:
        """Put the mutated code of a key into its function objects, and into those of the functions around it."""
        file = key.split(":")[0]
        whole = compile(task["files"][file], str(self.tree / file), "exec", dont_inherit=True)
        for code in _below(whole):
            if key in {key_of(inner, self.tree) for inner in _below(code)}:
                for function in self.functions.get(key_of(code, self.tree), ()):
                    function.__code__ = code

    def _functions(self) -> dict[str, list]:
        found = {}
        for thing in gc.get_objects():
            if type(thing) is types.FunctionType:
                key = key_of(thing.__code__, self.tree)
                if key:
                    found.setdefault(key, []).append(thing)
        return found

    def _packages(self) -> list[str]:
        """Return the modules outside of the repository that are now imported, without those of pytest's plugins."""
        # pytest rewrites the assertions of its plugins, and therefore wants to import them itself.
        plugins = {"pytest", "_pytest", "__main__"}
        for entry in importlib.metadata.entry_points(group="pytest11"):
            plugins |= {path.parts[0].removesuffix(".py") for path in entry.dist.files or ()}
        found = []
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            own = file.startswith(str(self.tree)) or name.split(".")[0] in plugins
            if file and not own and name not in self.before:
                found.append(name)
        return found


def _below(code: types.CodeType):
    """Yield a code object and all that are inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _below(constant)


def key_of(code, tree: Path) -> str:
    """Return "file:line:qualified name" of a code object of fewbit, "" of another one."""
    start = f"{tree}/fewbit/"
    if not code.co_filename.startswith(start):
        return ""
    file = code.co_filename[len(f"{tree}/") :]
    return f"{file}:{code.co_firstlineno}:{code.co_qualname}"


class Reach:
    """The functions of fewbit that are entered between `start` and `stop`.

    Args:
        tree: the copy of the repository.
    """

    def __init__(self, tree: Path):
        self.tree, self.keys, self.fixtures = tree, {}, {}

    def start(self) -> None:
        """Begin to record."""
        self.seen = {}

        def enter(frame, event, argument):
            code = frame.f_code
            self.seen[id(code)] = code

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
        """End, and return the keys of functions entered since `start`, and of those that the fixtures entered."""
        sys.settrace(None)
        threading.settrace(None)
        keys = set()
        for codes in (self.seen, *(self.fixtures.get(name, {}) for name in fixtures)):
            for number, code in codes.items():
                if number not in self.keys:
                    # The code is kept, so that no other one gets its id.
                    self.keys[number] = code, key_of(code, self.tree)
                keys.add(self.keys[number][1])
        return sorted(keys - {""})


# -- modules imported anew -------------------------------------------------------------------------------


def run_anew(options: list[str], task: dict, send) -> None:
    """Collect and run the tests of a task in this process, first those of one file, then of two more, of four more, ..."""
    files = {}
    for name in task["names"]:
        files.setdefault(name.split("::")[0], []).append(name)
    left, size = list(files), 1
    if task.get(
        "numba"
    ):  # whose cache on disk does not see that a function in another file has changed
        importlib.import_module("numba").config.CACHE_DIR = tempfile.gettempdir()
        os.environ["NUMBA_CACHE_DIR"] = tempfile.gettempdir()
    while left:
        chunk, left = left[:size], left[size:]
        size *= 2
        names = [name for file in chunk for name in files[file]]
        send({"files": chunk})
        plugin = Chosen(names, task, send)
        code = run_pytest([*chunk, *options], plugin)
        if plugin.ended:
            return
        if code not in (0, 5) or not plugin.collected:
            send({"status": "killed", "how": f"pytest's exit code {int(code)}"})
            return
    send({"status": "survived"})


class Chosen(Outcomes):
    """The plugin of a session that runs some tests in a given order.

    Args:
        names: of the tests, in order.
        task, send: arguments of `run_items`.
    """

    def __init__(self, names: list[str], task: dict, send):
        super().__init__()
        self.names, self.task, self.send = names, task, send
        self.ended = self.collected = False

    def pytest_runtestloop(self, session):
        """Run the tests."""
        self.collected = True
        if session.testsfailed:
            return None
        items = {item.nodeid: item for item in session.items}
        chosen = [items[name] for name in self.names if name in items]
        self.ended = not run_items(chosen, self.outcomes, self.task, self.send)
        return True


if __name__ == "__main__":
    main(*sys.argv[1:])
