"""Locate the packages, and build the compiled kernels.

The kernels (csrc/) become the extension module fewbit._kernels, which needs no torch to build or import.
Environment variables:

FEWBIT_KERNELS             auto (default): build them if there is a C++ compiler; 1: fail if there is none;
                           0: do not build them, which leaves the slower reference backend
FEWBIT_CUDA                auto (default): build CUDA kernels if nvcc is found (PATH, CUDA_HOME), for this machine's
                           GPUs; without a GPU only PTX for the oldest supported architecture. If there is no nvcc, and there
                           is a GPU or FEWBIT_CUDA_ARCHITECTURES is set, pip gets nvcc for the build (build_backend.py);
                           1: build for all architectures in CUDA_ARCHITECTURES, fail if there is no nvcc;
                           0: build no CUDA kernels
FEWBIT_CUDA_ARCHITECTURES  compute capabilities to build for, such as "80 90", or "all" in CUDA_ARCHITECTURES, in place of
                           those that FEWBIT_CUDA selects; empty is an error
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

from build_backend import installed_nvcc, present_gpus

CSRC = Path("csrc")
KERNELS = "fewbit._kernels"
# A build for the limited API of Python 3.11 serves all later versions too, apart from those without the global lock.
IS_LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
LIMITED_API = ["-DPy_LIMITED_API=0x030B0000"] if IS_LIMITED else []
SLOWEST = "rotated_quantize", "rotated", "cpu", "module"
"""The sources that take longest to compile, by far."""
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    # Options for speed are limited to those that change no result, because all backends must agree to the last bit.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
]
# The sources PER_ISA in csrc/cpu are compiled once for each instruction set, with the flags in csrc/cpu/<set>.flags.
# At run time csrc/cpu/dispatch.cpp asks the processor which sets it supports.
X86_ISAS = ("avx512", "avx2", "baseline")
PER_ISA = ("kernels", "quantize", "rotated", "fixed_point", "channels")
CUDA_ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


class BuildKernels(build_ext):
    """The build command that compiles the kernels. Each source has its own flags. Only changed sources are compiled."""

    def build_extensions(self):
        mode = choice("FEWBIT_KERNELS")
        missing = "FEWBIT_KERNELS=0" if mode == "0" else self.missing_tool()
        if missing and mode == "1":
            raise CompileError(f"FEWBIT_KERNELS=1, but {missing}")
        if missing:
            print(
                f"warning: fewbit is installed without compiled kernels ({missing}); "
                "the slower reference backend is used",
                file=sys.stderr,
            )
            self.extensions = []
        super().build_extensions()
        self.remove_other_kernels()

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        self.remove_other_kernels()

    def remove_other_kernels(self):
        """Delete the kernels of earlier builds, which would be packaged, or imported in place of those of this build."""
        built = {Path(self.get_ext_fullpath(extension.name)) for extension in self.extensions}
        for path in Path(self.get_ext_fullpath(KERNELS)).parent.glob("_kernels*.so"):
            if path not in built:
                path.unlink()

    def build_extension(self, extension):
        includes = [f"-I{path}" for path in (CSRC, sysconfig.get_path("include"))]
        host = next(word for word in self.compiler.compiler_so_cxx if "ccache" not in word)
        nvcc = find_nvcc(host)
        jobs = [*cpu_jobs(self.compiler.compiler_so_cxx, includes, with_cuda=bool(nvcc))]
        what = "CPU"
        if nvcc:
            architectures, ptx = cuda_architectures(nvcc)
            jobs += cuda_jobs([nvcc, f"-ccbin={host}"], architectures, ptx)
            what += f" and CUDA ({', '.join(targets(architectures, ptx))})"
        compile_all(jobs, what)
        objects = [str(target) for *_, target in jobs]
        self.link(objects, nvcc, Path(self.get_ext_fullpath(extension.name)))

    def missing_tool(self):
        """Return the reason why the kernels cannot be compiled on this machine, or None if they can."""
        if self.compiler.compiler_type != "unix":
            return f"no build for the {self.compiler.compiler_type} compiler yet"
        compiler = self.compiler.compiler_so_cxx[0]
        if not shutil.which(compiler):
            return f"no C++ compiler was found ({compiler})"
        header = Path(sysconfig.get_path("include"), "Python.h")
        return None if header.exists() else f"Python's headers are not installed ({header})"

    def link(self, objects, nvcc, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if nvcc:
            # nvcc links, because it knows where its static CUDA runtime is. The runtime's symbols are hidden, so that
            # torch's CUDA runtime does not replace them.
            hide = ["-Xlinker", "--exclude-libs=ALL"]
            # The nvcc of the packages nvidia-cuda-* searches lib64, but its libraries are in lib.
            search = f"-L{Path(nvcc).parents[1] / 'lib'}"
            command = [nvcc, "-shared", "--cudart=static", search, *hide, *objects]
            run([*command, "-o", str(target), "-ldl"])
        else:
            self.compiler.link_shared_object(objects, str(target), target_lang="c++")


def choice(variable):
    value = os.environ.get(variable, "auto")
    if value not in ("auto", "0", "1"):
        raise CompileError(f"{variable}: expected auto, 0 or 1, got {value!r}")
    return value


def find_nvcc(host):
    """Return the path of nvcc, or None if no CUDA kernels are wanted, or nvcc is not installed or does not work.

    Args:
        host: The C++ compiler.
    """
    mode = choice("FEWBIT_CUDA")
    if mode == "0":
        return None
    nvcc = installed_nvcc()
    if mode == "1" and not nvcc:
        raise CompileError(
            "FEWBIT_CUDA=1, but nvcc was found neither on PATH, nor in CUDA_HOME, nor in NVIDIA's packages"
        )
    failure = "" if mode == "1" or not nvcc else failure_of(nvcc, host)
    if failure:
        print(
            f"warning: fewbit is installed without CUDA kernels, because nvcc does not work here: {failure}",
            file=sys.stderr,
        )
        return None
    return nvcc


def failure_of(nvcc, host):
    """Return the first error of nvcc for a small kernel, or an empty text. The C library may be too new for nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cu")
        source.write_text(
            "#include <cmath>\n__global__ void kernel(float* x) { *x = sqrtf(*x); }\n"
        )
        command = [nvcc, f"-ccbin={host}", "-c", str(source), "-o", str(Path(folder, "kernel.o"))]
        done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line]
    return (lines or [f"exit status {done.returncode}"])[0] if done.returncode else ""


