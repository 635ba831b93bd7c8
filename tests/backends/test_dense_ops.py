"""The ops of compiled models in C++ give the results of the same ops in Python, to the bit, and refuse the same arguments."""

import pytest
import torch
from samples import DTYPES, name_of, normal

from fewbit.config import KIND_NUMBERS
from fewbit.runtime.format.groups import samples_of
from fewbit.runtime.ops import dense_ops, quantizer_ops

ROTATED = KIND_NUMBERS["rotated"]
SHAPES = [(1,), (33,), (0, 8), (4, 80), (70, 5), (3, 4, 65), (2, 16, 8, 8), (9, 1030)]
COPIES = [(0, 1, 64), (0, 8, 2048), (1, 2, 256), (1, 5, 32), (2, 3, 256)]  # fmt: skip


def both(name, *arguments, **keywords):
    """Return the results of an op and of its implementation in Python."""
    ops = (getattr(torch.ops.fewbit, form) for form in (name, f"{name}_in_python"))
    return [op(*arguments, **keywords) for op in ops]


def same_bits(a, b):
    assert (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_copies(x, bits, group_size, kind, channels=0):
    seed = torch.tensor([7, 11, 13], dtype=torch.int64, device=x.device)[1:2]
    form, last = ("by_channels", channels) if channels else ("dense", kind)
    made, expected = both(f"quantize_{form}", x, seed, bits, group_size, last)
    assert all(map(same_bits, made, expected))
    packed, ranges, *numbers = made
    sizes = samples_of(x.shape)
    for dtype in DTYPES:
        how = bits, group_size, *sizes, dtype, *(numbers or [kind])
        back, expected = both(f"dequantize_{form}", packed, ranges, *how)
        assert back.shape == sizes and same_bits(back, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies(device, shape):
    for kind, bits, group_size in COPIES:
        for dtype in DTYPES if shape == (4, 80) else DTYPES[:1]:
            check_copies(normal(shape, dtype, device, seed=bits), bits, group_size, kind)


def test_copies_with_channels_and_of_views(device):
    x = normal((64, 48), device=device)
    check_copies(x, 2, 256, ROTATED, channels=48)
    check_copies(x.t(), 3, 64, ROTATED, channels=64)
    check_copies(x.view(2, 4, 8, 48).bfloat16(), 4, 256, ROTATED, channels=48)
    check_copies(x.double(), 2, 256, ROTATED, channels=48)
    check_copies(x[:0], 2, 256, ROTATED, channels=48)
    check_copies(x.t(), 2, 256, 1)
    check_copies(x[:, 1:], 2, 256, 0)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_codes(device, bits):
    for n in (0, 1, 32, 1001):
        codes = (torch.arange(n, device=device) * 7 % (1 << bits)).to(torch.uint8)
        packed, expected = both("pack", codes, bits)
        assert same_bits(packed, expected)
        for back in both("unpack", packed, bits, n):
            assert torch.equal(back, codes)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float64], ids=name_of
)
def test_masks(device, dtype):
    mask = (torch.arange(70, device=device) % 3 > 0).to(dtype)
    for given in (mask, mask[1:], mask.view(7, 10).t()):
        packed, expected = both("pack_mask", given)
        assert same_bits(packed, expected)
        for back in both("unpack_mask", packed, given.numel(), dtype=dtype):
            assert back.dtype == dtype and torch.equal(back, given.reshape(-1))


def test_kernels_are_called_without_python(backend, monkeypatch):
    """Usual arguments reach the implementations in Python only without compiled kernels."""

    class Called(Exception):
        pass

    def refuse(*_, **__):
        raise Called("in Python")

    device = backend.device
    x, seed = normal((4, 80), device=device), torch.zeros(1, dtype=torch.int64, device=device)
    packed, ranges, numbers = dense_ops.quantize_by_channels_op(x, seed, 2, 256, 80)
    place = 2, 256, 4, 80, torch.float32
    monkeypatch.setattr(quantizer_ops, "quantize", refuse)
    monkeypatch.setattr(quantizer_ops, "dequantize", refuse)
    for run in (
        lambda: dense_ops.quantize_dense_op(x, seed, 2, 256, 1),
        lambda: dense_ops.quantize_by_channels_op(x, seed, 2, 256, 80),
        lambda: dense_ops.dequantize_dense_op(packed, ranges, *place, 1),
        lambda: dense_ops.dequantize_by_channels_op(packed, ranges, *place, numbers),
    ):
        if "reference" not in backend.name:
            run()
            continue
        with pytest.raises((RuntimeError, Called), match="in Python"):
            run()
    with pytest.raises((RuntimeError, Called), match="in Python"):
        dense_ops.quantize_dense_op(x.double(), seed, 2, 256, 1)


