"""Every backend against NumPy: the packed format, the codes, the products and the draws."""

import inspect
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import (
    ACTIVATIONS,
    DTYPES,
    LARGE,
    LAYOUTS,
    SIZES,
    adversarial,
    encoded,
    ids,
    in_storage_order,
    is_dense,
    kept_bits,
    laid_out,
    levels_of,
    load_table,
    name_of,
    normal,
    packed_of,
    same,
    scaled,
)

from fewbit import functions
from fewbit.errors import FewbitError, TableError
from fewbit.runtime import backends
from fewbit.runtime.backends import reference
from fewbit.runtime.format import layout
from fewbit.runtime.format.encoding import Encoding, gray, packed_words
from fewbit.runtime.ops import activation_ops

BITS = range(1, 9)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def codes_of(n, bits, seed=0):
    return np.random.default_rng([seed, n, bits]).integers(0, 1 << bits, n, dtype=np.uint8)


def make_table(levels, breaks, codes, closed=None, bits=8):
    """Return a table of numbers that no function has."""
    given = {"levels": levels, "breaks": breaks, "codes": codes, "closed": closed}
    return replace(load_table("gelu", 3), function="made_up", bits=bits, **given)


def seed_tensor(seed, device):
    return torch.tensor([seed], dtype=torch.int64, device=device)


def check_encoding(backend, table, x, seed=None):
    """Check the packed bytes of one dense x, and then the products with a gradient and with an expanded number."""
    encoding = Encoding.of(table)
    given_seed = None if seed is None else seed_tensor(seed, x.device)
    packed = backend.kernels.encode(x, encoding, given_seed)
    assert packed.dtype == torch.int32 and packed.device == x.device
    assert packed.cpu().numpy().tolist() == encoded(table, x, seed).tolist()
    grad = normal(x.shape, x.dtype, x.device, seed=5)
    grad = torch.empty_like(x).copy_(grad)
    for factors in (grad, torch.full((), -0.3, dtype=x.dtype, device=x.device).expand(x.shape)):
        out = torch.full_like(x, 7.0)
        backend.kernels.decode_mul(factors, packed, encoding, out)
        order = in_storage_order if factors is grad else torch.Tensor.flatten
        expected = scaled(table, levels_of(table, x, seed), order(factors))
        assert same(in_storage_order(out), expected)


# -- seeds -----------------------------------------------------------------------------------------------------


