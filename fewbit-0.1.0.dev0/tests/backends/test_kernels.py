"""The compiled CPU kernels themselves, by address, against NumPy. Every instruction set that this machine has."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fewbit
from fewbit import functions
from fewbit.runtime.format.encoding import Encoding, gray, packed_words

kernels = pytest.importorskip("fewbit._kernels", reason="fewbit was installed without kernels")
from buffers import buffer, torch_threads  # noqa: E402

ISAS = kernels.cpu_isas()
SIZES = (*range(66), 127, 511, 512, 513, 1023, 1025)
LARGE = 100_003
CANARY = 0xA5
DTYPES = ("float32", "float64", "float16", "bfloat16")  # in the order of their numbers
FLOAT32_MAX = np.finfo(np.float32).max

isas = pytest.mark.parametrize("isa", ISAS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
all_bits = pytest.mark.parametrize("bits", range(1, 9))


# -- Arrays: bfloat16 is kept as uint16 ------------------------------------------------------------


def storage(dtype):
    return np.dtype({"bfloat16": "uint16"}.get(dtype, dtype))


def to_dtype(x, dtype):
    """float64 numbers as float64, float32, float16, or the bits of bfloat16, rounded to nearest even."""
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return narrow_bfloat16(x.astype(np.float32)) if dtype == "bfloat16" else x.astype(dtype)


def to_float(x, dtype):
    """The numbers that kernels compute with: float64 as such, everything else as float32."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x if dtype == "float64" else x.astype(np.float32)


def narrow_bfloat16(x):
    """The nearest of the two neighbors, by distance; ties to the even one. A NaN stays one, quiet."""
    below = x.view(np.uint32) & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.abs(x.astype(np.float64))
        low, high = (
            np.abs(pattern.view(np.float32).astype(np.float64)) for pattern in (below, above)
        )
        high = np.where(np.isinf(high), 2.0**128, high)
        to_low, to_high = exact - low, high - exact
    up = (to_high < to_low) | ((to_high == to_low) & (below >> 16 & 1 == 1))
    rounded = np.where(np.isnan(x), below | 0x400000, np.where(up & ~np.isinf(x), above, below))
    return (rounded >> 16).astype(np.uint16)


def same(a, b, dtype):
    """Equal bit for bit, except that any NaN is like any other."""
    a, b = to_float(a, dtype), to_float(b, dtype)
    bits = np.dtype(f"u{a.itemsize}")
    return np.array_equal(np.isnan(a), np.isnan(b)) and np.array_equal(
        a[~np.isnan(a)].view(bits), b[~np.isnan(b)].view(bits)
    )


class Guarded:
    """n elements, aligned to no more than one of them, between bytes that have to stay as they are."""

    def __init__(self, n, dtype, fill=None):
        item = np.dtype(dtype).itemsize
        self.bytes = np.full((n + 40) * item, CANARY, np.uint8)
        self.inside = slice(17 * item, (17 + n) * item)
        self.array = self.bytes[self.inside].view(dtype)
        if fill is not None:
            self.array[:] = fill

    @property
    def buffer(self):
        return buffer(self.array)

    def checked(self):
        outside = np.delete(self.bytes, self.inside)
        assert (outside == CANARY).all(), "written outside of the array"
        return self.array


def guarded(array):
    return Guarded(array.size, array.dtype, array)


# -- Oracles -----------------------------------------------------------------------------------------


