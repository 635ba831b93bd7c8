"""The CUDA kernels on a machine without a GPU: csrc/tests/cuda_emulation runs their sources on the CPU.

The emulation runs the threads of a block one after the other, warp by warp. It stands behind the bindings and `native.py`, so
that tests call the methods of a backend.
"""

import ctypes
import importlib.util
import mmap
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import filelock
import pytest
import torch

import fewbit
from fewbit.config import UNIFORM

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which((sysconfig.get_config_var("CXX") or "c++").split()[0])
FLAGS = "-std=c++17 -O1 -fPIC -w -ffp-contract=off -fno-strict-aliasing -fvisibility=hidden -U_FORTIFY_SOURCE"
"""-U_FORTIFY_SOURCE is needed because _longjmp with checks refuses to jump to another stack."""
OF_MODULE = (  # sources besides those of kernels
    *("common/table.cpp", "cpu/allocation.cpp", "cpu/parallel.cpp"),
    *("bindings/cuda.cpp", "bindings/entry.cpp", "bindings/module.cpp"),
    *("bindings/python.cpp", "bindings/tensors.cpp", "bindings/torch_shim.cpp"),
    "tests/cuda_emulation.cpp",
)
DEVICE = 1  # of the two devices that the emulation has
GUARD = 64  # bytes on both sides of a tensor that must not change
LARGE = 1 << 24  # elements from which a tensor has no guards, which would touch its memory
SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)

needs_compiler = [
    pytest.mark.slow,  # compiles for tens of seconds
    pytest.mark.skipif(
        COMPILER is None or not CSRC.exists(),
        reason="needs a C++ compiler and the sources",
    ),
]
"""The marks of files whose tests use the emulation."""
without_pairs = pytest.mark.parametrize("cuda", ["pairs", "no pairs"], indirect=True)
"""Run a test also without the instructions on pairs of 16-bit floats, which GPUs of compute capability 7.5 lack."""


class GuardedMemory:
    """A stand-in for torch in `native.py`: watches the memory around the tensors that kernels write."""

    def __init__(self):
        self.guards = []

    def empty(self, *shape, dtype, device=None, offset=0):
        """Return a new tensor; `offset` elements off alignment."""
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel() >= LARGE:
            return tensor
        first = GUARD + offset * tensor.itemsize
        end = first + tensor.nbytes
        memory = torch.full((end + GUARD,), 0xA5, dtype=torch.uint8)
        assert memory.data_ptr() % 16 == 0
        self.guards += [memory[:first], memory[end:]]
        return memory[first:end].view(dtype).view(shape)

    def empty_like(self, tensor):
        return self.empty(*tensor.shape, dtype=tensor.dtype)

    def __getattr__(self, name):
        return getattr(torch, name)

    def check(self):
        """Assert that nothing was written outside of the tensors that were made since the last call."""
        assert all((guard == 0xA5).all() for guard in self.guards)
        self.guards.clear()


class Emulation:
    """The emulated device. kernels: its backend, with the methods of `reference`."""

    def __init__(self, library: Path):
        self.native = _native_with(library)
        self.native.torch = self.memory = GuardedMemory()
        self.empty = self.memory.empty
        self.kernels = self.native.cuda()
        self.library = ctypes.CDLL(str(library))
        self.library.emulated_device(4, 0, 0)

    @contextmanager
    def device_of(self, multiprocessors, first_block=0, is_reversed=False):
        """Make it a device of that many multiprocessors, which runs the blocks of a grid from the first one on.

        The lanes of warps run in the usual order, with copies to shared memory that are late; or, if `is_reversed`, in reverse
        order, with early copies.
        """
        self.library.emulated_device(multiprocessors, first_block, is_reversed)
        try:
            yield
        finally:
            self.library.emulated_device(4, 0, 0)

    def squares_of_groups(self, x, group_size, normalize=None):
        """Return the numbers of each group of a uniform copy, which `squares` adds up for each sample."""
        copy = self.native._copy(x.shape, 1, group_size, UNIFORM)
        out = self.empty(copy.samples * copy.groups, dtype=torch.float32)
        self.native._kernels.cuda.squares(x, copy.shape, out, *(normalize or ()))
        return out


def _native_with(library):
    """Return a second instance of the module `native`, which has the kernels of an extension module."""
    spec = importlib.util.spec_from_file_location(f"{library.stem}._kernels", library)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    path = Path(fewbit.__file__).parent / "runtime" / "backends" / "native.py"
    spec = importlib.util.spec_from_file_location("emulated_native", path)
    native = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fewbit._kernels", kernels)
        patch.setattr(fewbit, "_kernels", kernels, raising=False)
        patch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", _exchange_on_device(library))
        spec.loader.exec_module(native)
    return native


def _exchange_on_device(library):
    """Return DLPack's functions of torch, changed so that tensors are on the emulated device."""
    name, of_capsules = b"dlpack_exchange_api", ctypes.pythonapi
    of_capsules.PyCapsule_GetPointer.restype = ctypes.c_void_p
    of_capsules.PyCapsule_GetPointer.argtypes = ctypes.py_object, ctypes.c_char_p
    of_capsules.PyCapsule_New.restype = ctypes.py_object
    of_capsules.PyCapsule_New.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    emulated = ctypes.CDLL(str(library)).emulated_exchange
    emulated.restype, emulated.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int)
    exchange = of_capsules.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, name)
    return of_capsules.PyCapsule_New(emulated(exchange, DEVICE), name, None)


@lru_cache
def emulation_in(folder: Path, has_pairs: bool) -> Emulation:
    """Return the emulation, which the first process that calls this function for a folder compiles there.

    Only the kernels are compiled anew for GPUs without instructions on pairs.

    Args:
        folder: a folder that the processes of a test run share.
        has_pairs: whether there are instructions on pairs of 16-bit floats.
    """
    folder = folder / "emulation"
    folder.mkdir(exist_ok=True)
    library = folder / f"emulation{int(has_pairs)}.so"
    includes = CSRC, CSRC / "tests" / "cuda_emulation"
    flags = [f"-I{path}" for path in (*includes, sysconfig.get_path("include"))]
    flags += ["-DFEWBIT_WITH_CUDA", *FLAGS.split()]

    def compile_one(source):
        target, own_flags = folder / f"{source.name}.o", []
        if source.suffix == ".cu":
            target = folder / f"{source.stem}{int(has_pairs)}.o"
            own_flags = [f"-DFEWBIT_PAIR_INSTRUCTIONS={int(has_pairs)}"]
        if not target.exists():
            command = [
                COMPILER,
                *flags,
                *own_flags,
                "-x",
                "c++",
                "-c",
                str(source),
                "-o",
                str(target),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        return str(target)

    with filelock.FileLock(folder / "lock"):
        if not library.exists():
            sources = *sorted(CSRC.glob("cuda/*.cu")), *(CSRC / name for name in OF_MODULE)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, sources))
            linked = library.with_suffix(".linked")
            subprocess.run([COMPILER, "-shared", *objects, "-o", str(linked), "-ldl"], check=True)
            linked.rename(library)
    return Emulation(library)


def sparse(*arrays):
    """Return a tensor of zeros for each (size, dtype), in memory that exists only where it is touched."""
    sizes = [size * dtype.itemsize for size, dtype in arrays]
    try:
        spaces = [mmap.mmap(-1, size, flags=SPARSE) for size in sizes]
    except OSError:
        pytest.skip(f"no address space for {sum(sizes) >> 30} GiB")
    return [
        torch.frombuffer(space, dtype=dtype)
        for space, (_, dtype) in zip(spaces, arrays, strict=True)
    ]