def cpu_jobs(compiler, includes, with_cuda):
    """Yield (command, source, object file) for each host source. PER_ISA sources occur once per instruction set."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    common = [*compiler, *COMMON_FLAGS, *includes, *(["-DFEWBIT_HAVE_X86"] if x86 else [])]
    command = [*common, *(["-DFEWBIT_WITH_CUDA"] if with_cuda else [])]
    sources = (
        *(
            f"bindings/{name}.cpp"
            for name in ("cpu", "entry", "module", "python", "tensors", "torch_shim")
        ),
        *(["bindings/cuda.cpp"] if with_cuda else []),
        "common/table.cpp",
        "cpu/allocation.cpp",
        "cpu/dispatch.cpp",
        "cpu/memory.cpp",
        "cpu/parallel.cpp",
        "cpu/quantizer.cpp",
    )
    for source in sources:
        limited = LIMITED_API if source.startswith("bindings/") else []
        yield [*command, *limited], CSRC / source, object_of(source)
    for isa in X86_ISAS if x86 else ("baseline",):
        flags = (CSRC / "cpu" / f"{isa}.flags").read_text().split()
        if x86 and isa == "baseline":
            flags.append("-O1")  # compiles in half the time, for the few processors without AVX2
        for source in PER_ISA:
            target = object_of(f"cpu/{source}_{isa}")
            yield (
                [*common, f"-DFEWBIT_NAMESPACE={isa}", *flags],
                CSRC / f"cpu/{source}.cpp",
                target,
            )


def cuda_jobs(nvcc, architectures, ptx):
    """Yield (command, source, object file) for each CUDA source.

    Args:
        nvcc: The command of nvcc, a list.
        architectures: The compute capabilities to build machine code for, times 10.
        ptx: The compute capability to build PTX for, times 10.
    """
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    gencode.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    flags = ["-std=c++17", "-O3", "--fmad=false", "--threads=2", "-Xptxas=-warn-spills"]
    host = ["-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off", f"-I{CSRC}"]
    command = [*nvcc, *flags, *compression(nvcc[0]), *host, *gencode]
    for source in sorted((CSRC / "cuda").glob("*.cu")):
        yield command, source, object_of(f"cuda/{source.stem}")


def compression(nvcc):
    """Return the option of nvcc that makes the kernels smallest. Drivers for CUDA 13 read them, older ones may not."""
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)", told)
    return ["--compress-mode=size"] if release and int(release[1]) >= 13 else []


def targets(architectures, ptx):
    """Return nvcc's names of the architectures to build for."""
    return [*(f"sm_{a}" for a in architectures), f"compute_{ptx}"]


