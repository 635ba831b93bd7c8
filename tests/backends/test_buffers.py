"""A kernel, a backend or an op refuses in one line any buffer that is not of the size that it reads or writes."""

import re

import numpy as np
import pytest
import torch
from conftest import ISAS, _kernels
from quantized import cpu_backends
from samples import load_table, normal
from torch import nn

import fewbit
from fewbit.config import MASKED
from fewbit.runtime.backends import reference
from fewbit.runtime.format.encoding import Encoding, packed_words
from fewbit.runtime.ops import activation_ops, dense_ops, traced_copies

if _kernels is not None:
    from buffers import buffer

    from fewbit.runtime.backends import native

compiled = pytest.mark.skipif(_kernels is None, reason="fewbit was installed without kernels")

TABLE = Encoding.of(load_table("gelu", 3))
DRAWN = Encoding.of(load_table("gelu", 2, objective="unbiased"))
# 3 samples of 75 elements, that are in 3 channels; one element less is a block of 32 less.
N, BITS, CHANNELS = 225, 3, 3
WORDS = packed_words(N, BITS)
SEED = np.array([5], np.int64)
UNIFORM_COPY, MASKED_COPY = 0, 2  # the numbers of the kinds
SHAPE = {"samples": 3, "features": 75, "group_size": 256}
OF_SHAPE = (*SHAPE, "bits", "kind")  # the arguments of CopyShape
MIXED = np.array([2, 4, 4], np.uint8)
MIXED_WORDS = packed_words(75, 2) + packed_words(150, 4)


def floats(n):
    return np.zeros(n, np.float32)


def words(n=WORDS):
    return np.zeros(n, np.uint32)


def ranges(rows=3):
    return np.zeros(2 * rows, np.uint16)


def codes(n=N):
    return np.zeros(n, np.uint8)


def good_calls():
    """Return each entry of the kernels with correct arguments, in which arrays stand for buffers."""
    x, out = {"x": floats(N)}, {"out": floats(N)}
    fixed = dict(grid=floats(7 * CHANNELS), inner=25, bits=BITS)
    alike = dict(**SHAPE, bits=BITS, kind=UNIFORM_COPY)
    rounded, mixed = alike | {"widths": None}, alike | dict(bits=1, widths=MIXED)
    copy = dict(packed=words(), ranges=ranges())
    copy_of_energies, mixed_copy = (
        copy | {"ranges": ranges(5)},
        copy | {"packed": words(MIXED_WORDS)},
    )
    vectors = dict(mean=floats(CHANNELS), rstd=floats(CHANNELS), inner=25)
    affine = dict(scale=floats(CHANNELS), shift=floats(CHANNELS), inner=25)
    by_table, draws = dict(table=TABLE, seed=None), dict(seed=SEED)
    masked = dict(kind=MASKED_COPY, mask=words(packed_words(N, 1)))
    function = dict(function=_kernels.FUNCTIONS["silu"][0], p0=0.0, p1=0.0, y=floats(N)) | by_table
    return {
        "pack": dict(codes=codes(), bits=BITS, packed=words()),
        "unpack": dict(packed=words(), bits=BITS, codes=codes()),
        "encode": x | by_table | {"packed": words()},
        "encode drawn": x | dict(table=DRAWN, packed=words(packed_words(N, 2)), seed=SEED),
        "decode_mul": dict(table=TABLE, grad=floats(N), packed=words()) | out,
        "forward": x | function | {"packed": words()},
        "forward_quantized": x
        | function
        | {"codes": words()}
        | alike
        | copy
        | {"quantizer_seed": SEED},
        "quantize": x | rounded | draws | copy | vectors,
        "quantize mixed": x | mixed | draws | mixed_copy,
        "quantize masked": x | rounded | draws | {"kind": MASKED_COPY} | copy_of_energies,
        "squares": x | alike | {"out": floats(3)} | vectors,
        "dequantize": copy | rounded | out | affine,
        "dequantize masked": copy_of_energies | rounded | masked | out,
        "dequantize mixed": mixed_copy | mixed | out,
        "grid_fixed": dict(gamma=floats(4), beta=floats(4), bits=BITS, grid=floats(28)),
        "encode_fixed": dict(y=floats(N), packed=words(), mean=floats(CHANNELS))
        | dict(rstd=floats(CHANNELS), inner_of_entries=25)
        | x
        | fixed,
        "decode_fixed": dict(packed=words(), activated=True, slope=0.5, inner_of_entries=25)
        | {"scale": floats(CHANNELS)}
        | fixed
        | out,
        "mask_fixed": dict(grad=floats(N), packed=words(), slope=0.5) | fixed | out,
    }


