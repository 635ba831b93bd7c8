"""The compiled CPU kernels: threads, memory, and what they refuse. Every instruction set that this machine has."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from samples import encoded, levels_of, load_table, normal, packed_of, same, scaled

from fewbit.runtime.format.encoding import Encoding, packed_words

kernels = pytest.importorskip("fewbit._kernels", reason="fewbit was installed without kernels")
from buffers import torch_threads  # noqa: E402

from fewbit.runtime.backends import native  # noqa: E402

ISAS = kernels.cpu_isas()
CANARY = 0xA5
GELU = load_table("gelu", 3)

isas = pytest.mark.parametrize("isa", ISAS)


def test_packed_words_beyond_32_bits():
    for n in (0, 1, 32, 33, 2**31, 2**33 + 1, 2**40 + 31, 10**12):
        for bits in range(1, 9):
            assert kernels.packed_words(n, bits) == bits * -(-n // 32) == packed_words(n, bits)


# -- Threads -------------------------------------------------------------------------------------------


@isas
@pytest.mark.parametrize("n", [65536 + 1, 5 * 32768 - 31])
def test_threads_give_the_same(isa, n):
    x, cpu, encoding = normal((n,)), native.cpu(isa), Encoding.of(GELU)
    drawn, seed = load_table("gelu", 2, objective="unbiased"), torch.tensor([11])
    codes = torch.arange(n).mul(7).to(torch.uint8) % 8
    product = scaled(GELU, levels_of(GELU, x), x)
    expected = (
        encoded(GELU, x).tolist(),
        encoded(drawn, x, 11).tolist(),
        packed_of(codes, 3).tolist(),
    )
    for threads in (1, 2, 3, 7):
        with torch_threads(threads):
            packed, repacked = cpu.encode(x, encoding, None), cpu.pack(codes, 3)
            found = packed, cpu.encode(x, Encoding.of(drawn), seed), repacked
            assert tuple(words.tolist() for words in found) == expected
            assert torch.equal(cpu.unpack(repacked, 3, n), codes)
            out, y = torch.empty_like(x), x.clone()
            cpu.decode_mul(x, packed, encoding, out)
            assert same(out, product)
            assert torch.equal(cpu.forward(y, "relu", (), encoding, None, y), packed)
            assert torch.equal(y, x.relu())


def aligned(n, dtype, offset):
    """Return bytes, and n elements among them whose address is `offset` elements behind a multiple of 64."""
    memory = torch.full((n * dtype.itemsize + 128,), CANARY, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset * dtype.itemsize
    end = start + n * dtype.itemsize
    return memory[end:], memory[start:end].view(dtype)


@pytest.mark.fast(2)
@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_past_the_caches(isa, dtype):
    """Large aligned results are written past the caches: the same numbers, and nothing beyond them."""
    n, last = (24 << 20) // dtype.itemsize + 256 + 77, 100_003
    x, cpu, encoding = (
        normal((last,), dtype).repeat(n // last + 1)[:n],
        native.cpu(isa),
        Encoding.of(GELU),
    )
    results = []
    for offset in (0, 1):  # past the caches, and through them
        beyond, out = aligned(n, dtype, offset)
        packed = cpu.forward(x, "silu", (), encoding, None, out)
        y = out.clone()
        cpu.decode_mul(x, packed, encoding, out)
        assert (beyond == CANARY).all()
        results.append((y, out.clone(), packed))
    for past, through in zip(*results, strict=True):
        assert torch.equal(past.view(torch.uint8), through.view(torch.uint8))
    end = x[-last:]
    assert same(results[0][1][-last:], scaled(GELU, levels_of(GELU, end), end))


SCRIPT = """
import ctypes, os, sys
import numpy as np
from fewbit import _kernels as kernels

codes = np.arange(1 << 18, dtype=np.uint8) & 7
kernel = kernels.Cpu(kernels.cpu_isas()[0])

used = 1
@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_uint32))
def number_of_threads(written):
    written[0] = used
    return 0

# Functions of DLPack, version 1, that are never called, because the buffers are no tensors.
functions = (ctypes.c_uint64 * 7)(1, 0, 1, 1, 1, 1, 1)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
exchange = new_capsule(ctypes.addressof(functions), b"dlpack_exchange_api", None)
kernels.use_torch(np.ndarray, exchange, ctypes.cast(number_of_threads, ctypes.c_void_p).value)

def pack(threads):
    global used
    used = threads
    packed = np.zeros(kernels.packed_words(codes.size, 3), np.uint32)
    uint8, int32 = map(kernels.DTYPES.index, ("uint8", "int32"))
    given = codes.ctypes.data, codes.size, uint8, -1
    kernel.pack(given, 3, (packed.ctypes.data, packed.size, int32, -1))
    return packed

expected = pack(1)
def threads_alive():
    return len(os.listdir("/proc/self/task"))