def wrong_cases():
    x, seed = normal((4, 80)), torch.zeros(1, dtype=torch.int64)
    packed, ranges = dense_ops.quantize_dense_op(x, seed, 3, 256, 0)
    place = 4, 80, torch.float32, 0
    yield "quantize_dense", (x, seed[:0], 3, 256, 0), "seed: expected 1 int64"
    yield "quantize_dense", (x, seed, 9, 256, 0), "expected 1 to 8"
    yield "quantize_dense", (x, seed, 3, 31, 0), "group_size: expected"
    yield "dequantize_dense", (packed[:-1], ranges, 3, 256, *place), "packed: expected 30 int32"
    yield "dequantize_dense", (packed, ranges[:-1], 3, 256, *place), "ranges: expected 8 bfloat16"
    yield (
        "dequantize_dense",
        (packed, ranges.float(), 3, 256, *place),
        "ranges: expected 8 bfloat16",
    )
    yield "dequantize_dense", (packed, ranges, 3, 256, 5, *place[1:]), "packed: expected"
    yield "dequantize_dense", (packed, ranges, 3, 256, 4, -80, *place[2:]), "negative|expected"
    yield "quantize_by_channels", (x, seed, 3, 256, 7), "entries"
    yield "quantize_by_channels", (x, seed[:0], 3, 256, 80), "seed: expected 1 int64"
    numbers = torch.zeros(7, 2, dtype=torch.bfloat16)
    yield "dequantize_by_channels", (packed, ranges, 3, 256, *place[:3], numbers), "expected"
    yield "unpack", (packed[1:], 3, 320), "packed: expected 30 int32"
    yield "unpack", (packed, 3, -1), "negative|expected"
    yield "pack", (x.to(torch.uint8), 9), "expected 1 to 8"
    # The C++ code leaves these to Python.
    yield "quantize_dense", (x.double(), seed[:0], 3, 256, 0), "seed: expected 1 int64"
    yield "quantize_dense", (x.double(), seed, 3, 8192, 1), "group_size with rotated copies"


@pytest.mark.parametrize(("name", "arguments", "message"), list(wrong_cases()))
def test_wrong_arguments(name, arguments, message):
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    uses = [x._use_count() for x in tensors]
    for form in (name, f"{name}_in_python"):
        with pytest.raises((ValueError, RuntimeError), match=message) as caught:
            getattr(torch.ops.fewbit, form)(*arguments)
        assert "\n" not in str(caught.value)
        del caught  # its frames hold the arguments
    assert [x._use_count() for x in tensors] == uses  # an error keeps no argument alive


def test_a_lack_of_memory_has_torchs_words():
    """Trainers recognize a lack of memory by them."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        dense_ops.unpack_op(torch.zeros(1, dtype=torch.int32), 1, 1 << 50)


def test_views_of_copies(device):
    """Packed codes and ranges that are not contiguous give the same values."""
    x, seed = normal((4, 80), device=device), torch.zeros(1, dtype=torch.int64, device=device)
    packed, ranges, numbers = dense_ops.quantize_by_channels_op(x, seed, 3, 256, 80)
    how = 3, 256, 4, 80, torch.float32
    expected = dense_ops.dequantize_by_channels_op(packed, ranges, *how, numbers)
    spread = torch.stack([packed, packed], 1)[:, 0]
    assert torch.equal(dense_ops.unpack_op(spread, 3, 320), dense_ops.unpack_op(packed, 3, 320))
    columns = ranges.t().contiguous().t()
    numbers = numbers.t().contiguous().t()
    back = dense_ops.dequantize_by_channels_op(spread, columns, *how, numbers)
    assert torch.equal(back, expected)


def test_opcheck(device):
    x, seed = normal((4, 80), device=device), torch.zeros(1, dtype=torch.int64, device=device)
    checks = "test_schema", "test_faketensor"
    how = 2, 256, 4, 80, torch.float32
    quantized = (x, seed, 2, 256, ROTATED), (x, seed, 2, 256, 80)
    quantize = dense_ops.quantize_dense_op, dense_ops.quantize_by_channels_op
    dequantize = dense_ops.dequantize_dense_op, dense_ops.dequantize_by_channels_op
    for arguments, op, back in zip(quantized, quantize, dequantize, strict=True):
        torch.library.opcheck(op, arguments, test_utils=checks)
        packed, ranges, *numbers = op(*arguments)
        arguments = packed, ranges, *how, *(numbers or [ROTATED])
        torch.library.opcheck(back, arguments, test_utils=checks)
