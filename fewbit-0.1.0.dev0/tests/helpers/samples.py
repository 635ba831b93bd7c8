"""The dtypes, layouts, activations and NumPy oracles that tests of the runtime share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch.nn import functional as torch_f

import fewbit
import fewbit.functional as F
from fewbit import functions

DEVICE_FACTOR = 4.0
"""The float32 error of a function on a GPU, at most, in units of the bound on a CPU (docs/concepts/runtime.md)."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (*range(66), 127, 1000, 4097)
LARGE = (
    2**15 + 2**16 + 37
)  # beyond the size from which the CPU kernels use threads, no multiple of 32
SEED = 20240607


def name_of(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def normal(shape, dtype=torch.float32, device="cpu", scale=3.0, seed=SEED) -> torch.Tensor:
    """Return normal random numbers, which are the same in every dtype and on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)


def adversarial(table, dtype, device="cpu") -> torch.Tensor:
    """Return every break and knot of the table with its neighbors in dtype, zeros, extremes, infinities and NaN."""
    points = list(table.breaks) + ([] if table.knots is None else list(table.knots.points))
    points += [0.0, -0.0, 1.0, -1.0, 6.0, 3.0, -3.0, 0.5, -0.5, 20.0, -20.0]
    exact = torch.tensor(points, dtype=torch.float64).to(dtype)
    up, down = torch.tensor(math.inf, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)
    limits = torch.finfo(dtype)
    ends = [limits.max, limits.min, limits.tiny, -limits.tiny, limits.smallest_normal / 2]
    ends += [math.inf, -math.inf, math.nan]
    near = [exact, exact.nextafter(up), exact.nextafter(down), torch.tensor(ends, dtype=dtype)]
    return torch.cat(near).to(device)


# -- layouts -------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Callable], torch.Tensor]] = {
    # A function takes `make(shape)`, which returns a contiguous tensor, and returns a view of such a tensor.
    "empty": lambda make: make((0,)),
    "empty inside": lambda make: make((3, 0, 2)),
    "empty transposed": lambda make: make((3, 0)).t(),
    "scalar": lambda make: make(()),
    "scalar of a slice": lambda make: make((5,))[3],
    "one": lambda make: make((1,)),
    "vector": lambda make: make((37,)),
    "matrix": lambda make: make((5, 7)),
    "transposed": lambda make: make((5, 7)).t(),
    "permuted": lambda make: make((2, 3, 4, 5)).permute(3, 1, 0, 2),
    "channels last": lambda make: make((2, 3, 4, 5)).to(memory_format=torch.channels_last),
    "channels last, one channel": lambda make: make((2, 1, 4, 5)).to(
        memory_format=torch.channels_last
    ),
    "channels last, one pixel": lambda make: make((2, 3, 1, 1)).to(
        memory_format=torch.channels_last
    ),
    "channels last 3d": lambda make: make((2, 3, 2, 2, 3)).to(memory_format=torch.channels_last_3d),
    "stepped": lambda make: make((70,))[::2],
    "offset": lambda make: make((70,))[3:],
    "columns": lambda make: make((5, 9))[:, 2:7],
    "rows": lambda make: make((9, 5))[2:7],
    "stepped and transposed": lambda make: make((6, 8))[::2, ::2].t(),
    "expanded": lambda make: make((5, 1)).expand(5, 7),
    "expanded scalar": lambda make: make(()).expand(4, 9),
    "expanded in front": lambda make: make((7,)).expand(3, 7),
    "overlapping": lambda make: make((40,)).as_strided((5, 7), (3, 2)),
    "size 1, odd strides": lambda make: make((40,)).as_strided((1, 5, 1, 7), (100, 7, 3, 1)),
    "size 1 at the end, odd strides": lambda make: make((35,)).as_strided((5, 7, 1), (7, 1, 11)),
    "one element, odd strides": lambda make: make((3,)).as_strided((1, 1), (9, 5)),
    "column of a matrix": lambda make: make((5, 7))[:, 3:4],
    "one expanded": lambda make: make((1,)).expand(1, 1),
    "swapped, size 1": lambda make: make((5, 1, 3)).transpose(0, 2),
}


def laid_out(layout: str, dtype=torch.float32, device="cpu", seed=SEED) -> torch.Tensor:
    return LAYOUTS[layout](lambda shape: normal(shape, dtype, device, seed=seed))


def offsets(x) -> np.ndarray:
    """Return the distance in storage of each element of x from the first, in elements and in logical order."""
    place = np.zeros(tuple(x.shape), np.int64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        shape = [1] * x.dim()
        shape[dim] = size
        place = place + (np.arange(size) * stride).reshape(shape)
    return place.reshape(-1)


def is_dense(x) -> bool:
    return np.array_equal(np.sort(offsets(x)), np.arange(x.numel()))


def in_storage_order(x) -> torch.Tensor:
    """Return x's elements in the order of the packed format (docs/concepts/runtime.md)."""
    flat = x.detach().reshape(-1)
    return flat[torch.from_numpy(np.argsort(offsets(x))).to(x.device)] if is_dense(x) else flat


# -- activations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """An activation with parameters: fewbit's, torch's (or its formula if torch has none), and the tables."""

    function: str  # as in fewbit.functions
    ours: Callable = field(repr=False)
    theirs: Callable = field(repr=False)
    parameters: tuple[float, ...] = ()
    inplace: bool = False  # True if torch's takes inplace=
    exact: bool = False  # True if one bit is exact

    @property
    def id(self) -> str:
        return self.function + "".join(f" {number:g}" for number in self.parameters)

    @property
    def bits(self) -> int:
        """The default number of bits."""
        return 1 if self.exact else 3

    def __call__(self, x, **options):
        return self.ours(x, *self.parameters, **options)

    def torch(self, x, **options):
        return self.theirs(x, *self.parameters, **options)

    def named_parameters(self) -> dict:
        names = functions.get(self.function).parameters
        return dict(zip(names, self.parameters, strict=False))

    def kinks(self) -> list[float]:
        """Return the points where the derivative jumps."""
        return list(functions.get(self.function, self.named_parameters()).kinks)

    def table(self, bits=None, **request):
        """Return the table for the parameters. request: as in fewbit.load_table."""
        parameters = tuple(self.named_parameters().items())
        return load_table(self.function, bits or self.bits, parameters, **request)


@cache
def load_table(function, bits, parameters=(), **request):
    return fewbit.load_table(function, bits, parameters=dict(parameters), **request)


def _gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _laplace(x, mu=0.707107, sigma=0.282095):
    return 0.5 * (1.0 + torch.erf((x - mu).div(sigma * math.sqrt(2.0))))


def _gelu_tanh(x, **options):
    return F.gelu(x, "tanh", **options)


SMOOTH = [
    Sample("gelu", F.gelu, torch_f.gelu),
    Sample("gelu_tanh", _gelu_tanh, lambda x: torch_f.gelu(x, approximate="tanh")),
    Sample("gelu_fast", F.gelu_fast, _gelu_fast),
    Sample("gelu_10", F.gelu_10, lambda x: torch_f.gelu(x).clip(-10, 10)),
    Sample("quick_gelu", F.quick_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    Sample("silu", F.silu, torch_f.silu, inplace=True),
    Sample("mish", F.mish, torch_f.mish, inplace=True),
    Sample("hardswish", F.hardswish, torch_f.hardswish, inplace=True),
    Sample("elu", F.elu, torch_f.elu, inplace=True),
    Sample("elu", F.elu, torch_f.elu, (1.7,), inplace=True),
    Sample("celu", F.celu, torch_f.celu, inplace=True),
    Sample("celu", F.celu, torch_f.celu, (0.6,), inplace=True),
    Sample("selu", F.selu, torch_f.selu, inplace=True),
    Sample("sigmoid", F.sigmoid, torch.sigmoid),
    Sample("logsigmoid", F.logsigmoid, torch_f.logsigmoid),
    Sample("tanh", F.tanh, torch.tanh),
    Sample("tanhshrink", F.tanhshrink, torch_f.tanhshrink),
    Sample("softsign", F.softsign, torch_f.softsign),
    Sample("softplus", F.softplus, torch_f.softplus),
    Sample("softplus", F.softplus, torch_f.softplus, (2.5, 4.0)),
    Sample("sqrtsoftplus", F.sqrtsoftplus, lambda x: torch.sqrt(torch_f.softplus(x))),
    Sample("relu_squared", F.relu_squared, lambda x: torch.square(torch_f.relu(x))),
    Sample("laplace", F.laplace, _laplace),
    Sample("laplace", F.laplace, _laplace, (0.2, 0.7)),
]
EXACT = [
    Sample("relu", F.relu, torch_f.relu, inplace=True, exact=True),
    Sample("relu6", F.relu6, torch_f.relu6, inplace=True, exact=True),
    Sample("leaky_relu", F.leaky_relu, torch_f.leaky_relu, inplace=True, exact=True),
    Sample("leaky_relu", F.leaky_relu, torch_f.leaky_relu, (0.2,), inplace=True, exact=True),
    Sample("threshold", F.threshold, torch_f.threshold, (0.0, 0.0), inplace=True, exact=True),
    Sample("threshold", F.threshold, torch_f.threshold, (0.1, 20.0), inplace=True, exact=True),
    Sample("hardtanh", F.hardtanh, torch_f.hardtanh, inplace=True, exact=True),
    Sample("hardtanh", F.hardtanh, torch_f.hardtanh, (-0.3, 2.0), inplace=True, exact=True),
    Sample("hardsigmoid", F.hardsigmoid, torch_f.hardsigmoid, inplace=True, exact=True),
    Sample("hardshrink", F.hardshrink, torch_f.hardshrink, exact=True),
    Sample("hardshrink", F.hardshrink, torch_f.hardshrink, (0.3,), exact=True),
    Sample("softshrink", F.softshrink, torch_f.softshrink, exact=True),
    Sample("softshrink", F.softshrink, torch_f.softshrink, (1.25,), exact=True),
    Sample("rrelu", F.rrelu, torch_f.rrelu, inplace=True, exact=True),
    Sample("rrelu", F.rrelu, torch_f.rrelu, (0.2, 0.4), inplace=True, exact=True),
]
ACTIVATIONS = SMOOTH + EXACT
GELU = SMOOTH[0]
RELU = EXACT[0]


def ids(samples) -> dict:
    """Return the arguments of pytest.mark.parametrize after the name."""
    return {"argvalues": samples, "ids": [sample.id for sample in samples]}


# -- oracles, in NumPy ---------------------------------------------------------------------------------------


def kept_bits(table) -> int:
    """Return the number of planes that the codes of the table's levels need."""
    return max(1, (len(table.levels) - 1).bit_length())


def packed_of(codes, bits: int) -> np.ndarray:
    """Return the packed int32 words of codes: np.packbits on each plane, little-endian."""
    codes = np.asarray(codes, np.uint8).reshape(-1)
    blocks = -(-len(codes) // 32)
    padded = np.zeros(blocks * 32, np.uint8)
    padded[: len(codes)] = codes
    planes = [
        np.packbits(padded >> p & 1, bitorder="little").view("<u4").reshape(blocks)
        for p in range(bits)
    ]
    return np.stack(planes, axis=1).reshape(-1).view(np.int32)


def levels_of(table, x, seed=None) -> np.ndarray:
    """Return the level number of each element of x, in storage order."""
    flat = in_storage_order(x).cpu().to(torch.float64).numpy()
    return table.code(flat) if seed is None else table.sample_code(flat, seed)


def encoded(table, x, seed=None) -> np.ndarray:
    """Return the packed words that every backend must make from x."""
    level = levels_of(table, x, seed)
    return packed_of(level ^ level >> 1, kept_bits(table))


def scaled(table, level, grad) -> torch.Tensor:
    """Return levels[level] * grad by the rule of docs/reference/table_schema.md. level: a NumPy array of grad's shape."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    q = torch.tensor(table.levels[np.asarray(level)]).to(wide)
    return (q * grad.cpu().to(wide)).to(grad.dtype).to(grad.device)


def gradient(table, x, grad) -> torch.Tensor:
    """Return table(x) * grad by the rule of `scaled`, in x's shape."""
    return scaled(table, table.code(x.detach().cpu().to(torch.float64).numpy()), grad)


def same(a, b) -> bool:
    """Return whether two tensors are equal bit for bit, except for the payload of NaN."""
    a, b = a.detach(), b.detach()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    both = a.isnan() & b.isnan()
    return bool((both | ((a == b) & (a.signbit() == b.signbit()))).all())


def same_sums(a, b) -> bool:
    """Return whether two results of torch's functions are equal: on the CPU as in `same`, on a GPU up to the order of sums.

    On a GPU, some of torch's functions add with atomic operations, whose order differs between runs.
    """
    if not a.is_cuda:
        return same(a, b)
    a, b = a.detach(), b.detach()
    finite = b[b.isfinite()]
    atol = 32 * torch.finfo(b.dtype).eps * float(finite.abs().max()) if finite.numel() else 0.0
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.allclose(a, b, rtol=0, atol=atol, equal_nan=True)
    )
