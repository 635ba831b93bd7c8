"""Building: what setup.py leaves in the tree."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

SETUP = Path(__file__).parents[2] / "setup.py"
pytestmark = pytest.mark.skipif(
    not SETUP.exists() or os.name != "posix", reason="needs a checkout and sh"
)


@pytest.mark.processes
def test_kernels_of_an_earlier_build_do_not_stay(tmp_path):
    """Old kernels would be packed into a wheel, or imported, although none were asked for."""
    pytest.importorskip("setuptools")
    for name in ("setup.py", "build_backend.py"):
        shutil.copy(SETUP.parent / name, tmp_path)
    for package in ("fewbit", "tables"):
        (tmp_path / package).mkdir()
    names = "_kernels.abi3.so", "_kernels" + sysconfig.get_config_var("EXT_SUFFIX")
    old = [tmp_path / place / "fewbit" / name for place in ("lib", ".") for name in names]
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--build-lib", "lib"]
    environment = {**os.environ, "FEWBIT_KERNELS": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "installed without compiled kernels (FEWBIT_KERNELS=0)" in done.stderr
    assert not any(path.exists() for path in old)


def test_kernels_of_this_build_stay_alone(build, tmp_path):
    """Python would import kernels whose name has the version of Python before those that serve all versions."""
    built = tmp_path / "_kernels.abi3.so"
    for path in (built, tmp_path / "_kernels.cpython-311-x86_64-linux-gnu.so"):
        path.touch()
    command = SimpleNamespace(
        extensions=[SimpleNamespace(name="fewbit._kernels")],
        get_ext_fullpath=lambda name: str(built),
    )
    build["BuildKernels"].remove_other_kernels(command)
    assert list(tmp_path.iterdir()) == [built]


@pytest.fixture
def build(monkeypatch):
    """The names that setup.py defines, without a build."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    for name in ("FEWBIT_CUDA", "FEWBIT_CUDA_ARCHITECTURES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(SETUP.parent)
    return runpy.run_path(str(SETUP))


@pytest.fixture
def backend():
    """The names that build_backend.py defines."""
    pytest.importorskip("setuptools")
    return runpy.run_path(str(SETUP.with_name("build_backend.py")))


def use(monkeypatch, backend, driver):
    """Let build_backend.py find this driver, or raise this exception."""

    def library(name):
        assert name == "libcuda.so.1"
        if isinstance(driver, Exception):
            raise driver
        return driver

    monkeypatch.setattr(backend["ctypes"], "CDLL", library)


@pytest.fixture
def nvcc(tmp_path):
    """An nvcc that knows these architectures and cannot do anything else."""
    path = tmp_path / "nvcc"
    known = " ".join(f"compute_{number}" for number in (75, 80, 86, 87, 89, 90, 100, 103, 120, 121))
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' {known}\n")
    path.chmod(0o755)
    return str(path)


NAME = "FEWBIT_CUDA_ARCHITECTURES"
ALL = [75, 80, 86, 89, 90, 100, 120]


@pytest.mark.parametrize(
    ("mode", "named", "gpus", "expected"),
    [
        (None, None, (), ([], 75)),  # no GPU: what serves all of them, and nothing else
        (None, None, (90,), ([90], 90)),
        (None, None, (90, 75), ([75, 90], 90)),
        (None, None, (87,), ([87], 87)),
        (None, None, (110,), ([103], 103)),  # newer than anything that nvcc knows of its kind
        (None, None, (61,), ([], 75)),  # too old for any kernel
        (None, None, (61, 80), ([80], 80)),
        (None, "all", (80,), (ALL, 120)),
        (None, "", (80,), f"{NAME}: expected all, or numbers that nvcc knows \\(.*\\), got ''$"),
        (None, "89 100", (80,), ([89, 100], 100)),
        ("auto", "8.0", (), f"{NAME}: .* got '8.0'"),
        ("auto", "80 all", (), f"{NAME}: .* got '80 all'"),
        ("auto", "80 99", (), f"{NAME}: .* got '80 99'"),
        ("1", None, (80,), (ALL, 120)),
        ("1", "75,90", (), ([75, 90], 90)),
    ],
)
def test_what_cuda_is_built_for(build, nvcc, monkeypatch, mode, named, gpus, expected):
    chosen = build["cuda_architectures"]
    monkeypatch.setitem(chosen.__globals__, "present_gpus", lambda: set(gpus))
    for name, value in (("FEWBIT_CUDA", mode), ("FEWBIT_CUDA_ARCHITECTURES", named)):
        if value is not None:
            monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(Exception, match=expected):
            chosen(nvcc)
        return
    assert chosen(nvcc) == expected
    command, *_ = next(iter(build["cuda_jobs"]([nvcc], *expected)))
    code = [word.rpartition("code=")[2] for word in command if "gencode" in word]
    assert code == build["targets"](*expected)
    assert [target for target in code if target.startswith("compute")] == [f"compute_{expected[1]}"]


@pytest.mark.parametrize(("release", "is_small"), [("12.9", False), ("13.0", True)])
def test_kernels_for_new_drivers_are_compressed(build, tmp_path, release, is_small):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    command, *_ = next(iter(build["cuda_jobs"]([str(nvcc)], [90], 90)))
    assert ("--compress-mode=size" in command) == is_small


@pytest.mark.parametrize(
    ("mode", "says", "expected"),
    [
        (None, "", True),
        (None, "math.h(629): error: exception specification is incompatible", False),
        ("1", "error: anything", True),  # which fails later, and says why
    ],
)
def test_an_nvcc_that_does_not_work(build, monkeypatch, capfd, tmp_path, mode, says, expected):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho '{says}' >&2\n[ -z '{says}' ]\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if mode:
        monkeypatch.setenv("FEWBIT_CUDA", mode)
    assert build["find_nvcc"]("g++") == (str(nvcc) if expected else None)
    shown = capfd.readouterr().err
    assert ("without CUDA kernels" in shown and says in shown) == (not expected)


