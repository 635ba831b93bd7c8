"""The backends that run the compiled kernels of `fewbit._kernels`, on the CPU and on CUDA devices."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from fewbit import _kernels
from fewbit.config import (
    GROUP_SIZE,
    KIND_NUMBERS,
    MASKED,
    MAX_BITS,
    MIN_BITS,
    ROTATED,
    UNIFORM,
    check_rotated_size,
)
from fewbit.errors import FewbitError
from fewbit.printable import one_line
from fewbit.runtime.backends import reference
from fewbit.runtime.backends.results import QuantizedForward
from fewbit.runtime.format import groups
from fewbit.runtime.format.bit_sharing import gains_of
from fewbit.runtime.format.encoding import Encoding, mask_text, packed_words
from fewbit.runtime.format.layout import is_broadcast_scalar

_DTYPES = {getattr(torch, name): number for number, name in enumerate(_kernels.DTYPES)}
_torch_get_num_threads = ctypes.CDLL(torch._C.__file__).torch_get_num_threads
_kernels.use_torch(
    torch.Tensor,
    torch.Tensor.__dlpack_c_exchange_api__,
    ctypes.cast(_torch_get_num_threads, ctypes.c_void_p).value,
)
_kernels.use_openmp_of(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
_NUMBERS = {name: number for name, (number, _) in _kernels.FUNCTIONS.items()}
_NO_VECTORS = None, None, 1
_UNUSED_BITS = 1
"""The argument `bits` of a `CopyShape` if each sample has its own bits."""
_MOST_SAMPLES = 8192
"""The largest number of samples that one block of threads orders or divides bits among."""
_MOST_BITS_OF_BATCH_NORM = 4
# Tables with more breaks or points, which only unusual functions of a user have, do not fit the parameters of a CUDA
# kernel.
_MOST_BREAKS = 2048
_MOST_POINTS = 1800


class Kernels:
    """The compiled kernels of one device type, with the functions of `reference`, which describes them.

    Args:
        kernels: the kernels, an attribute of the extension module `fewbit._kernels`.
        widths_arguments: a function of the bits of each sample, (N,) uint8, or None, that returns the arguments by
            which a kernel of the group quantizer knows them.
    """

    def __init__(self, kernels, widths_arguments, name):
        self._kernels = kernels
        self._widths_arguments = widths_arguments
        self._no_widths = widths_arguments(None)
        self.name = name

    def register_ops(self) -> bool:
        """Let torch's dispatcher run `ops/dense_ops.py` with these kernels, without Python; return whether it does."""
        return _kernels.load_shim(torch._C.__file__) and self._kernels.register_ops(_STEP)

    def pack(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
        packed = _packed(codes.numel(), bits, codes.device)
        self._kernels.pack(codes, bits, packed)
        return packed

    def unpack(self, packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
        codes = torch.empty(n, dtype=torch.uint8, device=packed.device)
        self._kernels.unpack(packed, bits, codes)
        return codes

    def draw_seeds(self, counter: torch.Tensor, count: int) -> torch.Tensor:
        seeds = torch.empty(count, dtype=torch.int64, device=counter.device)
        self._kernels.draw_seeds(counter, seeds)
        return seeds

    def encode(self, x: torch.Tensor, encoding: Encoding, seed: torch.Tensor | None):
        table = _table(encoding)
        if table is None:
            return reference.encode(x, encoding, seed)
        packed = _packed(x.numel(), encoding.bits, x.device)
        self._kernels.encode(table, x, packed, seed)
        return packed

    def decode_mul(
        self, grad: torch.Tensor, packed: torch.Tensor, encoding: Encoding, out: torch.Tensor
    ) -> None:
        table = _table(encoding)
        if table is None:
            return reference.decode_mul(grad, packed, encoding, out)
        if not grad.is_contiguous() and is_broadcast_scalar(grad):
            grad = _element(grad, out)
        self._kernels.decode_mul(table, grad, packed, out)

    def forward(self, x, function, parameters, encoding, seed, out):
        number, table = _NUMBERS.get(function), _table(encoding)
        if number is None or table is None or x.dtype == torch.float64:
            return None
        packed = _packed(x.numel(), encoding.bits, x.device)
        self._kernels.forward(number, *(*parameters, 0.0, 0.0)[:2], table, x, out, packed, seed)
        return packed

    def can_quantize_result(self, function: str) -> bool:
        if hasattr(self._kernels, "forward_quantized"):
            return function in _NUMBERS
        return function == "relu"

    def forward_quantized(
        self,
        x,
        function,
        parameters,
        encoding,
        seed,
        out,
        qseed,
        bits,
        group_size,
        kind=UNIFORM,
    ):
        """On CUDA there is such a pass for masked copies of the results of ReLUs (csrc/cuda/kernels.h)."""
        if not hasattr(self._kernels, "forward_quantized"):
            if not self.can_quantize_result(function) or kind != MASKED:
                return None
            return self._relu_quantized(x, out, qseed, bits, group_size)
        number, table = _NUMBERS.get(function), _table(encoding)
        if number is None or table is None or x.dtype == torch.float64:
            return None
        copy = _copy(x.shape, bits, group_size, kind)
        codes = _packed(x.numel(), encoding.bits, x.device)
        packed = torch.empty(copy.words, dtype=torch.int32, device=x.device)
        ranges = _ranges(copy.rows, x.device)
        done = self._kernels.forward_quantized(
            number,
            *(*parameters, 0.0, 0.0)[:2],
            table,
            x,
            copy.shape,
            out,
            codes,
            seed,
            qseed,
            packed,
            ranges,
        )
        # The kernel does nothing if the shares of the threads would cut a group.
        return QuantizedForward(codes, packed, ranges) if done else None

    def _relu_quantized(self, x, out, seed, bits, group_size):
        copy = _copy(x.shape, bits, group_size, MASKED)
        mask = _packed(x.numel(), 1, x.device)
        packed = torch.empty(copy.words, dtype=torch.int32, device=x.device)
        ranges = _ranges(copy.rows, x.device)
        done = self._kernels.relu_quantized(x, copy.shape, out, mask, seed, packed, ranges)
        return QuantizedForward(mask, packed, ranges) if done else None

    def quantize(
        self,
        x,
        seed,
        bits,
        group_size,
        widths=None,
        words=None,
        normalize=None,
        kind=UNIFORM,
    ):
        if widths is None:
            copy = _copy(x.shape, bits, group_size, kind)
            words, rows = copy.words, copy.rows
        else:
            copy = _copy(x.shape, _UNUSED_BITS, group_size, kind)
            rows = copy.most_rows
        packed = torch.empty(words, dtype=torch.int32, device=x.device)
        ranges = torch.empty(rows, 2, dtype=torch.bfloat16, device=x.device)
        of_widths = self._no_widths if widths is None else self._widths_arguments(widths)
        self._kernels.quantize(x, copy.shape, *of_widths, seed, packed, ranges, *(normalize or ()))
        return packed, ranges

    def channel_statistics(self, x, count, normalize=None):
        out = torch.empty(count, 2, dtype=torch.bfloat16, device=x.device)
        self._kernels.channel_statistics(x, out, *(normalize or ())[:3])
        return out

    def squares(self, x, group_size, normalize=None, kind=UNIFORM):
        copy = _copy(x.shape, _UNUSED_BITS, group_size, kind)
        if copy.features < groups.LEAST_FEATURES:
            return reference.squares(x, group_size, normalize, kind)
        out = torch.empty(copy.samples, copy.groups, dtype=torch.float32, device=x.device)
        self._kernels.squares(x, copy.shape, out, *(normalize or ()))
        return out.sum(1)

    def share_bits(self, squares, total, kind):
        (samples,) = squares.shape
        if samples > _MOST_SAMPLES and squares.is_cuda:
            return reference.share_bits(squares, total, kind)
        widths = torch.empty(samples, dtype=torch.uint8, device=squares.device)
        if squares.dtype is not torch.float32 or not squares.is_contiguous():
            squares = squares.to(torch.float32).contiguous()
        self._kernels.share_bits(squares, total - MIN_BITS * samples, gains_of(kind), widths)
        return widths

    def dequantize(
        self,
        packed,
        ranges,
        bits,
        group_size,
        out,
        widths=None,
        affine=None,
        kind=UNIFORM,
        mask=None,
        channels=None,
    ) -> None:
        bits = bits if widths is None else _UNUSED_BITS
        copy = _copy(out.shape, bits, group_size, kind)
        of_widths = self._no_widths if widths is None else self._widths_arguments(widths)
        mapped = *(affine or _NO_VECTORS), mask, channels
        self._kernels.dequantize(packed, ranges, copy.shape, *of_widths, out, *mapped)

    def can_compute_batch_norm(self, bits, group_size, shape):
        """Only CUDA has kernels, for groups of 256 elements side by side, up to 4 bits and a multiple of 8 channels."""
        if not hasattr(self._kernels, "batch_norm_backward"):
            return False
        samples, features = groups.samples_of(shape)
        # Groups run across samples of fewer features.
        length = features if features >= groups.LEAST_FEATURES else samples * features
        is_full = group_size == GROUP_SIZE and length % GROUP_SIZE == 0
        return is_full and bits <= _MOST_BITS_OF_BATCH_NORM and shape[1] % 8 == 0

    def batch_norm_backward(
        self, packed, ranges, bits, group_size, grad, rstd, weight, needs_input=True
    ):
        """Sums are added up in the same order in each run."""
        copy = _copy(grad.shape, bits, group_size, ROTATED).shape
        of_weight, of_bias = torch.empty_like(rstd), torch.empty_like(rstd)
        out = torch.empty_like(grad) if needs_input else None
        floats = self._kernels.batch_norm_floats(len(rstd))
        memory = torch.empty(floats, dtype=torch.float32, device=grad.device)
        done = self._kernels.batch_norm_backward(
            packed, ranges, copy, grad, rstd, weight, memory, out, of_weight, of_bias
        )
        return (out, of_weight, of_bias) if done else None

    def grid_fixed(self, gamma, beta, bits):
        if gamma.dtype != torch.float32:
            return reference.grid_fixed(gamma, beta, bits)
        n = len(gamma)
        grid = torch.empty(_kernels.GRID_ROWS, n, dtype=torch.float32, device=gamma.device)
        self._kernels.grid_fixed(gamma, beta, bits, grid)
        return grid

    def encode_fixed(self, x, y, grid, bits, inner, normalize=None):
        packed = _packed(x.numel(), bits, x.device)
        self._kernels.encode_fixed(x, y, grid, inner, bits, packed, *(normalize or ())[:3])
        return packed

    def decode_fixed(self, packed, grid, bits, inner, out, slope=None, scale=None) -> None:
        is_activated = slope is not None
        settings = grid, inner, bits, is_activated, slope or 0.0
        self._kernels.decode_fixed(packed, *settings, out, *(scale or ()))

    def mask_fixed(self, grad, packed, grid, bits, inner, slope, out) -> None:
        self._kernels.mask_fixed(grad, packed, grid, inner, bits, slope, out)


def _element(tensor, like):
    """Return the element that an expanded tensor repeats, if it fits `like`."""
    if tensor.numel() != like.numel():
        raise ValueError(f"grad: expected {like.numel()} elements, got {tensor.numel()}")
    return tensor.data_ptr(), 1, _DTYPES.get(tensor.dtype, -1), tensor.get_device()


@lru_cache(maxsize=1024)
def _table(encoding: Encoding):
    """Return the constants that kernels read; None if there are too many."""
    if len(encoding.breaks64) > _MOST_BREAKS:
        return None
    if encoding.unbiased and len(encoding.draw.points) > _MOST_POINTS:
        return None
    return _kernels.Table(
        encoding.bits,
        encoding.initial,
        encoding.breaks32,
        encoding.flips,
        encoding.breaks64,
        encoding.flips,
        encoding.lut32,
        encoding.lut64,
        **(encoding.draw._asdict() if encoding.unbiased else {}),
    )


_STEP = _table(Encoding.parse(mask_text(1.0)))
"""The table whose code of x is x > 0. Ops in C++ refer to it, so it lives as long as the process."""


class _CopySize(NamedTuple):
    """The sizes of a tensor's copy.

    Attributes:
        shape: the sizes and settings, as the kernels read them.
        words, rows: those of the packed codes and of `ranges`, if all samples have the same bits.
        most_rows: the largest number of rows if samples have different bits.
        samples, features: the number of samples, and of elements of a sample.
        groups: the number of groups of a sample, if no group runs across samples.
    """

    shape: _kernels.CopyShape
    words: int
    rows: int
    most_rows: int
    samples: int
    features: int
    groups: int


@lru_cache(maxsize=4096)
def _copy(shape, bits: int, group_size: int, kind: str) -> _CopySize:
    """Return the sizes of a tensor's copy. Raise InputError if groups are too large for this kind."""
    check_rotated_size(kind, group_size)
    samples, features = groups.samples_of(shape)
    made = _kernels.CopyShape(samples, features, group_size, bits, KIND_NUMBERS[kind])
    most_rows = groups.most_groups(samples, features, group_size) + groups.seed_rows(kind)
    of_sample = -(-features // group_size)
    return _CopySize(made, made.words, made.rows, most_rows, samples, features, of_sample)


def _packed(n: int, bits: int, device) -> torch.Tensor:
    return torch.empty(_words(n, bits), dtype=torch.int32, device=device)


_words = lru_cache(maxsize=4096)(packed_words)


def _ranges(rows: int, device) -> torch.Tensor:
    return torch.empty(rows, 2, dtype=torch.bfloat16, device=device)


def keep_failure(error: Exception) -> None:
    """Keep the error of an op's implementation in Python for the C++ code that has called it.

    torch passes the message on only from version 2.13 on, and with Python's stack.
    """
    is_refused = isinstance(error, ValueError)
    _kernels.set_failure(is_refused, str(error) if is_refused else one_line(error))


def cpu(isa: str | None = None) -> Kernels:
    """Return the CPU kernels of `isa`, or of FEWBIT_CPU_ISA, or of the processor's best instruction set."""
    isa = isa or _asked_isa() or _kernels.cpu_isas()[0]
    return Kernels(_kernels.Cpu(isa), _widths, isa)


def _asked_isa() -> str | None:
    asked, there = os.environ.get("FEWBIT_CPU_ISA"), _kernels.cpu_isas()
    if asked and asked not in there:
        raise FewbitError(
            f"FEWBIT_CPU_ISA: expected one of {', '.join(there)}, which this processor can run; got {asked!r}"
        )
    return asked


def _widths(widths):
    return (None if widths is None else widths.contiguous(),)


def cuda() -> Kernels:
    """Return the CUDA kernels, which run on the tensor's device and torch's current stream."""
    return Kernels(_kernels.cuda, _order, "cuda")


def _order(widths):
    """Return the samples' indices, sorted by bits, and how many samples have 0, 1, ... 8 bits."""
    if widths is None:
        return None, None
    if len(widths) > _MOST_SAMPLES:
        order = torch.argsort(widths, stable=True)
        possible = torch.arange(MAX_BITS + 1, dtype=widths.dtype, device=widths.device)
        return order, (widths[None, :] == possible[:, None]).sum(1)
    order = torch.empty(len(widths), dtype=torch.int64, device=widths.device)
    counts = torch.empty(MAX_BITS + 1, dtype=torch.int64, device=widths.device)
    _kernels.cuda.order_samples(widths, order, counts)
    return order, counts


def cuda_unusable(device: torch.device) -> str:
    """Return why the CUDA kernels cannot run on the device, or ""."""
    if _kernels.cuda is None:
        return "fewbit was built without CUDA"
    usable, reason = _kernels.cuda.available(device.index)
    return "" if usable else reason