def cuda_architectures(nvcc):
    """Return the compute capabilities to build machine code for, ascending, and the one to build PTX for, times 10.

    The environment variables at the top of this file select them. The PTX is for the newest selected architecture, so
    that newer GPUs can run it. If none is selected, it is for the oldest supported one, so that all supported GPUs can.
    """
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", listed.stdout)}
    supported = known & set(CUDA_ARCHITECTURES)
    asked = os.environ.get("FEWBIT_CUDA_ARCHITECTURES")
    if asked is not None:
        words = re.split(r"[\s,;]+", asked.strip())
        chosen = supported if words == ["all"] else {int(word) for word in words if word.isdigit()}
        if not chosen or chosen - known or (len(chosen) < len(set(words)) and words != ["all"]):
            raise CompileError(
                f"FEWBIT_CUDA_ARCHITECTURES: expected all, or numbers that nvcc knows ({sorted(known)}), got {asked!r}"
            )
    elif choice("FEWBIT_CUDA") == "1":
        chosen = supported
    else:
        # For a GPU that nvcc does not know, build for the newest older architecture, whose PTX the GPU can run.
        serving = [[a for a in known if min(supported) <= a <= gpu] for gpu in present_gpus()]
        chosen = {max(each) for each in serving if each}
    return sorted(chosen), max(chosen) if chosen else min(supported)


def object_of(name):
    # Not in setuptools' build_temp, which is a new directory each time for an editable installation.
    platform_name = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    return Path("build", f"kernels-{platform_name}", f"{name}.o")


def compile_all(jobs, what):
    """Compile all objects that are not up to date, and show the progress.

    Args:
        jobs: A (command, source, object file) for each object.
        what: The devices for which kernels are built, for the progress line.
    """
    stale = [job for job in map(Compilation._make, jobs) if not job.up_to_date()]
    stale.sort(key=lambda job: job.source.stem not in SLOWEST)  # so that no core waits at the end
    line = MovingLine(f"fewbit's kernels for {what}")
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        running = [pool.submit(job.run) for job in stale]
        for done, future in enumerate(as_completed(running), 1):
            line.show(f"compiled {done} of {len(stale)}, {future.result()}")
    finally:
        pool.shutdown(cancel_futures=True)
        line.end()


class MovingLine:
    """A progress line. On a terminal it is rewritten in place; elsewhere each update is a new line."""

    def __init__(self, what):
        self.what, self.moves = what, sys.stdout.isatty()
        self.show("looking for what changed")

    def show(self, how_far):
        text = f"{self.what}: {how_far}"
        if self.moves:
            text = "\r\033[K" + text[: shutil.get_terminal_size().columns - 1]
        print(text, end="" if self.moves else "\n", flush=True)

    def end(self):
        if self.moves:
            print(flush=True)


class Compilation(NamedTuple):
    """The compilation of `source` to the object file `target`. `command` is the compiler with its options."""

    command: list
    source: Path
    target: Path

    @property
    def dependencies(self):
        return self.target.with_suffix(".d")

    @property
    def stamp(self):
        """The file that stores the command by which the target was compiled."""
        return self.target.with_suffix(".command")

    def line(self):
        paths = [
            "-MD",
            "-MF",
            str(self.dependencies),
            "-c",
            str(self.source),
            "-o",
            str(self.target),
        ]
        return [*self.command, *paths]

    def run(self):
        """Compile the source, and return the target's name without its ending."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.unlink(missing_ok=True)
        run(self.line())
        self.stamp.write_text(shlex.join(self.line()))
        return self.target.stem

    def up_to_date(self):
        """Return whether the target was compiled by the same command, after the last change of source and includes."""
        if not all(path.exists() for path in (self.target, self.dependencies, self.stamp)):
            return False
        if self.stamp.read_text() != shlex.join(self.line()):
            return False
        rule = self.dependencies.read_text().replace("\\\n", " ").split(":", 1)[1]
        made = self.target.stat().st_mtime
        return all(os.path.exists(p) and os.path.getmtime(p) <= made for p in shlex.split(rule))


def run(command):
    """Run a compiler. Its output is printed when it ends, since several compilers run at the same time."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        print(f"\n{shlex.join(command)}\n{done.stdout}", end="", flush=True)
    if done.returncode:
        raise CompileError(
            f"command failed with exit status {done.returncode}: {shlex.join(command)}"
        )


setup(
    packages=[*find_packages(include=["fewbit", "fewbit.*"]), "fewbit.tables"],
    package_dir={"fewbit": "fewbit", "fewbit.tables": "tables"},
    package_data={
        "fewbit": ["py.typed", "*.pyi"],
        "fewbit.schema": ["*.json"],
        "fewbit.tables": ["*.json"],
    },
    ext_modules=[
        Extension(KERNELS, ["csrc/bindings/module.cpp"], language="c++", py_limited_api=IS_LIMITED)
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_LIMITED else {},
)