def test_cuda_is_linked_statically_with_the_libraries_beside_nvcc(build, monkeypatch, tmp_path):
    commands = []
    link = build["BuildKernels"].link
    monkeypatch.setitem(link.__globals__, "run", commands.append)
    link(None, ["a.o", "b.o"], "/opt/cuda/nvidia/cu13/bin/nvcc", tmp_path / "new" / "_kernels.so")
    (command,) = commands
    assert command[0] == "/opt/cuda/nvidia/cu13/bin/nvcc" and (tmp_path / "new").is_dir()
    assert {"--cudart=static", "-L/opt/cuda/nvidia/cu13/lib", "a.o", "b.o"} <= set(command)


class Driver:
    """A CUDA driver with GPUs of these compute capabilities."""

    def __init__(self, *gpus, broken=0, version=13000):
        self.gpus, self.broken, self.version = gpus, broken, version

    def cuInit(self, flags):
        return self.broken

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGetAttribute(self, value, number, gpu):
        value._obj.value = self.gpus[gpu][{75: 0, 76: 1}[number]]
        return 0


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (OSError("no libcuda.so.1"), set()),
        (Driver(broken=100), set()),  # CUDA_ERROR_NO_DEVICE
        (Driver(), set()),
        (Driver((9, 0), (7, 5), (9, 0)), {90, 75}),
        (Driver((12, 1)), {121}),
    ],
)
def test_the_driver_says_which_gpus_are_there(backend, monkeypatch, driver, expected):
    use(monkeypatch, backend, driver)
    assert backend["present_gpus"]() == expected


H100 = (9, 0)


@pytest.mark.parametrize(
    ("driver", "variables", "tools", "expected"),
    [
        (Driver(H100), {}, ("bin/g++",), True),
        (
            Driver(H100, version=13020),
            {"FEWBIT_CUDA": "auto", "CXX": "ccache clang++"},
            ("bin/clang++",),
            True,
        ),
        (Driver(H100, version=12080), {}, ("bin/g++",), False),
        (Driver((7, 0)), {}, ("bin/g++",), False),
        (Driver(), {}, ("bin/g++",), False),
        (Driver(H100), {}, (), False),  # no C++ compiler
        (OSError("no libcuda.so.1"), {}, ("bin/g++",), False),
        (OSError("no libcuda.so.1"), {"FEWBIT_CUDA": "1"}, (), True),
        (OSError("no libcuda.so.1"), {"FEWBIT_CUDA_ARCHITECTURES": "90"}, ("bin/g++",), True),
        (Driver(H100), {"FEWBIT_CUDA": "0"}, (), False),
        (Driver(H100), {"FEWBIT_KERNELS": "0"}, (), False),
        (Driver(H100), {}, ("bin/nvcc", "bin/g++"), False),
        (Driver(H100), {}, ("nvidia/cu13/bin/nvcc", "bin/g++"), False),
    ],
)
def test_when_a_build_asks_for_nvcc(
    backend, monkeypatch, tmp_path, driver, variables, tools, expected
):
    use(monkeypatch, backend, driver)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(backend["platform"], "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for name in ("FEWBIT_CUDA", "FEWBIT_CUDA_ARCHITECTURES", "FEWBIT_KERNELS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for tool in tools:
        path = tmp_path / tool
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    for hook in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        monkeypatch.setattr(backend["build_meta"], hook, lambda settings: ["others"])
        assert backend[hook]() == ["others", *(backend["NVCC"] if expected else ())]


@pytest.fixture
def compilations(build, tmp_path):
    """A function that compiles these sources with a shell script in the place of a compiler."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"  # -MD -MF dependencies -c source -o target
        'case "$5" in *bad*) echo "$5: cannot be"; exit 3;; *warned*) echo "$5: strange";; esac\n'
        'echo "$7: $5" > "$3"; echo made > "$7"\n'
    )
    script.chmod(0o755)

    def compile_all(*names):
        for name in names:
            (tmp_path / name).exists() or (tmp_path / name).touch()
        targets = [tmp_path / "out" / f"{name}.o" for name in names]
        jobs = [([str(script)], tmp_path / target.stem, target) for target in targets]
        build["compile_all"](jobs, "a test")
        return targets

    return compile_all


def test_a_build_says_how_far_it_is(compilations, capsys):
    assert all(target.exists() for target in compilations("a", "warned", "b"))
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("fewbit's kernels for a test: ")]
    assert said[0].endswith("looking for what changed")
    assert sorted(line.split()[-1] for line in said[1:]) == ["a", "b", "warned"]
    assert [line.split(": ")[1].split(",")[0] for line in said[1:]] == [
        f"compiled {number} of 3" for number in (1, 2, 3)
    ]
    assert any(line.endswith("warned: strange") for line in lines)
    compilations("a", "warned", "b")
    assert len(capsys.readouterr().out.splitlines()) == 1  # nothing changed
    with pytest.raises(Exception, match="command failed with exit status 3: .*bad"):
        compilations("a", "bad")
    assert "bad: cannot be" in capsys.readouterr().out


def test_on_a_terminal_one_line_moves(build, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    line = build["MovingLine"]("kernels")
    line.show("compiled 1 of 2, of a name too long for that")
    line.end()
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and said.endswith("\n")
    assert all(len(part) <= 29 for part in said.rstrip().split("\r\033[K"))