def call(isa, name, **changes):
    """Call an entry with correct arguments except for the given ones. A tuple is passed as the buffer itself."""
    arguments = good_calls()[name] | changes
    if "samples" in arguments:
        arguments["shape"] = _kernels.CopyShape(**{key: arguments.pop(key) for key in OF_SHAPE})
    given = {
        key: buffer(value)
        if isinstance(value, np.ndarray)
        else native._table(value)
        if isinstance(value, Encoding)
        else value
        for key, value in arguments.items()
    }
    return getattr(_kernels.Cpu(isa), name.split()[0])(**given)


def faults(array, is_least):
    """Yield each way in which a buffer can be wrong, with that buffer."""
    address, count, dtype, device = buffer(array)
    yield "too short by one", (address, count - 1, dtype, device)
    if not is_least:
        yield "too long by one", (address, count + 1, dtype, device)
    yield "empty", (0, 0, dtype, device)
    yield "at no address", (0, count, dtype, device)
    other = "uint8" if array.dtype == np.int64 else "int64"
    yield "of another dtype", (address, count, _kernels.DTYPES.index(other), device)
    yield "of no known dtype", (address, count, -1, device)
    yield "of a GPU", (address, count, dtype, 0)


# Whose size is what the others have to be like.
FIRST = {("pack", "codes"), ("unpack", "codes"), ("encode", "x")}


def cases():
    if _kernels is None:
        return
    for name, arguments in good_calls().items():
        for key, value in arguments.items():
            if not isinstance(value, np.ndarray):
                continue
            is_least = "mixed" in name and key in ("packed", "ranges")
            is_first = (name.split()[0], key) in FIRST
            for fault, wrong in faults(value, is_least or is_first):
                yield pytest.param(name, key, wrong, id=f"{name}-{key}-{fault}")


@compiled
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", list(good_calls()) if _kernels else ())
def test_good_calls(isa, name):
    call(isa, name)


@compiled
@pytest.mark.parametrize(("name", "key", "wrong"), list(cases()))
def test_wrong_buffers_are_refused(name, key, wrong):
    """Every instruction set refuses them in one line that names the entry and the buffer."""
    for isa in ISAS:
        with pytest.raises(ValueError) as raised:
            call(isa, name, **{key: wrong})
        entry = name.split()[0]
        assert re.fullmatch(rf"{entry}: \w+(, shift)?: expected .+, got .+", str(raised.value))
        if wrong[1] == np.size(good_calls()[name][key]):
            assert f"{entry}: {key}: expected" in str(raised.value)


MASK = words(packed_words(N, 1))
AT_MOST_256 = "group_size: expected at most 256 unless the copy is uniform, got 288"
OTHERS = [  # (entry, changes of its arguments, message)
    (
        "encode",
        {"packed": words(WORDS - 1)},
        "encode: packed: expected 24 int32 .*, got 23 int32 .*",
    ),
    ("pack", {"bits": 9}, "bits: expected 1 to 8, got 9"),
    ("pack", {"codes": (16, -1, 5, -1)}, "n: expected a number of elements, 0 or more, got -1"),
    ("encode", {"seed": SEED}, "encode: seed: expected none, as the table is not unbiased, .*"),
    ("encode drawn", {"seed": None}, "encode: seed: expected 1 int64 on the CPU, got none"),
    ("forward", {"function": 1000}, "function: expected a number below .*, got 1000"),
    *(
        (name, {key: np.zeros(N)}, f"{name}: {key}: expected float32, float16 or bfloat16, .*")
        for name, key in (
            *((name, "x") for name in ("forward", "quantize", "squares")),
            ("dequantize", "out"),
        )
    ),
    ("quantize", {"samples": -1}, "samples: expected 0 or more, got -1"),
    ("quantize", {"features": -1}, "features: expected 0 or more, got -1"),
    ("quantize", {"samples": 1 << 40, "features": 1 << 40}, ".*can be counted, got .*"),
    ("quantize", {"samples": 4}, "quantize: x: expected 300 float32 on the CPU, got 225 .*"),
    ("quantize", {"group_size": 48}, "group_size: expected a multiple of 32 .*, got 48"),
    ("quantize", {"group_size": 0}, "group_size: expected .*, got 0"),
    ("quantize", {"group_size": 65568}, "group_size: expected .*, got 65568"),
    *(
        (name, {"group_size": 288, "kind": kind}, AT_MOST_256)
        for name in ("quantize", "squares", "dequantize", "forward_quantized")
        for kind in (1, 2)
    ),
    ("quantize", {"bits": 0}, "bits: expected 1 to 8, got 0"),
    ("quantize", {"inner": 0}, r"quantize: rstd: expected entries \* inner to divide .*"),
    ("quantize", {"rstd": None}, "quantize: rstd: expected 3 float32 on the CPU, got none"),
    ("dequantize", {"bits": 9}, "bits: expected 1 to 8, got 9"),
    ("dequantize", {"kind": 1}, "dequantize: ranges: expected 10 bfloat16 .*, got 6 .*"),
    ("dequantize", {"mask": MASK}, "dequantize: scale, shift: expected none with a mask, got one"),
    ("dequantize mixed", {"mask": MASK}, "dequantize: mask: expected None for uniform copies, .*"),
    ("quantize", {"kind": 3}, "kind: expected 0 .*, got 3"),
    ("quantize mixed", {"widths": MIXED % 4}, "bits: expected 1 to 8, got 0"),
    ("dequantize mixed", {"widths": MIXED + 7}, "bits: expected .*, got 9"),
    ("dequantize mixed", {"widths": MIXED + 1}, "dequantize: packed: .*"),
    ("encode_fixed", {"inner": 2}, r"encode_fixed: grid: expected entries \* inner .*"),
    ("mask_fixed", {"bits": 9}, "bits: expected 1 to 8, got 9"),
]


