"""setuptools' build backend. For a machine with an NVIDIA GPU it also asks pip for nvcc, if there is none.

NVIDIA publishes nvcc as packages of the index, which pip installs into the environment of the build only. The kernels that they
compile need a driver for CUDA 13, so machines with an older driver do not get them.
"""

import ctypes
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

NVCC = [
    f"{package}==13.0.*"
    for package in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
]
"""The packages that nvcc consists of."""
OLDEST_GPU, OLDEST_DRIVER = 75, 13000
"""The compute capability, times 10, and the version of CUDA of the driver that the kernels need."""


def get_requires_for_build_wheel(config_settings=None):
    """Return what setuptools needs to build a wheel, and nvcc if the machine lacks it."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *needed_nvcc()]


def get_requires_for_build_editable(config_settings=None):
    """Return what setuptools needs for an editable installation, and nvcc if the machine lacks it."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *needed_nvcc()]


def needed_nvcc():
    """Return the packages of nvcc if CUDA kernels are to be built here and there is no nvcc, else []."""
    mode = os.environ.get("FEWBIT_CUDA", "auto")
    is_unwanted = mode == "0" or os.environ.get("FEWBIT_KERNELS") == "0"
    has_packages = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    if is_unwanted or not has_packages or installed_nvcc():
        return []
    if mode == "1" or os.environ.get("FEWBIT_CUDA_ARCHITECTURES"):  # the GPUs may be elsewhere
        return NVCC
    has_compiler = any(
        shutil.which(name) for name in (*shlex.split(os.environ.get("CXX", "")), "c++", "g++")
    )
    is_served = max(present_gpus(), default=0) >= OLDEST_GPU and driver_version() >= OLDEST_DRIVER
    return NVCC if has_compiler and is_served else []


def installed_nvcc():
    """Return the path of nvcc: in CUDA_HOME, on PATH, or that of NVIDIA's packages; None if there is none."""
    home = os.environ.get("CUDA_HOME")
    found = (home and shutil.which("nvcc", path=str(Path(home, "bin")))) or shutil.which("nvcc")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        found = shutil.which("nvcc", path=str(Path(folder, "cu13", "bin")))
        if found:
            return found
    return None


def driver():
    """Return the library of NVIDIA's driver, initialized; None if there is none. torch may not be installed."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if library.cuInit(0) else library


def driver_version():
    """Return the newest version of CUDA that the driver supports, such as 13000 for 13.0; 0 without a driver."""
    library, version = driver(), ctypes.c_int()
    return (
        0 if library is None or library.cuDriverGetVersion(ctypes.byref(version)) else version.value
    )


def present_gpus():
    """Return the compute capabilities of this machine's GPUs, times 10."""
    library, count = driver(), ctypes.c_int()
    if library is None or library.cuDeviceGetCount(ctypes.byref(count)):
        return set()
    return {
        10 * _attribute(library, gpu, 75) + _attribute(library, gpu, 76)
        for gpu in range(count.value)
    }


def _attribute(library, gpu, number):
    """Return a device attribute by its number in cuda.h: 75 is the major compute capability, 76 the minor one."""
    value = ctypes.c_int()
    library.cuDeviceGetAttribute(ctypes.byref(value), number, gpu)
    return value.value
