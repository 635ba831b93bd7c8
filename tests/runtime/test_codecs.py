"""The codecs: their errors against the bounds, their bytes against the tensors' bytes, and odd inputs."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from fewbit.errors import InputError, MissingPackageError
from fewbit.runtime.codecs import CODECS, codec, streams
from fewbit.runtime.codecs.jpeg import _coefficients
from fewbit.runtime.codecs.payload import Exact
from fewbit.runtime.codecs.quant import ByChannel, widths_for
from fewbit.runtime.codecs.zero_value import Sparse
from fewbit.runtime.quantizers.codec import CodecSpec
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, SavedTensors

try:
    import imagecodecs
except ImportError:
    imagecodecs = None

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
UNBIASED = ("quant", "quant+zvc", "jpeg")
needs_library = pytest.mark.skipif(
    imagecodecs is None, reason="the extra `codecs` is not installed"
)
NAMES = [
    pytest.param(name, marks=needs_library) if name == "error-bounded" else name for name in CODECS
]
USABLE = [name for name in CODECS if name != "error-bounded" or imagecodecs]
names = pytest.mark.parametrize("name", NAMES)
unbiased = pytest.mark.parametrize("name", UNBIASED)
SHAPE = (6, 5, 12, 9)  # neither sides nor samples are multiples of a block or a group


def activations(kind="normal", shape=SHAPE, dtype=torch.float32, seed=0):
    """Return numbers of a kind. "smooth" is a sum of waves and a little noise."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.normal(0, 1, shape)
    if kind == "sparse":
        x = np.maximum(x, 0) * (rng.random(shape) < 0.5)
    elif kind == "dropped":  # zeros between numbers of both signs
        x = x * (rng.random(shape) < 0.3)
    elif kind == "smooth":
        rows = np.arange(shape[-2])[:, None] / shape[-2]
        phase = rng.normal(0, 1, (*shape[:2], 1, 1))
        x = np.sin(3 * rows + phase) + 0.01 * x
    elif kind == "scales":  # channels of different sizes
        x = x * 10.0 ** rng.integers(-2, 3, (shape[1], 1, 1))
    return torch.from_numpy(x).to(dtype)


def square_errors(name, x, bound, seeds):
    """Return (mean squared errors over seeds, mean errors over seeds, payload) in float64."""
    chosen, squares, errors = codec(name), 0, 0
    for seed in range(seeds):
        payload = chosen.compress(x, bound, torch.tensor([seed]))
        error = chosen.decompress(payload).double() - x.double()
        squares, errors = squares + error.square() / seeds, errors + error / seeds
    return squares, errors, payload


# -- the bound ---------------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("kind", ["normal", "sparse", "dropped", "smooth"])
@pytest.mark.parametrize("bound", [1e-3, 1e-2, 0.3])
def test_mean_squared_error_is_within_the_bound(name, kind, bound):
    squares, _, payload = square_errors(name, activations(kind), bound, 8)
    assert squares.mean() <= 1.02 * bound
    assert squares.mean() >= 0.02 * bound  # and it is used
    assert payload.nbytes < activations().nbytes / 2


@names
@pytest.mark.parametrize("kind", ["normal", "scales"])
def test_channels_have_bounds_of_their_own(name, kind):
    x = activations(kind)
    bounds = torch.tensor([1e-3, 1e-2, 0.3, 3e-3, 1e-2]) * x.square().mean((0, 2, 3))
    squares, _, payload = square_errors(name, x, bounds, 8)
    ratio = squares.mean((0, 2, 3)) / bounds
    assert (ratio <= 1.05).all()
    assert (ratio >= 0.02).all()
    least = codec(name).compress(x, float(bounds.min())).nbytes
    assert payload.nbytes < 0.9 * least


@unbiased
@pytest.mark.parametrize("kind", ["normal", "sparse", "smooth", "scales"])
@pytest.mark.parametrize("channels", [False, True])
def test_unbiased(name, kind, channels):
    """The mean error of most elements is normal with the measured variance: pooled z."""
    x, seeds = activations(kind), 40
    bound = x.square().mean((0, 2, 3)) / 50 if channels else float(x.square().mean()) / 50
    squares, errors, _ = square_errors(name, x, bound, seeds)
    variance = squares.mean((0, 2, 3), keepdim=True).expand_as(squares) / seeds
    z = (errors / variance.sqrt().clamp(min=1e-30)).mean() * math.sqrt(errors.numel())
    assert abs(z) < 4
    # Signs of what is rounded up and down do not hide a bias: the means are as far from 0 as chance says.
    assert (errors.square().mean() / variance.mean()).item() == pytest.approx(1, abs=0.1)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [False, True])