def pack(codes, bits):
    blocks = -(-codes.size // 32)
    padded = np.zeros(32 * blocks, np.uint8)
    padded[: codes.size] = codes
    planes = (
        padded.reshape(blocks, 1, 32) >> np.arange(bits, dtype=np.uint8).reshape(1, bits, 1) & 1
    )
    return np.packbits(planes, axis=-1, bitorder="little").reshape(-1).view("<u4").astype(np.uint32)


class Constants:
    """The arrays of a table, and the codes and levels that they give."""

    def __init__(self, bits, initial, breaks32, flips32, breaks64, flips64, lut64):
        self.bits = bits
        self.initial = initial
        self.breaks = {"float32": breaks32, "float64": breaks64}
        self.flips = {"float32": flips32, "float64": flips64}
        self.lut = {"float32": lut64.astype(np.float32), "float64": lut64}
        self.arrays = (breaks32, flips32, breaks64, flips64, self.lut["float32"], lut64)
        self.native = kernels.Table(bits, initial, *self.arrays)

    def codes(self, x):
        kind = str(x.dtype)
        table = np.bitwise_xor.accumulate(np.append(np.uint8(self.initial), self.flips[kind]))
        beyond = np.searchsorted(self.breaks[kind], x, side="left")
        return table[np.where(np.isnan(x), len(table) - 1, beyond)]

    def product(self, codes, grad, dtype):
        wide = to_float(grad, dtype)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            product = self.lut[str(wide.dtype)][codes] * wide
            return narrow_bfloat16(product) if dtype == "bfloat16" else product.astype(dtype)


def synthetic(bits, count, seed):
    """A table with any number of breaks, equal, subnormal and extreme ones too, and flips of any planes."""
    rng = np.random.default_rng([seed, bits, count])
    breaks32 = rng.normal(0, 3, count).astype(np.float32)
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-39, FLOAT32_MAX, -FLOAT32_MAX, 1.0, 1.0]
    chosen = rng.random(count) < 0.2
    breaks32[chosen] = rng.choice(np.array(special, np.float32), chosen.sum())
    breaks32.sort()
    breaks64 = np.sort(breaks32 * (1 + 1e-9 * rng.normal(size=count)))
    flips = rng.integers(1, 1 << bits, (2, count), np.uint8)
    lut = rng.normal(0, 1, 1 << bits)
    initial = int(rng.integers(1 << bits))
    return Constants(bits, initial, breaks32, flips[0], breaks64, flips[1], lut)


def numbers(constants, n, dtype, seed=0):
    """n numbers of a dtype: normal, each break with its neighbors, zeros, extremes, infinities, NaN."""
    rng = np.random.default_rng([seed, n])
    breaks = constants.breaks["float64" if dtype == "float64" else "float32"]
    tiny = np.finfo(np.float32).smallest_subnormal
    fixed = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, tiny, -tiny, 1e-40, FLOAT32_MAX, 65504.0]
    near = to_dtype(breaks.astype(np.float64), dtype)
    if dtype != "bfloat16":
        with np.errstate(over="ignore", under="ignore"):
            neighbors = np.nextafter(near, np.inf), np.nextafter(near, -np.inf)
        near = np.concatenate([near, *neighbors])
    pool = np.concatenate([near, to_dtype(fixed, dtype)])
    x = to_dtype(rng.normal(0, 3, n), dtype)
    chosen = rng.random(n) < 0.4
    x[chosen] = rng.choice(pool, chosen.sum())
    return x


# -- Calls -------------------------------------------------------------------------------------------


def run_pack(isa, codes, bits, threads=1):
    source, packed = guarded(codes), Guarded(packed_words(codes.size, bits), np.uint32)
    with torch_threads(threads):
        kernels.Cpu(isa).pack(source.buffer, bits, packed.buffer)
    return packed.checked()


def run_unpack(isa, packed, bits, n, threads=1):
    source, codes = guarded(packed), Guarded(n, np.uint8)
    with torch_threads(threads):
        kernels.Cpu(isa).unpack(source.buffer, bits, codes.buffer)
    return codes.checked()


def run_encode(isa, table, bits, x, dtype, seed=None, threads=1):
    packed = Guarded(packed_words(x.size, bits), np.uint32)
    seeds = None if seed is None else np.array([seed], np.int64)
    source = guarded(x)
    assert source.buffer[2] == kernels.DTYPES.index(dtype)
    drawn_by = None if seeds is None else buffer(seeds)
    with torch_threads(threads):
        kernels.Cpu(isa).encode(table, source.buffer, packed.buffer, drawn_by)
    return packed.checked()


