"""The torch ops: opcheck, fakes that are right about strides, schemas, tracing."""

import pytest
import torch
from samples import DTYPES, LAYOUTS, encoded, laid_out, load_table, name_of, normal, packed_of, same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fewbit.errors import FewbitError
from fewbit.functional.attention.attention import How
from fewbit.functional.attention.attention import _gradients_op as attention_gradients
from fewbit.runtime.format import layout
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.ops import activation_ops, dense_ops, traced_copies

GELU = load_table("gelu", 3)
TEXT = Encoding.of(GELU).text
DRAWN = load_table("gelu", 2, objective="unbiased")
DRAWN_TEXT = Encoding.of(DRAWN).text
SOME = ["vector", "empty", "scalar", "transposed", "channels last", "stepped", "expanded"]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def check(op, *arguments, **keywords):
    torch.library.opcheck(op, arguments, keywords, test_utils=CHECKS)


def seed(device):
    return torch.tensor([3], dtype=torch.int64, device=device)


@pytest.mark.parametrize("name", SOME)
def test_opcheck(device, name):
    for dtype in DTYPES if name == "vector" else DTYPES[:1]:
        x = laid_out(name, dtype, device)
        for text, key in ((TEXT, None), (DRAWN_TEXT, seed(device))):
            stride = list(layout.dense_stride(x))
            for op in (activation_ops.encode_op, traced_copies.encode_kept_op):
                check(op, x, text, stride, key)
            packed = activation_ops.encode_op(x, text, stride, key)
            check(activation_ops.decode_mul_op, x, packed, text, stride)


def test_opcheck_of_packing(device):
    codes = torch.arange(70, dtype=torch.uint8, device=device) % 8
    check(dense_ops.pack_op, codes, 3)
    check(dense_ops.pack_op, codes.view(7, 10).t(), 3)
    check(dense_ops.unpack_op, dense_ops.pack_op(codes, 3), 3, 70)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_opcheck_of_masks(device, dtype):
    mask = (torch.arange(70, device=device) % 3 > 0).to(dtype)
    check(dense_ops.pack_mask_op, mask)
    check(dense_ops.pack_mask_op, mask.view(7, 10).t())
    packed = dense_ops.pack_mask_op(mask)
    assert packed.numel() == 3
    check(dense_ops.unpack_mask_op, packed, 70, dtype=dtype)
    assert torch.equal(dense_ops.unpack_mask_op(packed, 70, dtype=dtype), mask)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fakes_have_the_real_strides(device, name):
    x = laid_out(name, device=device)
    stride = list(layout.dense_stride(x))

    def results(x):
        packed, *kept = traced_copies.encode_kept_op(x, TEXT, stride)
        product = activation_ops.decode_mul_op(x, packed, TEXT, stride)
        return activation_ops.encode_op(x, TEXT, stride), packed, *kept, product

    with FakeTensorMode() as mode:
        fake_x = mode.from_tensor(x)
        assert list(layout.dense_stride(fake_x)) == stride
        fake = results(fake_x)
    for a, b in zip(results(x), fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_values(device, dtype):
    x = normal((77,), dtype, device)
    packed = activation_ops.encode_op(x, TEXT, [1])
    assert packed.tolist() == encoded(GELU, x).tolist()
    kept, one = traced_copies.encode_kept_op(x, TEXT, [1])
    assert kept.tolist() == packed.tolist() and one == 1 and one.shape == ()
    drawn = activation_ops.encode_op(x, DRAWN_TEXT, [1], seed(device))
    assert drawn.tolist() == encoded(DRAWN, x, 3).tolist()
    codes = dense_ops.unpack_op(packed, 3, 77)
    assert packed_of(codes.cpu().numpy(), 3).tolist() == packed.tolist()
    lut = torch.tensor(Encoding.of(GELU).lut64).to(device)
    product = activation_ops.decode_mul_op(torch.ones_like(x), packed, TEXT, [1])
    assert same(product, lut[codes.long()].to(torch.float32).to(dtype)) or dtype == torch.float64


@pytest.mark.parametrize("shape", [(2, 2, 5, 4), (2, 1, 5, 1), (1, 2, 1, 3), (3, 2, 0, 4)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)])
def test_results_of_attention_are_their_fakes(shape, order):
    """In strides, also those of dimensions of size 1, which say nothing; and in memory of their own."""
    place = [order.index(dim) for dim in range(4)]
    x = [normal([shape[dim] for dim in order], seed=i).permute(place) for i in range(4)]
    mask = normal((shape[2], shape[2])) if shape[2] else None
    given = *x[:3], mask, None, x[3:], [True, True, True, mask is not None, False], None, *How()
    real = attention_gradients(*given)
    with FakeTensorMode() as mode:
        fake = attention_gradients(*tree_map_only(torch.Tensor, mode.from_tensor, given))
    places = [tensor.untyped_storage().data_ptr() for tensor in (*x, *real)]
    assert len(set(places)) == len(places) or not x[0].numel()
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert a.storage_offset() == b.storage_offset() == 0


def test_codes_have_no_gradient(device):
    x = normal((40,), device=device).requires_grad_()
    packed, one = traced_copies.encode_kept_op(x, TEXT, [1])
    assert not packed.requires_grad and not one.requires_grad


def test_a_text_that_is_no_encoding_is_refused(device):
    with pytest.raises(FewbitError, match="expected the text of a table's encoding"):
        activation_ops.encode_op(normal((4,), device=device), "gelu", [1])


def test_dtensors_are_refused(tmp_path):
    """An op called with a DTensor raises one line. Layers call ops with local tensors (tests/parallel)."""
    from torch import distributed
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    from fewbit.errors import InputError

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(normal((4, 64)), mesh, [Replicate()]).requires_grad_()
        seed = torch.zeros(1, dtype=torch.int64)
        with pytest.raises(InputError, match="got a DTensor: .*to_local") as raised:
            torch.ops.fewbit.quantize(x, seed, 2, 64, "uniform")
        assert "\n" not in str(raised.value)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_a_transposed_input(mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    import fewbit.functional as F

    x = normal((5, 7))
    traced = make_fx(lambda x: F.gelu(x.t().requires_grad_()), tracing_mode=mode)(x)
    torch.testing.assert_close(traced(x), torch.nn.functional.gelu(x.t()))


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_traces_ops_only(pre_dispatch):
    from torch.fx.experimental.proxy_tensor import make_fx

    import fewbit.functional as F

    x = normal((50,)).requires_grad_()

    def step(x):
        return torch.autograd.grad(F.gelu(x).sum(), x)[0]

    traced = make_fx(step, pre_dispatch=pre_dispatch)(x)
    targets = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    encode = "encode_kept" if pre_dispatch else "encode"
    assert {f"fewbit.{encode}.default", "fewbit.decode_mul.default"} <= targets
    y = normal((50,), seed=5).requires_grad_()
    assert same(traced(y), step(y))