def test_hard_bound_holds_for_every_element(dtype, channels):
    x = activations("scales" if channels else "normal", dtype=dtype)
    bound = torch.tensor([1e-3, 1e-1, 1.0, 1e-4, 1e-2]) if channels else 1e-2
    chosen = codec("error-bounded")
    payload = chosen.compress(x, bound)
    assert not isinstance(payload.spec, Exact)
    limit = bound.double().view(-1, 1, 1) if channels else bound
    worst = ((chosen.decompress(payload).double() - x.double()).square() / limit).max()
    assert 0.5 < worst <= 1


@needs_library
def test_a_library_that_breaks_its_bound_is_found_out(monkeypatch):
    real = imagecodecs.sz3_decode
    monkeypatch.setattr(imagecodecs, "sz3_decode", lambda *given: real(*given) + 0.5)
    x = activations()
    payload = codec("error-bounded").compress(x, 0.01)
    assert isinstance(payload.spec, Exact)
    assert torch.equal(codec("error-bounded").decompress(payload), x)


# -- any input ---------------------------------------------------------------------------------------------

SIDES = st_numpy.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=12)
KINDS = ("normal", "sparse", "constant", "offset", "tiny", "large", "greatest", "nan", "infinite")


@st.composite
def tensors(draw, spatial):
    size = st_numpy.array_shapes(min_dims=4, max_dims=4, min_side=0, max_side=11)
    shape = draw(size if spatial else SIDES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(KINDS))
    x = rng.normal(0, 1, shape)
    if kind == "sparse":
        x = np.maximum(x - 1, 0)
    elif kind == "constant":
        x = np.full(shape, rng.normal())
    elif kind in ("offset", "tiny", "large"):
        x = {"offset": 1e4 + x, "tiny": x * 1e-6, "large": x * 1e4}[kind]
    elif kind in ("nan", "infinite") and x.size:
        x.flat[rng.integers(x.size)] = np.nan if kind == "nan" else -np.inf
    dtype = draw(st.sampled_from(DTYPES))
    if kind == "greatest":
        x = rng.uniform(-1, 1, shape) * torch.finfo(dtype).max
        x = np.where(rng.random(shape) < 0.1, torch.finfo(dtype).max, x)
    x = torch.from_numpy(np.asarray(x)).to(dtype)
    if draw(st.booleans()):
        x = x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x
    return kind, x


@pytest.mark.slow
@names
@given(data=st.data())
@settings(max_examples=100)
def test_any_tensor_comes_back_within_the_bound(name, data):
    kind, x = data.draw(tensors(spatial=name == "jpeg"))
    finite = x.double()[x.double().isfinite()]
    scale = float(finite.square().mean()) if finite.numel() else 1.0
    bound = data.draw(st.sampled_from([0.0, 1e-12, 1e-4, 1e-2, 1.0, 1e6, math.inf])) * (
        scale or 1.0
    )
    bound = 0.0 if math.isnan(bound) else bound
    payload = codec(name).compress(x, bound, torch.tensor([1]))
    values = codec(name).decompress(payload)
    assert values.shape == x.shape and values.dtype == x.dtype
    assert payload.nbytes == sum(tensor.nbytes for tensor in payload.tensors)
    assert payload.nbytes <= x.numel() * x.element_size()
    assert len(payload.tensors) == payload.spec.count
    if kind in ("nan", "infinite") and x.numel():
        assert isinstance(payload.spec, Exact)
    if isinstance(payload.spec, Exact):
        assert torch.equal(values.nan_to_num(7.0), x.nan_to_num(7.0))
        assert not values.numel() or values.data_ptr() != x.data_ptr()
        return
    errors = (values.double() - x.double()).square()
    if name == "error-bounded":
        assert errors.max() <= bound
    else:
        # No error exceeds its step. Of `quant` that is at most twice the root of the bound, in the mean; of `jpeg`
        # at most eight times, in each coefficient, of which there are up to 4 an element.
        assert errors.mean() <= (4.1 if "quant" in name else 256) * bound
        assert values.isfinite().all()


