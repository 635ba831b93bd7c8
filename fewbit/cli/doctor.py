"""The command `doctor`, which shows what the installation consists of."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import warnings
from dataclasses import dataclass

from fewbit.cli.application import app
from fewbit.cli.options import json_option
from fewbit.cli.output import print_result
from fewbit.printable import one_line
from fewbit.render.result import Result
from fewbit.render.view import Column, View

_WITHOUT = "without it, fewbit only solves tables"
OLDEST_DRIVER = 13000
"""The oldest CUDA driver, as it numbers itself, for fewbit's kernels."""


@dataclass(frozen=True, repr=False)
class Installation(Result):
    """The parts of an installation of fewbit.

    Attributes:
        parts: (part, what was found, what to do if something is missing or else "") for each part.
    """

    parts: tuple[tuple[str, str, str], ...]

    def records(self) -> list[dict]:
        return [dict(zip(("part", "found", "advice"), part, strict=True)) for part in self.parts]

    def view(self) -> View:
        columns = (
            Column("part", lambda row: row["part"], "word"),
            Column("found", lambda row: row["found"], "text"),
        )
        notes = [f"{part}: {advice}" for part, _, advice in self.parts if advice]
        return View(
            "fewbit's installation", columns, self.records(), notes or ["nothing is missing"]
        )


@app.command()
@json_option
def doctor(as_json):
    """Show what the installation consists of, and what to do about what is missing.

    The first run on a machine takes seconds, because it compiles a small network to check that fewbit.compile works with the
    installed torch.

    \b
    Examples:
      fewbit doctor
    """
    print_result(Installation(tuple(_parts())), as_json)


def _parts():
    import fewbit

    system = f"{platform.system()} on {platform.machine()}"
    yield "fewbit", f"{fewbit.__version__}, Python {platform.python_version()}, {system}", ""
    try:
        import torch

        from fewbit.runtime import backends  # noqa: F401, refuses versions of torch that are too old
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        yield "torch", "not installed", f"pip install torch: {_WITHOUT}"
        return
    except (ImportError, OSError) as error:
        yield "torch", one_line(error), f"install a version of torch that works: {_WITHOUT}"
        return
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    gpus, driver = _driver()
    is_missing = gpus and not torch.version.cuda
    yield (
        "torch",
        f"{torch.__version__}, {built}",
        "this machine has an NVIDIA GPU, so install a build of torch with CUDA"
        if is_missing
        else "",
    )
    yield "CPU kernels", *_kernels(torch.device("cpu"))
    if gpus:
        yield "NVIDIA driver", f"for CUDA {driver // 1000}.{driver % 1000 // 10}", ""
    if gpus and torch.version.cuda and not torch.cuda.device_count():
        yield (
            "GPU",
            f"torch finds none, but the driver finds {gpus}",
            f"CUDA_VISIBLE_DEVICES may hide them, or the driver is too old for CUDA {torch.version.cuda}",
        )
    for number in range(torch.cuda.device_count()):
        yield f"GPU {number}", *_gpu(torch.device("cuda", number))
    yield "compilers", _compilers(has_gpu=gpus > 0), ""
    yield "fewbit.compile", *_compiles()


def _driver() -> tuple[int, int]:
    """Return the number of GPUs that the driver finds, and the newest CUDA that it supports, such as 13000."""
    count, version = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0, 0
    driver.cuDriverGetVersion(ctypes.byref(version))
    return count.value, version.value


def _compilers(has_gpu: bool) -> str:
    command = shlex.split(os.environ.get("CXX") or "c++")[-1]
    found = command if _has_compiler("c++") else "no C++ compiler"
    if not has_gpu:
        return found
    return f"{found}, {'nvcc' if shutil.which('nvcc') else 'no nvcc (pip gets it for a build)'}"


def _gpu(device) -> tuple[str, str]:
    import torch

    try:
        major, minor = torch.cuda.get_device_capability(device)
        found, advice = _kernels(device)
        found = "compiled kernels" if found == "cuda" else found
        return f"{torch.cuda.get_device_name(device)} ({major}.{minor}): {found}", advice
    except RuntimeError as error:  # the driver is too old for torch
        return (
            f"torch cannot use it: {one_line(error)}",
            "update NVIDIA's driver, or install a torch for an older CUDA",
        )


def _kernels(device) -> tuple[str, str]:
    from fewbit.runtime import backends

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = backends.on[device].name
    if name != "reference":
        return name, ""
    reason = f" ({str(caught[0].message).partition(': ')[2]})" if caught else ""
    return f"no kernels{reason}, so fewbit computes in plain torch, which is slow", _remedy(device)


def _remedy(device) -> str:
    import torch

    again = "install fewbit again"
    if device.type == "cuda" and torch._C._cuda_getDriverVersion() < OLDEST_DRIVER:
        update = "update NVIDIA's driver to 580 or newer, for CUDA 13"
        return update if _has_cuda_kernels() else f"{update}, and {again}"
    if not _has_compiler("c++"):
        return f"install a C++ compiler, such as g++, and {again}"
    if device.type == "cpu":
        return f"{again}; the output of `pip install -v` says why no kernels were compiled"
    return f"{again} on this machine, with `pip install --no-cache-dir`: the build gets NVIDIA's compiler by itself"


def _has_cuda_kernels() -> bool:
    try:
        from fewbit import _kernels
    except ImportError:
        return False
    return _kernels.cuda is not None


def _has_compiler(usual: str) -> bool:
    command = shlex.split(os.environ.get("CXX") or usual)
    return shutil.which(command[0]) is not None


def _compiles() -> tuple[str, str]:
    import torch

    from fewbit.compiler import self_check

    if torch._dynamo.config.disable:
        return "torch.compile is disabled", "unset TORCH_COMPILE_DISABLE"
    failure = self_check.failure()
    if failure is not None:
        return (
            f"does not work with torch {torch.__version__}: {failure}",
            "install another version of torch",
        )
    if not (_has_compiler("g++") or _has_compiler("clang++") or torch.cuda.is_available()):
        return (
            'works with backend="aot_eager" only',
            "install a C++ compiler, which Inductor needs for code on the CPU",
        )
    return f"works with torch {torch.__version__}", ""
