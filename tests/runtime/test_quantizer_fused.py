"""An activation and the copy of its result in one pass, and the arguments that CUDA kernels get."""

import numpy as np
import pytest
import torch
from quantized import ISAS, SEED, SHAPES, compiled, inputs, kinds, possible_sizes, same

from fewbit.config import MASKED
from fewbit.runtime.format.encoding import Encoding

if ISAS:
    from buffers import torch_threads

    from fewbit.runtime.backends import native

ENCODING = Encoding(2, np.arange(4.0), np.array([-1.0, 0.0, 1.0]), np.arange(4), ("right",) * 3)


def compare_forward_quantized(
    kernels, x, bits, group_size, in_place=False, *, kind, of=("silu", ENCODING)
):
    """Check bit-equality with forward and then quantize. Return False if the kernels decline."""
    (function, encoding), settings = of, (bits, group_size)
    seed, y = torch.tensor([SEED], device=x.device), torch.empty_like(x)
    codes = kernels.forward(x, function, (), encoding, None, y)
    before = x.clone()
    out = before if in_place else torch.empty_like(x)
    made = kernels.forward_quantized(
        before, function, (), encoding, None, out, seed, *settings, kind
    )
    if made is None:
        assert in_place or same(before, x)
        return False
    assert same(out, y) and torch.equal(made.codes, codes)
    packed, ranges = kernels.quantize(y, seed, *settings, None, None, None, kind)
    assert torch.equal(made.packed, packed)
    assert torch.equal(made.ranges.view(torch.int16), ranges.view(torch.int16))
    return True


@compiled
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_forward_quantized(dtype, kind):
    for isa in ISAS:
        for i, shape in enumerate([*SHAPES, (), (3, 40_001), (900, 257), (70, 1024)]):
            x = inputs(shape, dtype, "specials" if i % 3 == 0 and shape else "normal")
            for group_size in possible_sizes(kind, 32, 96, 256, 512, 65536):
                settings = 1 + i % 8, group_size, i % 3 == 1
                with torch_threads(1):
                    assert compare_forward_quantized(native.cpu(isa), x, *settings, kind=kind)


@compiled
@kinds
@pytest.mark.parametrize(
    ("shape", "group_size", "taken"),
    [
        ((300, 1024), 256, True),
        ((9000, 33), 96, True),
        ((1, 1 << 17), 256, True),
        ((2048, 65), 256, True),  # 512 samples are whole chunks
        ((600, 257), 256, False),
        ((1, 100_003), 256, False),
    ],
    ids=str,
)
def test_forward_quantized_on_threads(shape, group_size, taken, kind):
    x = inputs(shape, torch.float32, "specials")
    with torch_threads(3):
        assert compare_forward_quantized(native.cpu(), x, 3, group_size, kind=kind) == taken


STEP = Encoding(1, np.array([0.0, 1.0]), np.zeros(1), np.array([0, 1]), ("right",))


@pytest.mark.parametrize("shape", [(3, 512), (1, 256), (65, 768), (45, 32), (4, 64, 8, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_relu_and_the_masked_copy_of_its_result(backend, dtype, shape):
    """All kernels have this pass for full groups of 256 elements, in any order of dimensions. Some groups have spikes."""
    x = inputs(shape, dtype)
    x.view(-1)[::301] = 30.0
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    x = x.to(backend.device)
    for bits in (1, 2, 3, 4):
        taken = compare_forward_quantized(
            backend.kernels, x, bits, 256, kind=MASKED, of=("relu", STEP)
        )
        assert taken != backend.name.startswith("reference")


@kinds
def test_forward_quantized_where_nothing_is_fused(backend, kind):
    x, seed = torch.ones(3, 100, device=backend.device), torch.tensor([1], device=backend.device)
    rest = seed, 2, 256, kind
    assert backend.kernels.forward_quantized(x, "strange", (), ENCODING, None, x, *rest) is None
    wide = x.double()
    assert backend.kernels.forward_quantized(wide, "silu", (), ENCODING, None, wide, *rest) is None
    if backend.name not in ISAS:
        assert backend.kernels.forward_quantized(x, "silu", (), ENCODING, None, x, *rest) is None