PARTS = {  # {name: (x to a view of it, whether it reaches less than the storage)}
    "samples": (lambda x: x[2:], True),
    "channels": (lambda x: x[:, 1:3], True),
    "every other column": (lambda x: x[..., ::2], True),
    "no sample": (lambda x: x[:0], True),
    "all of it": (lambda x: x.view(x.shape), False),
    "transposed": (lambda x: x.transpose(0, 1), False),
    "repeated": (lambda x: x[:1].clone().expand(4, *x.shape[1:]), False),
}


@names
@pytest.mark.parametrize("part", PARTS)
def test_a_part_does_not_hold_the_whole(name, part):
    """A tensor that is saved as it is: a part is copied, and a whole storage is not."""
    view, is_part = PARTS[part]
    x = view(activations())
    payload = codec(name).compress(x, 0)
    (kept,) = payload.tensors
    assert kept.untyped_storage().nbytes() <= x.nbytes
    assert is_part or kept.data_ptr() == x.data_ptr()
    values = codec(name).decompress(payload)
    assert torch.equal(values, x)


@names
@pytest.mark.parametrize("bound", [1e6, math.inf])
def test_a_bound_of_anything_keeps_next_to_nothing(name, bound):
    x = activations(shape=(16, 16, 16, 16))
    payload = codec(name).compress(x, bound)
    assert payload.nbytes < x.nbytes / 20
    assert codec(name).decompress(payload).isfinite().all()


@names
def test_no_element(name):
    x = torch.zeros(3, 0, 4, 4)
    assert codec(name).decompress(codec(name).compress(x, 0.1)).shape == x.shape
    assert codec(name).compress(x, torch.zeros(0)).nbytes == 0


