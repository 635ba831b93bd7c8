"""Where the packages lie, and how the compiled kernels are built.

The kernels (csrc/) become the extension module fewbit._kernels, which needs no torch to build or import.
Environment variables:

FEWBIT_KERNELS             auto (default): build them if there is a C++ compiler; 1: fail if there is none;
                           0: do not build them, which leaves the slower reference backend
FEWBIT_CUDA                auto (default): with CUDA if nvcc is found (PATH, CUDA_HOME); 1: fail if it is not;
                           0: without
FEWBIT_CUDA_ARCHITECTURES  compute capabilities to build for, such as "80 90", instead of all
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CSRC = Path("csrc")
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    # Only what changes no result: kernels have to agree with other backends to the last bit.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
]
# Each of PER_ISA in csrc/cpu is compiled once for each, with the flags in csrc/cpu/<name>.flags;
# csrc/cpu/dispatch.cpp asks the processor which of them it can run.
X86_ISAS = ("avx512", "avx2", "baseline")
PER_ISA = ("kernels", "quantise", "fixed_point")
CUDA_ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


class BuildKernels(build_ext):
    """Compiles the kernels, each source with its own flags, and only those that changed."""

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
            self.left_out, self.extensions = self.extensions, []
            self.remove_left_out()
        super().build_extensions()

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        self.remove_left_out()

    left_out = ()

    def remove_left_out(self):
        """No kernels of an earlier build either: they would be packed, or imported from the source tree."""
        for extension in self.left_out:
            Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)

    def build_extension(self, extension):
        try:
            import pybind11
        except ImportError:
            raise CompileError(
                "building fewbit's kernels needs the package pybind11 (pip install pybind11), "
                "or FEWBIT_KERNELS=0 for the slower reference backend"
            ) from None

        includes = [
            f"-I{path}" for path in (CSRC, pybind11.get_include(), sysconfig.get_path("include"))
        ]
        nvcc = find_nvcc()
        jobs = [*cpu_jobs(self.compiler.compiler_so_cxx, includes, with_cuda=bool(nvcc))]
        if nvcc:
            jobs += cuda_jobs(nvcc)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: compile_one(*job), jobs))
        self.link(objects, nvcc, Path(self.get_ext_fullpath(extension.name)))

    def missing_tool(self):
        """What keeps the kernels from being compiled here; None if nothing does."""
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
            # nvcc knows where its static runtime is; hidden, so that torch's own cannot take its place.
            hide = ["-Xlinker", "--exclude-libs=ALL"]
            run([nvcc, "-shared", "--cudart=static", *hide, *objects, "-o", str(target), "-ldl"])
        else:
            self.compiler.link_shared_object(objects, str(target), target_lang="c++")


def choice(variable):
    value = os.environ.get(variable, "auto")
    if value not in ("auto", "0", "1"):
        raise CompileError(f"{variable}: expected auto, 0 or 1, got {value!r}")
    return value


def find_nvcc():
    """The path of nvcc, None where CUDA is not wanted or not there."""
    mode = choice("FEWBIT_CUDA")
    if mode == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = (home and shutil.which("nvcc", path=str(Path(home, "bin")))) or shutil.which("nvcc")
    if mode == "1" and not nvcc:
        raise CompileError("FEWBIT_CUDA=1, but nvcc was found neither on PATH nor in CUDA_HOME")
    return nvcc


def cpu_jobs(compiler, includes, with_cuda):
    """(command, source, object) for each host source, PER_ISA once per instruction set."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    command = [*compiler, *COMMON_FLAGS, *includes, *(["-DFEWBIT_HAVE_X86"] if x86 else [])]
    for isa in X86_ISAS if x86 else ("baseline",):
        flags = (CSRC / "cpu" / f"{isa}.flags").read_text().split()
        for source in PER_ISA:
            target = object_of(f"cpu/{source}_{isa}")
            yield (
                [*command, f"-DFEWBIT_NAMESPACE={isa}", *flags],
                CSRC / f"cpu/{source}.cpp",
                target,
            )
    if with_cuda:
        command = [*command, "-DFEWBIT_WITH_CUDA"]
    sources = (
        "bindings.cpp",
        "common/table.cpp",
        "cpu/allocation.cpp",
        "cpu/dispatch.cpp",
        "cpu/memory.cpp",
        "cpu/parallel.cpp",
        "cpu/quantiser.cpp",
    )
    for source in sources:
        yield command, CSRC / source, object_of(source)


def cuda_jobs(nvcc):
    """(command, source, object) for each CUDA source."""
    architectures = cuda_architectures(nvcc)
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    newest = architectures[-1]
    gencode.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    flags = ["-std=c++17", "-O3", "--fmad=false", "--threads=2", "-Xptxas=-warn-spills"]
    host = ["-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off", f"-I{CSRC}"]
    command = [nvcc, *flags, *host, *gencode]
    for source in sorted((CSRC / "cuda").glob("*.cu")):
        yield command, source, object_of(f"cuda/{source.stem}")


def cuda_architectures(nvcc):
    """The compute capabilities to build for, ascending: those asked for, or all that nvcc knows."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", listed.stdout)}
    asked = re.findall(r"\d+", os.environ.get("FEWBIT_CUDA_ARCHITECTURES", ""))
    unknown = sorted(set(map(int, asked)) - known)
    if unknown:
        raise CompileError(
            f"FEWBIT_CUDA_ARCHITECTURES: expected numbers that nvcc knows ({sorted(known)}), got {unknown}"
        )
    return sorted(set(map(int, asked)) or known & set(CUDA_ARCHITECTURES))


def object_of(name):
    # Not in build_temp, which is a new directory each time for an editable installation.
    platform_name = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    return Path("build", f"kernels-{platform_name}", f"{name}.o")


def compile_one(command, source, target):
    """Compile source to target unless it is up to date; returns target."""
    dependencies, stamp = target.with_suffix(".d"), target.with_suffix(".command")
    command = [*command, "-MD", "-MF", str(dependencies), "-c", str(source), "-o", str(target)]
    line = shlex.join(command)
    if not up_to_date(target, dependencies, stamp, line):
        target.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        run(command)
        stamp.write_text(line)
    return str(target)


def up_to_date(target, dependencies, stamp, line):
    """Whether target was made by this very command, after the last change of anything it includes."""
    if not (target.exists() and dependencies.exists() and stamp.exists()):
        return False
    if stamp.read_text() != line:
        return False
    rule = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1]
    made = target.stat().st_mtime
    return all(os.path.exists(p) and os.path.getmtime(p) <= made for p in shlex.split(rule))


def run(command):
    print(shlex.join(command), flush=True)
    status = subprocess.run(command).returncode
    if status:
        raise CompileError(f"command failed with exit status {status}: {shlex.join(command)}")


setup(
    packages=[*find_packages(include=["fewbit", "fewbit.*"]), "fewbit.tables"],
    package_dir={"fewbit": "fewbit", "fewbit.tables": "tables"},
    package_data={"fewbit.schema": ["*.json"], "fewbit.tables": ["*.json"]},
    ext_modules=[Extension("fewbit._kernels", ["csrc/bindings.cpp"], language="c++")],
    cmdclass={"build_ext": BuildKernels},
)
