"""The layer between Python and the kernels: arguments by position and by name, and what is refused."""

import inspect

import numpy as np
import pytest
import torch

from fewbit.runtime.backends import native  # noqa: F401, lets the kernels read tensors
from fewbit.runtime.format.tensor_checks import check_dense

kernels = pytest.importorskip("fewbit._kernels")  # absent only if it was not built
CPU = kernels.Cpu("baseline")
CODES = torch.arange(64, dtype=torch.uint8).remainder(8)
SHAPE = 2, 64, 64, 2, 1


def packed_with(*arguments, **named):
    """Return the words that `pack` writes. The argument `packed` is added by name if it is not among the given ones."""
    packed = torch.zeros(6, dtype=torch.int32)
    if len(arguments) < 3:
        named = {"packed": packed} | named
    CPU.pack(*arguments, **named)
    return packed


def test_arguments_by_position_and_by_name():
    expected = packed_with(CODES, 3)
    planes = [sum((int(code) >> p & 1) << i for i, code in enumerate(CODES[:32])) for p in range(3)]
    assert expected[:3].view(torch.uint32).tolist() == planes
    assert torch.equal(packed_with(codes=CODES, bits=3), expected)
    # Python does not intern a name that a program computes.
    assert torch.equal(packed_with(CODES, **{"".join(["bi", "ts"]): np.int64(3)}), expected)


def test_defaults_are_those_of_the_signature():
    parameters = inspect.signature(CPU.squares).parameters
    assert list(parameters) == ["x", "shape", "out", "mean", "rstd", "inner", "channels"]
    defaults = [parameter.default for parameter in parameters.values()][3:]
    assert defaults == [None, None, 1, None]
    x, shape, results = torch.randn(2, 64), kernels.CopyShape(*SHAPE), []
    for rest in ((), defaults):
        out = torch.zeros(2)
        CPU.squares(x, shape, out, *rest)
        results.append(out)
    assert torch.equal(*results) and results[0].all()
    assert CPU.pack.__doc__.startswith("Pack n uint8 codes")


WRONG = [  # (function, arguments, named arguments, message)
    (CPU.pack, (CODES, 3), {}, "pack: missing the argument packed"),
    (CPU.pack, (CODES, 3, None, 1), {}, "pack: expected fewer arguments, got 4"),
    (CPU.pack, (CODES, 3), {"bits": 3}, "pack: expected one value, got two for the argument bits"),
    (CPU.pack, (CODES, 3), {"word": 3}, "pack: unexpected argument word"),
    (CPU.pack, (CODES, 2.5, None), {}, "pack: bits: expected an integer of 64 bits, got float"),
    (CPU.pack, (CODES, 1 << 80, None), {}, "pack: bits: expected an integer of 64 bits, got int"),
    (
        CPU.pack,
        (CODES.numpy(), 3, None),
        {},
        "pack: codes: expected torch.Tensor, a tuple of four integers or None, got ndarray",
    ),
    (CPU.pack, ((0, 0), 3, None), {}, "pack: codes: expected torch.Tensor, a tuple .*, got tuple"),
    (CPU.squares, (CODES, 5, None), {}, "squares: shape: expected an instance .*, got int"),
    (kernels.Cpu, (3,), {}, "Cpu: isa: expected a text, got int"),
    (kernels.CopyShape, SHAPE[:4], {}, "CopyShape: missing the argument kind"),
]


@pytest.mark.parametrize(("function", "arguments", "named", "message"), WRONG)
def test_wrong_arguments_are_refused(function, arguments, named, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        function(*arguments, **named)


def test_an_integer_of_more_than_32_bits_is_refused():
    with pytest.raises(ValueError, match=f"^bits: expected an integer of 32 bits, got {1 << 40}$"):
        CPU.pack(CODES, 1 << 40, None)


def test_classes_are_made_by_functions_alone():
    with pytest.raises(TypeError, match="cannot create 'fewbit._kernels.Cpu' instances"):
        type(CPU)()


SHAPES = [  # (shape, strides)
    ((4, 16), (16, 1)),
    ((4, 16), (1, 4)),
    ((2, 4, 2, 4), (32, 1, 16, 4)),
    ((1, 64), (7, 1)),
    ((64, 1), (1, 9)),
    ((64,), (1,)),
    ((0, 5), (9, 9)),
    ((64,), (2,)),
    ((4, 16), (0, 1)),
    ((2, 2, 16), (16, 16, 1)),
    ((8, 8), (9, 1)),
    ((2, 3), (1, 1)),
]


@pytest.mark.parametrize(("shape", "strides"), SHAPES)
def test_dense_tensors_are_those_of_check_dense(shape, strides):
    codes = torch.zeros(256, dtype=torch.uint8).as_strided(shape, strides)
    packed = torch.zeros(kernels.packed_words(codes.numel(), 3), dtype=torch.int32)
    expected = None
    try:
        check_dense(codes)
    except ValueError as error:
        expected = str(error)
    if expected is None:
        CPU.pack(codes, 3, packed)
        return
    with pytest.raises(ValueError) as raised:
        CPU.pack(codes, 3, packed)
    assert str(raised.value) == expected


def test_tensors_without_memory_are_refused_in_one_line():
    for tensor in (CODES.to("meta"), CODES.to_sparse()):
        with pytest.raises(
            RuntimeError, match="expected a tensor with memory on the CPU"
        ) as raised:
            CPU.pack(tensor, 3, None)
        assert "\n" not in str(raised.value)


def test_dtypes_are_read_as_torch_writes_them():
    for name in kernels.DTYPES:
        x = torch.zeros(32, dtype=getattr(torch, name))
        with pytest.raises(ValueError, match=f"expected .* got 32 {name} on the CPU$"):
            CPU.unpack(x, 3, x)
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="got 32 of no known dtype on the CPU$"):
            CPU.unpack(torch.zeros(32, dtype=dtype), 3, CODES[:32])
