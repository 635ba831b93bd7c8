"""The kernels of csrc/cuda, compiled for the CPU by csrc/tests/cuda_emulation: an interface on flat torch tensors.

The emulation runs the threads of a block one after the other, warp by warp.
"""

import ctypes
import mmap
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch

from fewbit.catalog.unbiased_codes import packed_codes
from fewbit.config import MASKED, MASKED_UNBIASED, ROTATED, UNBIASED, UNIFORM
from fewbit.runtime.format import groups
from fewbit.runtime.format.bit_sharing import gains_of
from fewbit.runtime.format.encoding import Draw, packed_words

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which((sysconfig.get_config_var("CXX") or "c++").split()[0])
FLAGS = "-std=c++17 -O1 -fPIC -w -ffp-contract=off -fno-strict-aliasing -U_FORTIFY_SOURCE"
"""-U_FORTIFY_SOURCE is needed because _longjmp with checks refuses to jump to another stack."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # by number
KINDS = (UNIFORM, ROTATED, MASKED, UNBIASED, MASKED_UNBIASED)  # by number
SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
PER_ISA = "kernels", "quantize", "rotated", "fixed_point"  # sources in csrc/cpu, as in setup.py
GUARD = 64  # bytes on both sides of an array that must not change

needs_compiler = [
    pytest.mark.slow,  # compiles for tens of seconds
    pytest.mark.skipif(
        COMPILER is None or not CSRC.exists(), reason="needs a C++ compiler and the sources"
    ),
]
"""The marks of files whose tests use the emulation."""


@lru_cache
def emulation_in(folder: Path, has_pairs: bool) -> "Emulation":
    """Return the emulation, which the first process that calls this function for a folder compiles there.

    Args:
        folder: a folder that the processes of a test run share.
        has_pairs: whether there are instructions on pairs of 16-bit floats, which GPUs of compute capability 7.5 lack.
    """
    library = _library(folder, has_pairs)
    emulation = Emulation(ctypes.CDLL(str(library)))
    emulation.library.emulated_device(4, 0)
    return emulation


def extension_in(folder: Path) -> Path:
    """Return the path of an extension module `fewbit._kernels` that has the emulation in place of the CUDA kernels.

    Args:
        folder: a folder that the processes of a test run share.
    """
    import pybind11

    emulated = _library(folder, has_pairs=True).parent
    library = emulated / "extension.so"
    with filelock.FileLock(emulated / "extension.lock"):
        if not library.exists():
            includes = pybind11.get_include(), sysconfig.get_path("include")
            flags = "-DFEWBIT_WITH_CUDA", *(f"-I{path}" for path in includes)
            by_isa = [CSRC / "cpu" / f"{name}.cpp" for name in PER_ISA]
            once = [*CSRC.glob("bindings/*.cpp"), *{*CSRC.glob("cpu/*.cpp")}.difference(by_isa)]
            made = _compile(emulated / "once", flags, once)
            made += _compile(emulated / "by_isa", ["-DFEWBIT_NAMESPACE=baseline"], by_isa)
            _link(library, made + [str(path) for path in emulated.glob("*.o")])
    return library


def _library(folder, has_pairs):
    folder = folder / f"emulation{int(has_pairs)}"
    folder.mkdir(exist_ok=True)
    library = folder / "emulation.so"
    with filelock.FileLock(folder / "lock"):
        if not library.exists():
            includes = f"-I{CSRC / 'tests' / 'cuda_emulation'}"
            flags = f"-DFEWBIT_PAIR_INSTRUCTIONS={int(has_pairs)}", includes
            others = CSRC / "common" / "table.cpp", CSRC / "tests" / "cuda_emulation.cpp"
            _link(library, _compile(folder, flags, [*sorted(CSRC.glob("cuda/*.cu")), *others]))
    return library


def _compile(folder, flags, sources) -> list[str]:
    """Compile sources with FLAGS and the given flags into a folder. Return the paths of the object files."""
    folder.mkdir(exist_ok=True)
    flags = f"-I{CSRC}", *flags, *FLAGS.split()

    def compile_one(source):
        target = folder / f"{source.stem}.{source.suffix[1:]}.o"
        command = [COMPILER, *flags, "-x", "c++", "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def _link(library, objects):
    linked = library.with_suffix(".linked")
    subprocess.run([COMPILER, "-shared", *objects, "-o", str(linked), "-ldl"], check=True)
    linked.rename(library)


@contextmanager
def device_of(emulation, multiprocessors, first_block=0):
    """A device of that many multiprocessors, which runs the blocks of a grid from the first one on."""
    emulation.library.emulated_device(multiprocessors, first_block)
    try:
        yield
    finally:
        emulation.library.emulated_device(4, 0)


@contextmanager
def in_order(emulation, is_reversed):
    """Run the lanes of warps in the usual order, with copies to shared memory that are late, or in reverse, with early copies."""
    emulation.library.emulated_order(is_reversed)
    try:
        yield
    finally:
        emulation.library.emulated_order(0)


class Emulation:
    """The kernels' entry points on NumPy arrays; arrays and results are flat torch tensors."""

    def __init__(self, library):
        self.library = library
        names = (
            "pack unpack encode decode_mul forward quantize squares share_bits order_samples "
            "relu_quantized batch_norm_backward dequantize obstacle "
            "grid_fixed encode_fixed decode_fixed mask_fixed"
        )
        for name in names.split():
            getattr(library, f"emulated_{name}").restype = ctypes.c_char_p
        library.emulated_table.restype = ctypes.c_void_p
        self.tables = {}

    def call(self, name, *arguments):
        converted = [
            ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, torch.Tensor) else argument
            for argument in arguments
        ]
        error = getattr(self.library, f"emulated_{name}")(*converted)
        if error:
            raise RuntimeError(error.decode())
        assert self.library.emulated_current_device() == 0  # it was 1 during the call

    def table(self, encoding):
        if encoding.text not in self.tables:
            e, draw = encoding, encoding.draw or Draw(*[()] * 6)
            self.tables[e.text] = ctypes.c_void_p(
                self.library.emulated_table(
                    e.bits,
                    e.initial,
                    *array_of(e.breaks32, np.float32, count=True),
                    *array_of(e.flips, np.uint8),
                    *array_of(e.breaks64, np.float64, count=True),
                    *array_of(e.flips, np.uint8),
                    *array_of(e.lut32, np.float32),
                    *array_of(e.lut64, np.float64),
                    *array_of(draw.points, np.float32, count=True),
                    *array_of(draw.origins, np.float32),
                    *array_of(draw.values, np.float32),
                    *array_of(draw.slopes, np.float32),
                    *array_of(draw.levels, np.float32, count=True),
                    *array_of(draw.inverse_gaps, np.float32),
                )
            )
        return self.tables[encoding.text]

    def pack(self, codes, bits):
        packed = Guarded(packed_words(codes.numel(), bits), torch.int32)
        self.call("pack", codes, int64(codes.numel()), bits, packed.data)
        return packed.checked()

    def unpack(self, packed, bits, n, offset=0):
        codes = Guarded(n, torch.uint8, offset)
        self.call("unpack", packed, int64(n), bits, codes.data)
        return codes.checked()

    def encode(self, x, encoding, seed=None):
        packed = Guarded(packed_words(x.numel(), encoding.bits), torch.int32)
        number = DTYPES.index(x.dtype)
        self.call(
            "encode", self.table(encoding), x, number, int64(x.numel()), packed.data, or_null(seed)
        )
        return packed.checked()

    def decode_mul(self, grad, packed, encoding, n=None, offset=0):
        scalar, n = n is not None, grad.numel() if n is None else n
        out = Guarded(n, grad.dtype, offset)
        number = DTYPES.index(grad.dtype)
        self.call(
            "decode_mul",
            self.table(encoding),
            grad,
            number,
            int64(n),
            packed,
            out.data,
            int(scalar),
        )
        return out.checked()

    def forward(self, function, parameters, x, encoding, seed=None, in_place=False, offset=0):
        """y and packed."""
        p0, p1 = (ctypes.c_double(p) for p in (*parameters, 0.0, 0.0)[:2])
        n, number = x.numel(), DTYPES.index(x.dtype)
        y = Guarded(n, x.dtype, offset)
        packed = Guarded(packed_words(n, encoding.bits), torch.int32)
        if in_place:
            y.data.copy_(x)
            x = y.data
        table = self.table(encoding)
        self.call(
            "forward",
            function,
            p0,
            p1,
            table,
            x,
            number,
            int64(n),
            y.data,
            packed.data,
            or_null(seed),
        )
        return y.checked(), packed.checked()

    def quantize(
        self,
        x,
        seed,
        bits,
        group_size,
        fp32_min,
        widths=None,
        words=None,
        normalize=None,
        offset=0,
        kind=UNIFORM,
    ):
        """packed and ranges, of an x of (samples, features)."""
        samples, features = x.shape
        if widths is None:
            words = packed_words(x.numel(), bits)
            rows = groups.group_count(samples, features, group_size)
        else:
            rows = groups.most_groups(samples, features, group_size)
        columns, seed_rows = 3 if fp32_min else 2, groups.seed_rows(kind)
        packed = Guarded(words, torch.int32)
        ranges = Guarded((rows + seed_rows) * columns, torch.bfloat16, offset)
        kept, streams = streams_of(widths)
        self.call(
            "quantize",
            x,
            DTYPES.index(x.dtype),
            int64(samples),
            int64(features),
            group_size,
            bits,
            *streams,
            int(fp32_min),
            KINDS.index(kind),
            codes_of(kind),
            *seed_of(seed),
            packed.data,
            int64(words),
            ranges.data,
            int64(rows),
            *vectors_of(normalize),
        )
        return packed.checked(), ranges.checked().view(-1, columns)

    def relu_quantized(self, x, seed, bits, group_size, fp32_min, offset=0, in_place=False):
        """Return relu(x), its mask and its masked copy; None if the kernel does not fit."""
        (samples, features), columns = x.shape, 3 if fp32_min else 2
        words = packed_words(x.numel(), bits)
        rows = groups.group_count(samples, features, group_size)
        y, mask = (
            Guarded(x.numel(), x.dtype, offset),
            Guarded(packed_words(x.numel(), 1), torch.int32),
        )
        if in_place:
            y.data.copy_(x.reshape(-1))
        packed = Guarded(words, torch.int32)
        ranges = Guarded((rows + 2) * columns, torch.bfloat16)
        done = torch.empty(1, dtype=torch.int64)
        self.call(
            "relu_quantized",
            y.data if in_place else x,
            DTYPES.index(x.dtype),
            int64(samples),
            int64(features),
            group_size,
            bits,
            int(fp32_min),
            int64(seed),
            y.data,
            mask.data,
            packed.data,
            int64(words),
            ranges.data,
            int64(rows),
            done,
        )
        copy = packed.checked(), ranges.checked().view(-1, columns)
        return (y.checked().view(x.shape), mask.checked(), *copy) if done.item() else None

    def batch_norm_backward(
        self, packed, ranges, bits, grad, rstd, weight, needs_input=True, group_size=256, offset=0
    ):
        """Return the gradients of the input, the weight and the bias; None if the kernels do not fit."""
        (samples, features), channels = grad.shape, len(rstd)
        out = Guarded(grad.numel(), grad.dtype, offset)
        of_weight, of_bias = (Guarded(channels, torch.float32) for _ in range(2))
        done = torch.empty(1, dtype=torch.int64)
        self.call(
            "batch_norm_backward",
            packed,
            int64(len(packed)),
            ranges,
            int64(len(ranges) - groups.seed_rows(ROTATED)),
            bits,
            int(ranges.shape[1] == 3),
            int64(samples),
            int64(features),
            group_size,
            grad,
            DTYPES.index(grad.dtype),
            int64(channels),
            rstd,
            or_null(weight),
            out.data if needs_input else or_null(None),
            of_weight.data,
            of_bias.data,
            done,
        )
        found = [each.checked() for each in (out, of_weight, of_bias)]
        return (found[0].view(grad.shape), *found[1:]) if done.item() else None

    def share_bits(self, squares, total, kind):
        widths = Guarded(len(squares), torch.uint8)
        gains = torch.tensor(gains_of(kind), dtype=torch.float32)
        extra = total - len(squares)
        self.call("share_bits", gains, squares, int64(len(squares)), int64(extra), widths.data)
        return widths.checked()

    def order_samples(self, widths):
        """Return the samples by ascending width, and the number of samples of each width."""
        order, counts = Guarded(len(widths), torch.int64), Guarded(9, torch.int64)
        self.call("order_samples", widths, int64(len(widths)), order.data, counts.data)
        return order.checked(), counts.checked()

    def squares(self, x, group_size, normalize=None, offset=0, kind=UNIFORM):
        """Return the squares of each group of an x of shape (samples, features)."""
        samples, features = x.shape
        out = Guarded(groups.group_count(samples, features, group_size), torch.float32, offset)
        self.call(
            "squares",
            x,
            DTYPES.index(x.dtype),
            int64(samples),
            int64(features),
            group_size,
            KINDS.index(kind),
            out.data,
            *vectors_of(normalize),
        )
        return out.checked()

    def dequantize(
        self,
        packed,
        ranges,
        bits,
        group_size,
        shape,
        dtype,
        widths=None,
        affine=None,
        offset=0,
        kind=UNIFORM,
        mask=None,
    ):
        out = Guarded(shape[0] * shape[1], dtype, offset)
        kept, streams = streams_of(widths)
        self.call(
            "dequantize",
            packed,
            int64(len(packed)),
            ranges,
            int64(len(ranges) - groups.seed_rows(kind)),
            bits,
            *streams,
            int(ranges.shape[1] == 3),
            KINDS.index(kind),
            codes_of(kind),
            int64(shape[0]),
            int64(shape[1]),
            group_size,
            out.data,
            DTYPES.index(dtype),
            *vectors_of(affine),
            mask,
        )
        return out.checked().view(shape)

    def grid_fixed(self, gamma, beta, bits):
        grid = Guarded(7 * len(gamma), torch.float32)
        self.call("grid_fixed", gamma, beta, int64(len(gamma)), bits, grid.data)
        return grid.checked().view(7, -1)

    def encode_fixed(self, x, y, grid, bits, inner, normalize=None):
        packed = Guarded(packed_words(x.numel(), bits), torch.int32)
        of = int64(grid.shape[1]), int64(inner), bits
        self.call(
            "encode_fixed",
            x,
            y,
            DTYPES.index(x.dtype),
            int64(x.numel()),
            grid,
            *of,
            packed.data,
            *vectors_of(normalize),
        )
        return packed.checked()

    def decode_fixed(self, packed, grid, bits, inner, n, dtype, slope=None, scale=None, offset=0):
        out = Guarded(n, dtype, offset)
        of = int64(grid.shape[1]), int64(inner), bits
        activated, number = slope is not None, ctypes.c_float(slope or 0.0)
        self.call(
            "decode_fixed",
            packed,
            int64(n),
            grid,
            *of,
            int(activated),
            number,
            out.data,
            DTYPES.index(dtype),
            *(vectors_of(scale) if scale else (ctypes.c_void_p(0), int64(1), int64(1))),
        )
        return out.checked()

    def mask_fixed(self, grad, packed, grid, bits, inner, slope, offset=0):
        out, n = Guarded(grad.numel(), grad.dtype, offset), int64(grad.numel())
        of = int64(grid.shape[1]), int64(inner), bits, ctypes.c_double(slope)
        self.call("mask_fixed", grad, DTYPES.index(grad.dtype), n, packed, grid, *of, out.data)
        return out.checked()