def test_seeds_are_those_of_splitmix64(backend):
    """The first numbers of SplitMix64 from the seed 0, by its authors' program."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    counter = seed_tensor(0, backend.device)
    drawn = [*backend.kernels.draw_seeds(counter, 2), *backend.kernels.draw_seeds(counter, 1)]
    assert [int(seed) % 2**64 for seed in drawn] == expected
    assert backend.kernels.draw_seeds(counter, 0).shape == (0,)
    many = backend.kernels.draw_seeds(seed_tensor(0, backend.device), 1000)
    assert torch.equal(many[:3], torch.stack(drawn))
    assert len(set(many.tolist())) == 1000


# -- the packed format -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_pack_and_unpack(backend, bits):
    for n in (*SIZES, LARGE):
        codes = codes_of(n, bits)
        packed = backend.kernels.pack(torch.from_numpy(codes).to(backend.device), bits)
        assert packed.dtype == torch.int32 and packed.shape == (packed_words(n, bits),)
        assert np.array_equal(packed.cpu().numpy(), packed_of(codes, bits))
        assert packed.numel() == bits * -(-n // 32)
        back = backend.kernels.unpack(packed, bits, n)
        assert back.dtype == torch.uint8 and np.array_equal(back.cpu().numpy(), codes)


def test_memory_beside_the_results_is_left_alone(backend):
    table = load_table("gelu", 3)
    storage = torch.full((200,), 9.0, device=backend.device)
    encoding = Encoding.of(table)
    x = normal((77,), device=backend.device)
    packed = backend.kernels.encode(x, encoding, None)
    backend.kernels.decode_mul(x, packed, encoding, storage[50:127])
    assert (storage[:50] == 9).all() and (storage[127:] == 9).all()
    y = torch.full((200,), 9.0, device=backend.device)
    if backend.kernels.forward(x, "gelu", (), encoding, None, y[50:127]) is not None:
        assert (y[:50] == 9).all() and (y[127:] == 9).all()


# -- encode and decode_mul -------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("bits", BITS)
def test_every_size(backend, bits, dtype):
    table = load_table("gelu", bits)
    for n in SIZES if dtype == torch.float32 or bits in (1, 3) else SIZES[::7]:
        check_encoding(backend, table, normal((n,), dtype, backend.device))


@dtypes
def test_a_start_off_the_vector_grid(backend, dtype):
    x = normal((301,), dtype, backend.device)
    for start in (1, 2, 3, 5, 7):
        check_encoding(backend, load_table("mish", 2), x[start : start + 257])


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_at_and_beside_every_break(backend, sample):
    for dtype in DTYPES:
        for bits in (1, 3):
            table = sample.table(bits)
            check_encoding(backend, table, adversarial(table, dtype, backend.device))


@dtypes
@pytest.mark.parametrize("function", ["gelu", "hardshrink", "selu"])
def test_tables_of_intervals(backend, function, dtype):
    for bits in (1, 2, 3, 4):
        table = load_table(function, bits, form="intervals")
        check_encoding(backend, table, adversarial(table, dtype, backend.device))


@dtypes
def test_strange_tables(backend, dtype):
    """Tables have no break, breaks outside float32's range or closer than its grid, and all sides."""
    tables = [
        make_table([0.5], [], [0]),
        make_table([0.0, 1.0], [-1e300, 1e300], [1, 0, 1], bits=1),
        make_table([0.0, 1.0], [-1e300, 1e300], [1, 0, 1], ["left", "left"], bits=1),
        make_table([-1.0, 0.0, 1.0], [1.0, 1.0 + 2e-16, 1.0 + 1e-9], [1, 0, 2, 1], bits=2),
        make_table(
            [-1.0, 0.0, 1.0],
            [1.0, 1.0 + 2e-16, 1.0 + 1e-9],
            [1, 0, 2, 1],
            ["left", "right", "left"],
            bits=2,
        ),
        make_table([0.0, 1.0, 2.0], [0.0, 5e-324, 1e-46], [2, 0, 1, 2], ["left"] * 3, bits=2),
        make_table([0.0, 1.0, 2.0], [-1e-46, -5e-324, 0.0], [2, 0, 1, 2], ["right"] * 3, bits=2),
    ]
    for table in tables:
        check_encoding(backend, table, above_the_lowest(adversarial(table, dtype, backend.device)))


def above_the_lowest(x):
    """Return the breaks without the lowest number of the dtype. Breaks below it move up to it, to stay finite."""
    return x[x != torch.finfo(x.dtype).min]


@pytest.mark.parametrize(
    "count", [*range(34), 63, 64, 65, 127, 128, 255, 256, 511, 512, 1023, 1024, 5000]
)
def test_any_number_of_breaks(backend, count):
    """Codes jump by any number of planes. Tables of more than 2,048 breaks are for the reference backend."""
    random = np.random.default_rng(count)
    breaks = np.sort(random.normal(size=count))
    codes = random.integers(0, 256, count + 1)
    for i in range(1, count + 1):
        codes[i] = (codes[i] + (codes[i] == codes[i - 1])) % 256
    sides = random.choice(["left", "right"], count).tolist()
    table = make_table(np.linspace(-1, 1, 257)[:256] + 0.0, breaks, codes, sides)
    for dtype in (torch.float32, torch.float64):
        check_encoding(backend, table, adversarial(table, dtype, backend.device))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(backend, name):
    """`activation_ops.encode` and `activation_ops.decode_mul` count in storage order if dense, else in logical order."""
    for dtype in DTYPES:
        check_layout(backend, name, dtype)


def check_layout(backend, name, dtype):
    table = load_table("gelu", 4)
    encoding = Encoding.of(table)
    x = laid_out(name, dtype, backend.device)
    packed = activation_ops.encode(x, encoding, None)
    assert packed.tolist() == encoded(table, x).tolist()
    assert layout.is_dense(x) == is_dense(x) or x.numel() == 0
    stride = layout.dense_stride(x)
    for other in (x, torch.ones((), dtype=dtype, device=backend.device).expand(x.shape)):
        out = activation_ops.decode_mul(other, packed, encoding, stride)
        assert out.stride() == tuple(stride)
        level = levels_of(table, x)
        order = in_storage_order if is_dense(x) else torch.Tensor.flatten
        expected = scaled(table, level, order(torch.empty_like(out).copy_(other)))
        assert same(order(out), expected)


