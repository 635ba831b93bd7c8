"""Calls of the CUDA kernels by the Python code of `native.py` and the bindings, on a machine without a GPU.

`run` needs a process of its own, in which the extension module `fewbit._kernels` has the emulated kernels. Tensors lie in the
CPU's memory, and say that they are on CUDA device 0.
"""

import ctypes
import importlib.util
import sys

import torch

SEED = torch.tensor([7])
GROUP = 64


def run(library: str, name: str) -> None:
    """Assert that a case of CASES gives the results of the reference backend. `library` is the path of the extension module."""
    spec = importlib.util.spec_from_file_location("fewbit._kernels", library)
    sys.modules["fewbit._kernels"] = kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    ctypes.CDLL(library).emulated_device(4, 0)  # 4 multiprocessors
    from fewbit.runtime.backends import native, reference

    torch.Tensor.get_device = lambda tensor: 0
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        CASES[name](native.cuda(), reference, dtype)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def same(found, expected):
    """Assert that two results of a backend's method are equal, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    else:
        assert found == expected


def close(found, expected, tolerance):
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def encoding_of(function, bits, **settings):
    from fewbit.catalog import store
    from fewbit.runtime.activations.tables import DEFAULT
    from fewbit.runtime.format.encoding import Encoding

    return Encoding.of(store.load_table(function, bits, **(DEFAULT | settings)))


def into(method, like, *arguments):
    """Return the tensor that a method writes to its argument `out`, which stands last before keywords."""
    out = torch.full_like(like, 9.0)
    method(*arguments, out)
    return out


def bits_of_codes(cuda, reference, dtype):
    codes = torch.randint(0, 8, (1000,), dtype=torch.uint8)
    packed = cuda.pack(codes, 3)
    same(packed, reference.pack(codes, 3))
    same(cuda.unpack(packed, 3, 1000), codes)


def activation(cuda, reference, dtype):
    x, encoding = 3 * normal(1003, dtype=dtype), encoding_of("silu", 3)
    y = torch.empty_like(x)
    packed = cuda.forward(x, "silu", (), encoding, None, y)
    same(packed, reference.encode(x, encoding, None))
    same(cuda.encode(x, encoding, None), packed)
    close(y, torch.nn.functional.silu(x), 4 * torch.finfo(dtype).eps)
    for grad in (normal(1003, dtype=dtype), torch.full((), 1.5, dtype=dtype).expand(1003)):
        found, expected = (
            into(backend.decode_mul, x, grad, packed, encoding) for backend in (cuda, reference)
        )
        same(found, expected)


def drawn_activation(cuda, reference, dtype):
    x, encoding = 3 * normal(1003, dtype=dtype), encoding_of("gelu", 2, objective="unbiased")
    same(cuda.encode(x, encoding, SEED), reference.encode(x, encoding, SEED))


def copies(kind, is_mixed=False, is_normalized=False):
    """Return a case that quantizes and dequantizes copies of a kind.

    Args:
        kind: the kind of the copies.
        is_mixed: whether samples have different bits.
        is_normalized: whether x is normalized before, and the values are mapped afterwards.
    """

    def case(cuda, reference, dtype):
        from fewbit.runtime.format import groups

        is_masked = kind.startswith("masked")
        x = normal(6, 320, dtype=dtype).relu() if is_masked else normal(6, 320, dtype=dtype)
        widths, words = None, None
        if is_mixed:
            widths = torch.tensor([2, 4, 1, 2, 8, 3], dtype=torch.uint8)
            words = groups.mixed_words(widths.tolist(), 320)
        normalize = affine = mask = None
        if is_normalized:
            normalize = normal(6), normal(6).abs() + 0.5, 320
            affine = normal(5), normal(5), 64
        if is_masked:
            mask = reference.encode(x, encoding_of("relu", 1), None)
        for fp32_min in (False, True):
            settings = 3, GROUP, fp32_min, widths, words, normalize, kind
            packed, ranges, spread = cuda.quantize(x, 7, *settings)
            assert spread is None
            expected = reference.quantize(x, SEED, *settings)
            same(packed, expected.packed)
            same(ranges, expected.ranges)
            found, expected = torch.empty_like(x), torch.empty_like(x)
            for backend, out in ((cuda, found), (reference, expected)):
                backend.dequantize(
                    packed, ranges, 3, GROUP, out, widths, affine, kind, mask if is_masked else None
                )
            same(found, expected)

    return case


def sums_of_squares(cuda, reference, dtype):
    x, normalize = normal(6, 320, dtype=dtype), (None, normal(320).abs(), 1)
    for kind in ("uniform", "rotated"):
        for how in (None, normalize):
            found, expected = (b.squares(x, GROUP, how, kind) for b in (cuda, reference))
            close(found, expected, 1e-5)
            same(cuda.share_bits(found, 18, kind), reference.share_bits(found, 18, kind))


def relu_and_copy(cuda, reference, dtype):
    x, encoding = normal(4, 512, dtype=dtype), encoding_of("relu", 1)
    y = torch.empty_like(x)
    codes, (packed, ranges, spread) = cuda.forward_quantized(
        x, "relu", (), encoding, None, y, 7, 2, 256, False, "masked"
    )
    assert spread is None
    same(y, x.relu())
    same(codes, reference.encode(x, encoding, None))
    expected = reference.quantize(y, SEED, 2, 256, False, None, None, None, "masked")
    same(packed, expected.packed)
    same(ranges, expected.ranges)


def kinds_of_fused_kernels(cuda, reference, dtype):
    """A kernel that makes or reads one kind of copies refuses the others, whose memory has another size."""
    from fewbit import _kernels

    def refused(call, *arguments):
        try:
            call(*arguments)
        except ValueError as error:
            return "kind: expected" in str(error)
        return False

    x, mask = normal(4, 512, dtype=dtype), torch.zeros(64, dtype=torch.int32)
    packed, ranges = torch.zeros(128, dtype=torch.int32), torch.zeros(10, 2).bfloat16()
    rows = torch.ones(4)
    for kind in range(5):
        copy = _kernels.CopyShape(4, 512, 256, 2, False, kind)
        if kind != 2:
            assert refused(_kernels.cuda.relu_quantized, x, copy, x, mask, 7, packed, ranges)
        if kind != 1:
            grads = x, rows, None, rows, x, rows, rows
            assert refused(_kernels.cuda.batch_norm_backward, packed, ranges, copy, *grads)


def batch_norm(cuda, reference, dtype):
    shape = 4, 64, 8, 8
    x, grad = (normal(*shape, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2))
    rstd, weight = normal(64).abs() + 0.5, normal(64)
    assert cuda.can_compute_batch_norm(2, 256, shape)
    normalize = normal(64), rstd, 1
    copy = cuda.quantize(x, 7, 2, 256, False, None, None, normalize, "rotated")
    arguments = copy.packed, copy.ranges, 2, 256, grad, rstd, weight
    for needs_input in (True, False):
        found, expected = (
            backend.batch_norm_backward(*arguments, needs_input) for backend in (cuda, reference)
        )
        assert (found[0] is None) == (expected[0] is None) == (not needs_input)
        for one, other in zip(found, expected, strict=True):
            if other is not None:
                close(one, other, 0.02 if dtype == torch.bfloat16 else 1e-4)


def fixed_point(cuda, reference, dtype):
    gamma, beta = normal(6), normal(6)
    grid = cuda.grid_fixed(gamma, beta, 4)
    same(grid, reference.grid_fixed(gamma, beta, 4))
    x, y, normalize = (
        normal(1200, dtype=dtype),
        normal(1200, dtype=dtype),
        (normal(24), normal(24), 50),
    )
    packed = cuda.encode_fixed(x, y, grid, 4, 200, normalize)
    same(packed, reference.encode_fixed(x, y, grid, 4, 200, normalize))
    for more in ((), (0.25,), (None, (normal(24), 50))):
        found, expected = torch.empty_like(x), torch.empty_like(x)
        cuda.decode_fixed(packed, grid, 4, 200, found, *more)
        reference.decode_fixed(packed, grid, 4, 200, expected, *more)
        same(found, expected)
    found, expected = (
        into(backend.mask_fixed, x, x, packed, grid, 4, 200, 0.25) for backend in (cuda, reference)
    )
    same(found, expected)


CASES = {
    "pack and unpack": bits_of_codes,
    "activation": activation,
    "activation with drawn codes": drawn_activation,
    "uniform": copies("uniform"),
    "uniform, mixed": copies("uniform", is_mixed=True),
    "uniform, normalized": copies("uniform", is_normalized=True),
    "rotated": copies("rotated"),
    "rotated, mixed": copies("rotated", is_mixed=True),
    "rotated, normalized": copies("rotated", is_normalized=True),
    "masked": copies("masked"),
    "unbiased": copies("unbiased"),
    "masked unbiased": copies("masked-unbiased"),
    "squares and shared bits": sums_of_squares,
    "relu and copy": relu_and_copy,
    "kinds of fused kernels": kinds_of_fused_kernels,
    "batch norm": batch_norm,
    "fixed point": fixed_point,
}

if __name__ == "__main__":
    run(*sys.argv[1:])