"""


def run_script(body):
    """Runs the lines after SCRIPT in a new process, which must succeed; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_threads_without_openmp():
    body = """
    print(kernels.use_openmp_of("/nowhere/libtorch_cpu.so"))
    before = threads_alive()
    assert all((pack(threads) == expected).all() for threads in (2, 3, 8))
    print(threads_alive() - before)
    """
    assert run_script(body) == ["False", "0"]


fork_only = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
proc_only = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc here")
TORCH = """
from pathlib import Path
import torch
library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
found = kernels.use_openmp_of(str(library))
"""


@pytest.mark.slow
@proc_only
def test_threads_are_those_of_torch():
    body = """
    import ctypes
    torch.set_num_threads(2)
    torch.randn(1 << 18).exp()
    mapped = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line}
    runtimes = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    openmp = ctypes.CDLL(runtimes[0])
    settings = lambda: (openmp.omp_get_max_threads(), openmp.omp_get_dynamic(), torch.get_num_threads())
    before, alive = settings(), threads_alive()
    assert (pack(2) == expected).all()
    same_team = threads_alive() - alive
    assert (pack(4) == expected).all()
    print(found, len(runtimes), same_team, threads_alive() - alive, settings() == before)
    """
    # Two threads were there; two more join torch's pool and stay.
    assert run_script(TORCH + textwrap.dedent(body)) == ["True", "1", "0", "2", "True"]


@pytest.mark.fast(1)
@fork_only
@pytest.mark.parametrize("prepare", ["", TORCH], ids=["own threads", "torch's threads"])
def test_fork_after_use(prepare):
    body = """
    assert (pack(2) == expected).all()
    child = os.fork()
    if child == 0:
        os._exit(0 if (pack(2) == expected).all() else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert (pack(2) == expected).all()
    """
    assert run_script(prepare + textwrap.dedent(body)) == ["0"]


# -- What is refused -----------------------------------------------------------------------------------


def arguments(**changes):
    """Those of a good table, changed."""
    good = dict(
        bits=2,
        initial=0,
        breaks32=np.array([-1.0, 1.0], np.float32),
        flips32=np.array([1, 2], np.uint8),
        breaks64=np.array([-1.0, 1.0]),
        flips64=np.array([1, 2], np.uint8),
        lut32=np.zeros(4, np.float32),
        lut64=np.zeros(4),
    )
    return good | changes


KNOTS = dict(
    points=np.array([-1.0, 1.0], np.float32),
    origins=np.array([-1.0, 1.0], np.float32),
    values=np.array([0.0, 1.0], np.float32),
    slopes=np.array([0.5], np.float32),
    levels=np.array([0.0, 0.5, 1.0], np.float32),
    inverse_gaps=np.array([2.0, 2.0], np.float32),
)


def floats(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(bits=0), "bits: expected 1 to 8, got 0"),
        (dict(bits=9), "bits: expected 1 to 8, got 9"),
        (dict(initial=4), "initial: expected 0 to 3, got 4"),
        (dict(initial=-1), "initial: expected 0 to 3, got -1"),
        (dict(breaks32=floats(1.0, -1.0)), r"breaks32\[1\]: expected at least 1.0+, got -1.0+"),
        (dict(breaks32=floats(1.0, np.inf)), r"breaks32\[1\]: expected a finite number, got inf"),
        (dict(breaks64=np.array([np.nan, 1])), r"breaks64\[0\]: expected a finite number, got nan"),
        (
            dict(breaks32=np.array([-1.0, 1.0])),
            "breaks32: expected a 1-D float32 array, got 1-D float64",
        ),
        (dict(breaks32=[1.0]), "breaks32: expected a 1-D float32 array, got list"),
        (
            dict(lut32=np.zeros((2, 2), np.float32)),
            "lut32: expected a 1-D float32 array, got 2-D float32",
        ),
        (dict(flips32=np.array([1, 4], np.uint8)), r"flips32\[1\]: expected below 4, got 4"),
        (dict(flips64=np.array([1], np.uint8)), "flips64: expected 2 entries, got 1"),
        (dict(lut64=np.zeros(5)), "lut64: expected 4 entries, got 5"),
        (KNOTS | dict(points=floats(0.0)), "points: expected 2 to 1048576 entries, got 1"),
        (KNOTS | dict(points=floats(1.0, -1.0)), r"points\[1\]: expected at least 1.0+, got -1.0+"),
        (KNOTS | dict(slopes=floats(1.0, 2.0)), "slopes: expected 1 entries, got 2"),
        (KNOTS | dict(levels=floats(1.0)), "levels: expected 2 to 4 entries, got 1"),
        (
            KNOTS | dict(values=floats(0.0, np.inf)),
            r"values\[1\]: expected a finite number, got inf",
        ),
        (dict(values=floats(0.0)), "values: expected 0 entries, got 1"),
    ],
)
def test_table_refuses(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        kernels.Table(**arguments(**changes))


def test_unknown_instruction_set():
    with pytest.raises(ValueError, match="isa: expected one of .*baseline, got mmx"):
        kernels.Cpu("mmx")
    assert ISAS[-1] == "baseline" and kernels.Cpu("baseline").isa == "baseline"