@dtypes
def test_products_round_once_to_nearest_even(backend, dtype):
    """Levels make ties, subnormals and overflow of all 16-bit gradients. The oracle rounds a float32 product."""
    levels = [-1.5 * 2.0**-9, 0.0, 2.0**-10, 1.0, 1 + 2.0**-12, 1 + 2.0**-9, 3.0, 2.0**15]
    table = make_table(levels, np.arange(7.0), np.arange(8), bits=3)
    if dtype.itemsize == 2:
        grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        limits = torch.finfo(dtype)
        special = [limits.max, limits.tiny, limits.smallest_normal * 3, -limits.tiny * 0.75]
        special += [0.0, -0.0, torch.inf, -torch.inf, torch.nan]
        grad = torch.cat([torch.tensor(special, dtype=dtype), normal((4000,), dtype, scale=1e-4)])
    grad = grad.to(backend.device)
    for level in range(8):
        codes = torch.full(grad.shape, int(gray(level)), dtype=torch.uint8, device=grad.device)
        out = torch.empty_like(grad)
        packed = backend.kernels.pack(codes, 3)
        backend.kernels.decode_mul(grad, packed, Encoding.of(table), out)
        assert same(out, scaled(table, np.full(grad.shape, level), grad))


# -- draws -----------------------------------------------------------------------------------------------------

SEEDS = [0, 1, -1, 2**32 + 5, 2**63 - 1, -(2**63), 1234567890123456789]


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_draws(backend, bits, dtype):
    table = load_table("gelu", bits, objective="unbiased")
    for n in (0, 1, 31, 32, 33, 257, 4097):
        check_encoding(backend, table, normal((n,), dtype, backend.device), seed=SEEDS[n % 7])
    check_encoding(backend, table, adversarial(table, dtype, backend.device), seed=17)


@pytest.mark.parametrize("function", ["selu", "hardtanh", "hardshrink"])
def test_draws_with_jumps_on_either_side(backend, function):
    table = load_table(function, 2, objective="unbiased")
    x = adversarial(table, torch.float32, backend.device)
    for seed in SEEDS:
        check_encoding(backend, table, torch.cat([x, x, normal((99,), device=x.device)]), seed=seed)


def test_uniform_at_indices_past_32_bits(monkeypatch):
    """The counter's second word is used: the reference computes element 2**32 + e by shifting its index."""
    from fewbit.table import philox

    arange = torch.arange
    shift = 2**32 - 3
    monkeypatch.setattr(torch, "arange", lambda n, **options: arange(n, **options) + shift)
    drawn = reference.uniform(torch.tensor([12345]), 9)
    assert drawn.tolist() == philox.uniform(12345, np.arange(9) + shift).tolist()


# -- fused forwards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_fused_forward_packs_what_encode_packs(backend, sample):
    for dtype in DTYPES:
        check_fused(backend, sample, dtype)


def check_fused(backend, sample, dtype):
    table = sample.table(3)
    x = torch.cat([adversarial(table, dtype), normal((1000,), dtype)]).to(backend.device)
    parameters = sample.parameters or tuple(functions.get(sample.function).parameters.values())
    before, y = x.clone(), torch.full_like(x, 7)
    packed = backend.kernels.forward(x, sample.function, parameters, Encoding.of(table), None, y)
    assert same(x, before)
    if packed is None:
        assert (y == 7).all()
        return
    assert packed.tolist() == encoded(table, before).tolist()
    for n in (1, 31, 33, 500):
        part = torch.full_like(x[:n], 7)
        backend.kernels.forward(x[:n], sample.function, parameters, Encoding.of(table), None, part)
        assert same(part, y[:n]), n
    into = x.clone()
    backend.kernels.forward(into, sample.function, parameters, Encoding.of(table), None, into)
    assert same(into, y), "in place and out of place differ"


@pytest.mark.parametrize("function", ["gelu", "silu", "relu6"])
def test_fused_forward_draws_what_encode_draws(backend, function):
    table = load_table(function, 2, objective="unbiased")
    x = normal((1003,), device=backend.device)
    seed = seed_tensor(77, x.device)
    y = torch.empty_like(x)
    packed = backend.kernels.forward(x, function, (), Encoding.of(table), seed, y)
    assert packed is None or packed.tolist() == encoded(table, x, 77).tolist()