def run_decode(isa, constants, grad, dtype, packed, n, threads=1, inplace=False):
    source, words = guarded(grad), guarded(packed)
    out = source if inplace else Guarded(n, grad.dtype)
    with torch_threads(threads):
        kernels.Cpu(isa).decode_mul(constants.native, source.buffer, words.buffer, out.buffer)
    assert out.buffer[2] == kernels.DTYPES.index(dtype)
    return out.checked()


def run_forward(isa, name, parameters, constants, x, dtype, threads=1, inplace=False):
    source = guarded(x)
    out = source if inplace else Guarded(x.size, x.dtype)
    packed = Guarded(packed_words(x.size, constants.bits), np.uint32)
    with torch_threads(threads):
        kernels.Cpu(isa).forward(
            kernels.FUNCTIONS[name][0],
            *(*parameters, 0.0, 0.0)[:2],
            constants.native,
            source.buffer,
            out.buffer,
            packed.buffer,
            None,
        )
    return out.checked(), packed.checked()


def test_packed_words_beyond_32_bits():
    for n in (0, 1, 32, 33, 2**31, 2**33 + 1, 2**40 + 31, 10**12):
        for bits in range(1, 9):
            assert kernels.packed_words(n, bits) == bits * -(-n // 32) == packed_words(n, bits)


# -- encode --------------------------------------------------------------------------------------------


def test_encode_every_16_bit_float():
    x = np.arange(1 << 16, dtype=np.uint16)
    constants = synthetic(5, 40, seed=3)
    for dtype, values in (("float16", x.view(np.float16)), ("bfloat16", x)):
        expected = pack(constants.codes(to_float(values, dtype)), 5)
        for isa in ISAS:
            assert np.array_equal(run_encode(isa, constants.native, 5, values, dtype), expected)


@pytest.mark.parametrize("count", [*range(70), 100, 127, 128, 255, 256, 511, 512, 600, 1023, 1024])
def test_encode_any_number_of_breaks(count):
    constants = synthetic(8, count, seed=4)
    for dtype in ("float32", "float64"):
        x = numbers(constants, 1500, dtype)
        expected = pack(constants.codes(x), 8)
        for isa in ISAS:
            assert np.array_equal(run_encode(isa, constants.native, 8, x, dtype), expected), isa


# -- decode_mul ----------------------------------------------------------------------------------------


@isas
@dtypes
@all_bits
def test_decode_mul_of_one_number(isa, dtype, bits):
    rng = np.random.default_rng(bits)
    constants = synthetic(bits, 5, seed=6)
    for n in (0, 1, 31, 33, 513, 2000):
        codes = rng.integers(0, 1 << bits, n, np.uint8)
        for value in (1.0, -0.3, 1e-7, 3e38, np.inf, np.nan, 0.0):
            grad = to_dtype([value], dtype)
            expected = constants.product(codes, np.resize(grad, n), dtype)
            got = run_decode(isa, constants, grad, dtype, pack(codes, bits), n)
            assert same(got, expected, dtype), (n, value)


@isas
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_round_to_nearest_even(isa, dtype):
    # Every product of a 16-bit number with levels that make ties, subnormals and overflow.
    grad = np.arange(1 << 16, dtype=np.uint16).view(storage(dtype))
    lut = np.array([1 + 2.0**-9, 1 + 2.0**-12, 2.0**-10, -1.5 * 2.0**-9, 3.0, 2.0**15, 0.0, 1.0])
    empty32, empty64, flips = np.zeros(0, np.float32), np.zeros(0), np.zeros(0, np.uint8)
    constants = Constants(3, 0, empty32, flips, empty64, flips, lut)
    for code in range(8):
        codes = np.full(grad.size, code, np.uint8)
        got = run_decode(isa, constants, grad, dtype, pack(codes, 3), grad.size)
        assert same(got, constants.product(codes, grad, dtype), dtype), code


# -- forward -------------------------------------------------------------------------------------------

# Exact in float32, so that the float64 function has the same ones.
PARAMETERS = {
    "softplus": (2.0, 15.0),
    "elu": (1.5,),
    "celu": (1.5,),
    "leaky_relu": (0.015625,),
    "threshold": (0.125, 7.0),
    "hardtanh": (-0.75, 1.25),
    "hardshrink": (0.625,),
    "softshrink": (0.625,),
}


def test_functions_are_numbered_in_order_and_known():
    assert [number for number, _ in kernels.FUNCTIONS.values()] == list(
        range(len(kernels.FUNCTIONS))
    )
    for name, (_, n_parameters) in kernels.FUNCTIONS.items():
        assert len(PARAMETERS.get(name, ())) == n_parameters
        assert len(functions.get(name).parameters) == n_parameters


@pytest.mark.parametrize("name", kernels.FUNCTIONS)
def test_forward_agrees_between_instruction_sets(name):
    fused = [isa for isa in ISAS if isa != "baseline"]  # has no fused multiply-add
    constants = synthetic(4, 20, seed=8)
    for dtype in ("float32", "float16", "bfloat16"):
        x = numbers(constants, 4000, dtype)
        results = [
            run_forward(isa, name, PARAMETERS.get(name, ()), constants, x, dtype)[0]
            for isa in fused
        ]
        assert all(same(result, results[0], dtype) for result in results)


# -- draws ---------------------------------------------------------------------------------------------


@isas
def test_draws_do_not_depend_on_threads(isa):
    table = fewbit.solve("gelu", bits=2, objective="unbiased")
    e = Encoding.of(table)
    native = kernels.Table(
        e.bits, e.initial, e.breaks32, e.flips, e.breaks64, e.flips, e.lut32, e.lut64,
        **e.draw._asdict(),
    )  # fmt: skip
    assert native.unbiased
    x = np.random.default_rng(0).normal(0, 2, 3 * 32768 + 5).astype(np.float32)
    expected = pack(gray(table.sample_code(x, 11)).astype(np.uint8), 2)
    for threads in (1, 2, 3):
        assert np.array_equal(run_encode(isa, native, 2, x, "float32", 11, threads), expected)


# -- Fuzzing -------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    bits=st.integers(1, 8),
    count=st.integers(0, 80),
    n=st.integers(0, 1400),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
    threads=st.integers(1, 4),
    inplace=st.booleans(),
)
@example(bits=8, count=1000, n=1025, dtype="float32", seed=0, threads=4, inplace=False)
@example(bits=3, count=9, n=LARGE, dtype="bfloat16", seed=0, threads=1, inplace=True)
def test_round_trip(bits, count, n, dtype, seed, threads, inplace):
    """Codes, their bytes, and products are NumPy's, and nothing is written beside them."""
    constants = synthetic(bits, count, seed)
    x = numbers(constants, n, dtype, seed)
    grad = numbers(constants, n, dtype, seed + 1)
    codes = constants.codes(to_float(x, dtype))
    expected = pack(codes, bits)
    for isa in ISAS:
        packed = run_encode(isa, constants.native, bits, x, dtype, threads=threads)
        assert np.array_equal(packed, expected)
        assert np.array_equal(run_pack(isa, codes, bits, threads), expected)
        assert np.array_equal(run_unpack(isa, packed, bits, n, threads), codes)
        out = run_decode(isa, constants, grad, dtype, packed, n, threads, inplace)
        assert same(out, constants.product(codes, grad, dtype), dtype)