class Guarded:
    """n elements to be written, the memory around them watched; `offset` elements off alignment."""

    def __init__(self, n, dtype, offset=0):
        size = torch.empty((), dtype=dtype).element_size()
        self.first = GUARD + offset * size
        self.end = self.first + n * size
        self.memory = torch.full((self.end + GUARD,), 0xA5, dtype=torch.uint8)
        assert self.memory.data_ptr() % 16 == 0
        self.data = self.memory[self.first : self.end].view(dtype)

    def checked(self):
        assert (self.memory[: self.first] == 0xA5).all()
        assert (self.memory[self.end :] == 0xA5).all()
        return self.data


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


def array_of(values, dtype, count=False):
    array = np.ascontiguousarray(values, dtype)
    pointer = array.ctypes.data_as(ctypes.c_void_p)  # keeps the array alive
    return ([int64(array.size)] if count else []) + [pointer]


def int64(n):
    return ctypes.c_int64(n)


def seed_of(seed):
    """Return the address and the number of a seed, which is an int or a tensor."""
    if isinstance(seed, int):
        return ctypes.c_void_p(0), int64(seed)
    return seed, int64(0)


def or_null(seed):
    return ctypes.c_void_p(0) if seed is None else seed


def vectors_of(given):
    *vectors, inner = given or (None, None, 1)
    lengths = [len(vector) for vector in vectors if vector is not None] or [1]
    return *map(or_null, vectors), int64(lengths[0]), int64(inner)


def codes_of(kind):
    """Return the codes of unbiased copies, or a null pointer."""
    return (
        torch.from_numpy(packed_codes()) if kind in (UNBIASED, MASKED_UNBIASED) else or_null(None)
    )


def streams_of(widths):
    """Return the arrays to keep alive, and order and counts, as fewbit.runtime.backends.native makes them."""
    return native_streams(widths) if widths is not None else (None, (or_null(None),) * 2)


def native_streams(widths):
    order = torch.argsort(widths, stable=True)
    counts = torch.bincount(widths, minlength=9)
    return None, (order, counts)