# -- properties of an encoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_encoding_is_the_table(sample):
    for bits in (1, 3) if sample.parameters else BITS:  # tables of other parameters are solved here
        table = sample.table(bits)
        encoding = Encoding.of(table)
        assert encoding.bits == kept_bits(table) <= table.bits
        level = np.arange(len(table.levels))
        assert encoding.lut64[gray(level)].tolist() == table.levels.tolist()
        assert encoding.lut32.tolist() == encoding.lut64.astype(np.float32).tolist()
        assert np.isfinite(encoding.breaks32).all() and (np.diff(encoding.breaks32) >= 0).all()
        assert encoding.breaks32.dtype == np.float32 and encoding.breaks64.dtype == np.float64
        assert len(encoding.breaks32) == len(encoding.flips)
        assert len(encoding.breaks64) == len(encoding.flips) == table.n_pieces - 1


def test_an_encoding_is_one_object_and_survives_its_text():
    import pickle

    table = load_table("gelu", 3)
    encoding = Encoding.of(table)
    assert Encoding.of(table) is encoding is Encoding.parse(encoding.text)
    assert pickle.loads(pickle.dumps(encoding)) is encoding
    assert Encoding.of(replace(table, weight={"kind": "normal", "mean": 0.0, "std": 1.0})) is (
        encoding
    ), "what made a table is no part of it at run time"
    unbiased = load_table("relu6", 2, objective="unbiased")
    again = Encoding.parse(Encoding.of(unbiased).text)
    assert again.unbiased and again.knots == unbiased.knots


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"bits": 1}', "{", "null", '"a"'])
def test_a_text_that_is_no_encoding(text):
    with pytest.raises(TableError, match="expected the text of a table's encoding, got"):
        Encoding.parse(text)


def test_backends_have_the_attributes_that_are_documented():
    native = pytest.importorskip("fewbit.runtime.backends.native", exc_type=ImportError)
    assert isinstance(reference.name, str) and isinstance(native.cpu().name, str)
    for name in set(reference.__all__) - {"name"}:
        assert getattr(reference, name).__doc__, name
        theirs = inspect.signature(getattr(native.Kernels, name)).parameters
        expected = inspect.signature(getattr(reference, name)).parameters
        found = [(parameter.name, parameter.default) for parameter in theirs.values()]
        assert found[1:] == [(one.name, one.default) for one in expected.values()], name


# -- The choice of a backend -------------------------------------------------------------------------------------


def test_an_old_driver_means_the_reference_backend_and_one_warning(monkeypatch):
    native = pytest.importorskip("fewbit.runtime.backends.native", exc_type=ImportError)
    reason = "the driver supports CUDA 12.4, these kernels need 13.0"
    monkeypatch.setattr(native, "cuda_unusable", lambda device: reason)
    monkeypatch.setattr(backends, "on", type(backends.on)())
    with pytest.warns(
        RuntimeWarning, match="^fewbit uses its slower reference .* on cuda:0: the driver"
    ):
        assert backends.on[torch.device("cuda", 0)] is reference
    # A second warning would be an error.
    assert backends.on[torch.device("cuda", 0)] is reference


def test_without_cuda_kernels_the_reason_is_said():
    native = pytest.importorskip("fewbit.runtime.backends.native", exc_type=ImportError)
    if native._kernels.cuda is None:
        assert native.cuda_unusable(torch.device("cuda", 0)) == "fewbit was built without CUDA"
    elif not torch.cuda.is_available():
        assert native.cuda_unusable(torch.device("cuda", 0)) == "no CUDA driver was found"


def test_without_kernels_the_reference_backend_and_one_warning(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "fewbit.runtime.backends.native", None
    )  # an import of it now fails
    monkeypatch.delattr(sys.modules["fewbit.runtime.backends"], "native", raising=False)
    monkeypatch.setattr(backends, "on", type(backends.on)())
    with pytest.warns(
        RuntimeWarning, match="^fewbit uses its slower reference backend on cpu: its compiled"
    ):
        assert backends.on[torch.device("cpu")] is reference


def test_other_devices_have_the_reference_backend():
    assert backends._choose(torch.device("mps")) is reference


def test_the_environment_names_the_instruction_set(monkeypatch):
    native = pytest.importorskip("fewbit.runtime.backends.native", exc_type=ImportError)
    there = native._kernels.cpu_isas()
    for isa in there:
        monkeypatch.setenv("FEWBIT_CPU_ISA", isa)
        assert native.cpu().name == isa
        assert native.cpu("baseline").name == "baseline"  # what a caller names comes first
    monkeypatch.setenv("FEWBIT_CPU_ISA", "")
    assert native.cpu().name == there[0]
    monkeypatch.setenv("FEWBIT_CPU_ISA", "mmx")
    with pytest.raises(
        FewbitError, match="^FEWBIT_CPU_ISA: expected one of .*baseline.*got 'mmx'$"
    ):
        native.cpu()