@compiled
@pytest.mark.parametrize(("name", "changes", "message"), OTHERS)
def test_other_wrong_arguments_are_refused(name, changes, message):
    for isa in ISAS:
        with pytest.raises(ValueError, match=f"^{message}$"):
            call(isa, name, **changes)


@pytest.mark.skipif(not getattr(_kernels, "cuda", None), reason="fewbit was built without CUDA")
def test_cuda_kernels_refuse_tensors_on_the_cpu():
    codes, packed = torch.zeros(32, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    message = "pack: expected tensors on a CUDA device, got tensors on the CPU"
    with pytest.raises(ValueError, match=f"^{message}$"):
        _kernels.cuda.pack(codes, 3, packed)


@compiled
@pytest.mark.parametrize("key, count", [("variances", 32), ("elements", 4)])
def test_allocation(key, count):
    good = {"variances": np.ones((4, 8)), "elements": np.ones(4, np.int64), "bits": codes(4)}
    scalars = {"budget": 8, "least": 1, "most": 8}
    given = {name: buffer(array) for name, array in good.items()}
    _kernels.allocate(**given, **scalars)
    for _, wrong in faults(good[key], False):
        with pytest.raises(ValueError, match=f"^allocate: {key}: expected {count} .*"):
            _kernels.allocate(**given | {key: wrong}, **scalars)


# -- backends --------------------------------------------------------------------------------------


def good_tensors():
    """Return each function of a backend, with correct tensors."""
    x, packed = torch.zeros(3, 75), torch.zeros(WORDS, dtype=torch.int32)
    limits, seed = torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    grid, widths = torch.ones(7, CHANNELS), torch.from_numpy(MIXED)
    room = torch.zeros(MIXED_WORDS, dtype=torch.int32)
    rotated = torch.zeros(5, 2, dtype=torch.bfloat16)
    mask = torch.zeros(packed_words(N, 1), dtype=torch.int32)
    return {
        "pack": (torch.zeros(N, dtype=torch.uint8), BITS),
        "unpack": (packed, BITS, N),
        "encode": (x, DRAWN, seed),
        "decode_mul": (x.clone(), packed, TABLE, x.clone()),
        "quantize": (x, seed, BITS, 256),
        "quantize mixed": (x, seed, 0, 256, widths, MIXED_WORDS),
        "squares": (x, 256),
        "dequantize": (packed, limits, BITS, 256, x.clone()),
        "dequantize mixed": (room, limits, 0, 256, x.clone(), widths),
        "dequantize masked": (packed, rotated, BITS, 256, x.clone(), None, None, MASKED, mask),
        "grid_fixed": (torch.ones(4), torch.ones(4), BITS),
        "encode_fixed": (x, x.clone(), grid, BITS, 25),
        "decode_fixed": (packed, grid, BITS, 25, x.clone(), 0.5),
        "mask_fixed": (x.clone(), packed, grid, BITS, 25, 0.5, x.clone()),
    }


def wrong_tensors(tensor):
    yield "short", tensor.flatten()[:-1]
    yield "empty", tensor.flatten()[:0]
    yield "expanded", tensor.flatten()[:1].expand(tensor.numel() + 1)
    yield "dtype", tensor.to(torch.int16)


OF_ANY_SIZE = "pack", "encode", "quantize", "squares"


def tensor_cases():
    for name, arguments in good_tensors().items():
        for position, argument in enumerate(arguments):
            if not isinstance(argument, torch.Tensor):
                continue
            for fault, wrong in wrong_tensors(argument):
                is_sized = name in OF_ANY_SIZE and position == 0
                if not (is_sized and fault in ("short", "empty")):
                    yield pytest.param(name, position, wrong, id=f"{name}-{position}-{fault}")


def test_good_tensors(backend):
    if backend.device == "cpu":
        for name, arguments in good_tensors().items():
            getattr(backend.kernels, name.split()[0])(*arguments)


@pytest.mark.parametrize(("name", "position", "wrong"), list(tensor_cases()))
def test_backends_refuse_wrong_tensors(name, position, wrong):
    for kernels in cpu_backends():
        arguments = list(good_tensors()[name])
        arguments[position] = wrong
        with pytest.raises((ValueError, RuntimeError)) as raised:
            getattr(kernels, name.split()[0])(*arguments)
        assert "\n" not in str(raised.value) and "expected" in str(raised.value)


# -- ops, in eager mode and compiled ---------------------------------------------------------------


def op_cases():
    x, seed = normal((4, 80)), torch.zeros(1, dtype=torch.int64)
    packed = activation_ops.encode_op(x, TABLE.text, [80, 1])
    kept, limits, *_ = traced_copies.quantize_op(x, seed, 3, 256, "uniform")
    place = 3, 256, [4, 80], [80, 1], torch.float32, "uniform"
    encode, decode = activation_ops.encode_op, activation_ops.decode_mul_op
    of_table = TABLE.text, [80, 1]
    yield encode, (x, TABLE.text, [1, 1]), "stride: expected those of a dense tensor"
    yield encode, (x, TABLE.text, [1]), "stride: expected"
    yield encode, (x, *of_table, seed), "seed: expected none"
    yield encode, (x.int(), *of_table), "x: expected float32"
    yield decode, (x, packed[:-1], *of_table), "packed: expected 30 int32"
    yield decode, (x, packed.long(), *of_table), "packed: expected 30 int32"
    yield decode, (x, packed, TABLE.text, [160, 1]), "stride: expected"
    yield decode, (x[:1].expand(8, 80), packed, *of_table), "expected 60 int32"
    yield dense_ops.unpack_op, (packed[1:], 3, 320), "packed: expected 30 int32"
    quantize, restore = traced_copies.quantize_op, traced_copies.dequantize
    yield quantize, (x, seed[:0], 3, 256, "uniform"), "seed: expected 1 int64"
    yield restore, (kept[:-1], limits, *place), "packed: expected 30 int32"
    yield restore, (kept, limits[:-1], *place), "ranges: expected 8 bfloat16"
    yield restore, (kept, limits.float(), *place), "ranges: expected 8 bfloat16"
    of_shape = kept, limits, 3, 256
    yield restore, (*of_shape, [5, 80], [80, 1], torch.float32, "uniform"), "packed: expected"
    yield restore, (kept, limits, *place[:-1], "rotated"), "ranges: expected 12 bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_ops_refuse_what_they_did_not_expect(kernels, mode, monkeypatch, choice):
    if kernels == "reference":
        monkeypatch.setitem(choice, torch.device("cpu"), reference)
    for op, arguments, message in op_cases():
        torch.compiler.reset()
        run = op if mode == "eager" else torch.compile(op, backend=mode)
        with pytest.raises(ValueError, match=message) as raised:
            run(*arguments)
        assert "\n" not in str(raised.value).partition("\nfrom user code")[0].strip()


def test_what_was_kept_and_then_cut_is_refused():
    """Hooks of saved tensors may return any tensor."""
    model = nn.Sequential(fewbit.nn.Linear(64, 64, bits=4), fewbit.GELU(bits=3))
    cut = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor[:-1] if tensor.dtype == torch.int32 else tensor, lambda tensor: tensor
    )
    with cut:
        y = model(normal((8, 64))).sum()
    with pytest.raises(ValueError, match="packed: expected"):
        y.backward()