# -- Threads -------------------------------------------------------------------------------------------


@isas
@pytest.mark.parametrize("n", [32768, 65536 + 1, 5 * 32768 - 31])
def test_threads_give_the_same(isa, n):
    constants = synthetic(3, 9, seed=9)
    x = numbers(constants, n, "float32")
    expected = pack(constants.codes(x), 3)
    product = constants.product(constants.codes(x), x, "float32")
    for threads in (1, 2, 3, 7):
        assert np.array_equal(
            run_encode(isa, constants.native, 3, x, "float32", None, threads), expected
        )
        assert same(
            run_decode(isa, constants, x, "float32", expected, n, threads), product, "float32"
        )
        y, packed = run_forward(isa, "relu", (), constants, x, "float32", threads, inplace=True)
        assert np.array_equal(packed, expected)
        assert same(y, np.where(x < 0, np.float32(0), x), "float32")


def aligned(n, dtype, offset):
    """An array whose address is `offset` items behind a multiple of 64."""
    dtype = np.dtype(dtype)
    memory = np.full(n * dtype.itemsize + 128, CANARY, np.uint8)
    start = -memory.ctypes.data % 64 + offset * dtype.itemsize
    return memory, memory[start : start + n * dtype.itemsize].view(dtype)


@pytest.mark.fast(2)
@isas
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_past_the_caches(isa, dtype):
    """Large aligned results are written past the caches: the same numbers, and nothing beyond them."""
    n = (24 << 20) // storage(dtype).itemsize + 256 + 77
    constants = synthetic(3, 9, seed=11)
    x = np.resize(numbers(constants, LARGE, dtype), n)
    cpu, number = kernels.Cpu(isa), kernels.FUNCTIONS["silu"][0]
    results = []
    for offset in (0, 1):  # past the caches, and through them
        memory, out = aligned(n, storage(dtype), offset)
        packed = np.zeros(packed_words(n, 3), np.uint32)
        x_at, out_at, packed_at = map(buffer, (x, out, packed))
        cpu.forward(number, 0.0, 0.0, constants.native, x_at, out_at, packed_at, None)
        y = out.copy()
        cpu.decode_mul(constants.native, x_at, packed_at, out_at)
        results.append((y, out.copy(), packed))
        end = out_at[0] - memory.ctypes.data + out.nbytes
        assert (memory[end:] == CANARY).all()
    for past, through in zip(*results, strict=True):
        assert np.array_equal(past.view(np.uint8), through.view(np.uint8))
    codes = constants.codes(to_float(x[-LARGE:], dtype))
    product = constants.product(codes, x[-LARGE:], dtype)
    assert same(results[0][1][-LARGE:], product, dtype)