@pytest.mark.parametrize(
    ("tensor", "bound", "said"),
    [
        (torch.zeros(2, 3, 4, 4), -1.0, "at least 0, got -1.0"),
        (torch.zeros(2, 3, 4, 4), math.nan, "at least 0, got nan"),
        (torch.zeros(2, 3, 4, 4), torch.ones(2), r"each channel \(3\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.int32), 1.0, "got torch.int32"),
        ([1.0], 1.0, "got list"),
        (torch.zeros(2, 3, 4, 4, device="meta"), 1.0, "ordinary tensor"),
        (torch.zeros(2, 3, 4, 4), "much", "expected a number for a bound, .*, got 'much'"),
        (torch.zeros(2, 3, 4, 4), None, "got None"),
        (torch.zeros(2, 3, 4, 4), True, "got True"),
        (torch.zeros(2, 3, 4, 4), 10**400, "got 1000"),
        (torch.zeros(2, 3, 4, 4), torch.tensor(1j), "got tensor"),
    ],
)
def test_bad_input(tensor, bound, said):
    for name in USABLE:
        with pytest.raises(InputError, match=said):
            codec(name).compress(tensor, bound)


@pytest.mark.parametrize(
    ("seed", "said"),
    [
        (5, "a tensor for a seed, got int"),
        (torch.tensor([5.0]), "one int64 on cpu for a seed, got 1 of torch.float32"),
        (torch.tensor([1, 2]), "got 2 of torch.int64"),
        (torch.tensor([1], device="meta"), "on meta"),
    ],
)
def test_bad_seeds(seed, said):
    """Kernels read 8 bytes at the seed's address."""
    for name in USABLE:
        with pytest.raises(InputError, match=said):
            codec(name).compress(activations(), 0.1, seed)


# -- each codec --------------------------------------------------------------------------------------------


def test_names():
    assert all(value.name == name for name, value in CODECS.items())
    with pytest.raises(InputError, match="codec: expected quant, .*, got 'gzip'"):
        codec("gzip")


@pytest.mark.parametrize("name", CODECS)
def test_what_is_no_payload(name):
    for wrong in (None, (torch.zeros(3),)):
        message = f"^expected a Payload, got {type(wrong).__name__}$"
        with pytest.raises(InputError, match=message):
            codec(name).decompress(wrong)


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    missing = r"^the codec error-bounded needs imagecodecs: pip install 'fewbit\[codecs\]'$"
    with pytest.raises(MissingPackageError, match=missing):
        codec("error-bounded").compress(activations(), 0.1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_quant_takes_the_fewest_bits(bits):
    """The oracle cuts groups and computes their steps in NumPy."""
    x = activations(shape=(7, 300))
    square = 0.0
    for row in x.numpy().astype(np.float64):
        for group in (row[:256], row[256:]):
            square += len(group) * np.ptp(group) ** 2 / x.numel()
    needed = square / 4 / (2**bits - 1) ** 2
    spec = codec("quant").compress(x, 1.04 * needed).spec  # ranges are rounded up to bfloat16
    assert (spec.bits if isinstance(spec, QuantizedTensorSpec) else None) == bits
    if bits < 8:
        assert codec("quant").compress(x, 0.96 * needed).spec.bits == bits + 1
    else:
        assert isinstance(codec("quant").compress(x, 0.96 * needed).spec, Exact)


def test_two_valued_data_reach_the_bound():
    """The worst case has all values in the middle of a step."""
    x = torch.full((4, 256), 0.5)
    x[:, 0], x[:, 1] = 0.0, 1.0
    squares, _, payload = square_errors("quant", x, 0.2501, 20)
    assert payload.spec.bits == 1
    assert squares.mean().item() == pytest.approx(0.25 * 254 / 256, rel=1e-3)


def test_channels_that_quant_cannot_keep_stay_as_they_are():
    x = activations()
    payload = codec("quant").compress(x, torch.tensor([0.0, 1e-2, 1e-2, 1e-2, 1.0]))
    values = codec("quant").decompress(payload)
    assert isinstance(payload.spec, ByChannel)
    assert [channels for channels, _ in payload.spec.parts] == [(0,), (4,), (1, 2, 3)]
    assert torch.equal(values[:, 0], x[:, 0])
    assert not torch.equal(values[:, 1], x[:, 1])


def test_short_channels_share_the_smallest_bound():
    x = activations(shape=(8, 100))
    payload = codec("quant").compress(x, torch.linspace(1e-3, 1, 100))
    assert payload.spec == codec("quant").compress(x, 1e-3).spec


def test_widths_of_ranges_that_are_not_finite():
    ranges = torch.full((2, 2), torch.nan, dtype=torch.bfloat16)
    assert widths_for(ranges, (2, 100), torch.ones(2).double(), torch.float32) == [0, 0]


@pytest.mark.parametrize("kind", ["sparse", "dropped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bound", [1e-2, torch.tensor([1e-3, 1e-2, 1e-1, 1e-2, 1e-2])], ids=str)
def test_zero_values_lose_nothing(kind, dtype, bound):
    x, seed = activations(kind, dtype=dtype), torch.tensor([5])
    quantized = codec("quant").compress(x, bound, seed)
    payload = codec("quant+zvc").compress(x, bound, seed)
    values, expected = (codec("quant").decompress(given) for given in (payload, quantized))
    assert payload.nbytes < quantized.nbytes
    assert (values[x == 0] == 0).all()
    assert torch.equal(values[x != 0], expected[x != 0])
    if kind == "sparse":
        assert torch.equal(values, expected)


def test_bytes_of_zero_values():
    x = activations("sparse", shape=(64, 1024))
    payload = codec("quant+zvc").compress(x, 1e-3)
    assert isinstance(payload.spec, Sparse)
    n, kept, bits = x.numel(), payload.spec.nonzero, payload.spec.inner.bits
    assert payload.nbytes == n // 8 + 4 * bits * math.ceil(kept / 32) + 4 * n // 256
    assert kept <= int((x != 0).sum())


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (16, 9), (1, 1)])
def test_transform_against_the_sum_of_cosines(size):
    """One block is compared with the DCT-II of scipy."""
    from scipy.fft import dctn

    x = activations(shape=(1, 1, *size))
    height, width = (min(8, side) for side in size)
    block = np.pad(x[0, 0].numpy(), [(0, -side % min(8, side)) for side in size], mode="edge")
    expected = dctn(block[:height, :width].astype(np.float64), norm="ortho")
    assert np.allclose(_coefficients(x)[0, 0].numpy(), expected.reshape(-1), atol=1e-5)


def test_smooth_images_take_less_than_quant():
    x = activations("smooth", shape=(8, 8, 32, 32))
    bound = 1e-3 * float(x.var())
    assert codec("jpeg").compress(x, bound).nbytes < codec("quant").compress(x, bound).nbytes / 2


def test_transform_refuses_what_is_not_spatial():
    with pytest.raises(InputError, match=r"expected activations of shape \(N, C, H, W\) for jpeg"):
        codec("jpeg").compress(torch.zeros(4, 8, 16), 0.1)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_streams_come_back(data):
    shape = data.draw(st_numpy.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=40))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    most = 2.0 ** rng.integers(0, 16, (*shape[:2], 1)) * (rng.random((*shape[:2], 1)) < 0.8)
    numbers = rng.uniform(-1, 1, shape) * most * (rng.random(shape) < data.draw(st.floats(0, 1)))
    numbers = torch.from_numpy(numbers.astype(np.int32))
    words, widths, nonzeros = streams.write(numbers)
    assert torch.equal(streams.read(words, widths, shape[2], nonzeros), numbers)
    rows, n = widths.int(), shape[2]
    most = (rows % streams.SPARSE * n + rows // streams.SPARSE * n).sum() / 32
    assert words.numel() <= most + sum(
        width % streams.SPARSE + 1 for width in set(rows.flatten().tolist())
    )


# -- in layers ---------------------------------------------------------------------------------------------


@names
def test_layers_dequantize_payloads(name):
    """`CodecSpec` dequantizes payloads in another dtype and with an affine map."""
    x = activations()
    payload = codec(name).compress(x, 1e-2)
    values = codec(name).decompress(SavedTensors(*payload))
    place = QuantizedTensorSpec(8, 256, tuple(x.shape), x.stride(), x.dtype)
    spec = CodecSpec(payload.spec, place)
    scale, shift = torch.full((5, 1, 1), 2.0), torch.ones(5, 1, 1)
    assert torch.equal(spec.dequantize(payload.tensors, torch.float64), values.double())
    mapped = spec.dequantize(payload.tensors, None, (scale, shift, 12 * 9))
    assert torch.allclose(mapped, values * 2 + 1, atol=1e-6)


@names
def test_payloads_show_what_they_are_and_no_numbers(name):
    x = activations("sparse", dtype=torch.bfloat16)
    payload = codec(name).compress(x, 0.01)
    assert (
        str(payload)
        == repr(payload)
        == (
            f"Payload({name}: {SHAPE} bfloat16 in {payload.nbytes} bytes, {x.nbytes / payload.nbytes:.3g} times less)"
        )
    )


def test_payloads_show_what_kept_them_in_the_end():
    x, normal = activations("sparse"), activations()
    bounds = torch.tensor([0.01, 0.01, 0.0, 0.01, 0.01])
    for name, tensor, bound, kept in (
        ("jpeg", x, 0.0, "exact"),
        ("quant", normal, bounds, "quant"),
        ("quant+zvc", x, bounds, "quant+zvc"),
        ("quant+zvc", normal, 0.01, "quant"),  # where nothing is zero there is nothing to leave out
    ):
        shown = repr(codec(name).compress(tensor, bound))
        assert shown.startswith(f"Payload({kept}: (6, 5, 12, 9) float32 in ")
    empty = codec("quant").compress(torch.empty(0, 3), 0.1)
    assert repr(empty) == "Payload(exact: (0, 3) float32 in 0 bytes)"


@names
def test_random_numbers(name):
    """A seed determines the payload. Without a seed torch's generator does."""
    x, chosen = activations(), codec(name)

    def made(*seed):
        return chosen.decompress(chosen.compress(x, 1e-2, *seed))

    assert torch.equal(made(torch.tensor([3])), made(torch.tensor([3])))
    torch.manual_seed(0)
    first = made()
    torch.manual_seed(0)
    assert torch.equal(made(), first)
    assert (name == "error-bounded") == torch.equal(made(), first)


@unbiased
def test_devices(name, device):
    x = activations("sparse").to(device)
    payload = codec(name).compress(x, 1e-2, torch.tensor([1], device=device))
    assert all(tensor.device == x.device for tensor in payload.tensors)
    assert (codec(name).decompress(payload) - x).square().mean() <= 1e-2