def test_buffers_large_enough_for_huge_pages():
    n = (1 << 20) + 77
    constants = synthetic(3, 9, seed=10)
    x = numbers(constants, n, "float64")
    codes = constants.codes(x)
    packed = run_encode(ISAS[0], constants.native, 3, x, "float64", None, 2)
    assert np.array_equal(packed, pack(codes, 3))
    out = run_decode(ISAS[0], constants, x, "float64", packed, n, 2)
    assert same(out, constants.product(codes, x, "float64"), "float64")


SCRIPT = """
import os, sys
import numpy as np
from fewbit import _kernels as kernels

codes = np.arange(1 << 18, dtype=np.uint8) & 7
kernel = kernels.Cpu(kernels.cpu_isas()[0])

used = 1
kernels.use_torch(np.ndarray, {}, print, lambda: used, print)

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


def test_zero_threads_are_refused():
    body = """
    try:
        pack(0)
    except ValueError as error:
        print(error)
    """
    assert " ".join(run_script(body)) == "threads: expected 1 or more, got 0"


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
    pytest.importorskip("torch")
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
    if prepare:
        pytest.importorskip("torch")
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


def test_nothing_to_do():
    table = kernels.Table(**arguments())
    codes, words, x, bfloat16 = (
        buffer(np.zeros(0, dtype)) for dtype in ("uint8", "uint32", "float32", "uint16")
    )
    for isa in ISAS:
        kernel = kernels.Cpu(isa)
        kernel.pack(codes, 3, words)
        kernel.encode(table, x, words, None)
        kernel.decode_mul(table, bfloat16, words, bfloat16)
        kernel.forward(0, 0.0, 0.0, table, x, x, words, None)
