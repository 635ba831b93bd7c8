"""Layers of DTensors in one process. test_parallel.py runs them in two."""

import pytest
import torch
from samples import normal
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fewbit
import fewbit.functional as F
from fewbit.runtime.parallel.process_groups import process_groups
from fewbit.runtime.parallel.shards import has_arrived, running

CPU = torch.device("cpu")


@pytest.fixture
def mesh(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def _whole(x, mesh, placement):
    return distribute_tensor(x, mesh, [placement]).requires_grad_()


LINEAR = [
    # placements of the input, the weight and the bias; of the result and of the gradients of the three
    (Replicate(), Replicate(), Replicate(), Replicate(), Replicate(), Replicate(), Replicate()),
    (Shard(0), Replicate(), Replicate(), Shard(0), Shard(0), Partial(), Partial()),
    (Shard(1), Replicate(), Replicate(), Shard(1), Shard(1), Partial(), Partial()),
    (Replicate(), Shard(0), Shard(0), Shard(2), Partial(), Shard(0), Shard(0)),
]


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: f"{case[0]}-{case[1]}")
def test_linear_says_what_its_parts_are(case, mesh):
    """A local tensor is a part of the result or of a gradient, or a summand of it."""
    tensors = normal((4, 6, 32)), normal((8, 32)), normal((8,))
    x, weight, bias = (_whole(t, mesh, at) for t, at in zip(tensors, case[:3], strict=True))
    y = F.linear(x, weight, bias, bits=8)
    assert y.placements == (case[3],) and y.shape == (4, 6, 8)
    y.to_local().square().sum().backward()
    assert [t.grad.placements for t in (x, weight, bias)] == [(at,) for at in case[4:]]
    exact = [t.clone().requires_grad_() for t in tensors]
    nn.functional.linear(*exact).square().sum().backward()
    for found, wanted in zip((x, weight, bias), exact, strict=True):
        error = (found.grad.to_local() - wanted.grad).norm() / wanted.grad.norm()
        assert error < 0.02


def test_the_bias_of_summands_is_added_once(mesh):
    x, weight = _whole(normal((4, 32)), mesh, Shard(1)), _whole(normal((8, 32)), mesh, Shard(1))
    assert F.linear(x, weight, bits=8).placements == (Partial(),)
    bias = _whole(normal((8,)), mesh, Replicate())
    y = F.linear(x, weight, bias, bits=8)
    wanted = nn.functional.linear(*(t.to_local() for t in (x, weight, bias)))
    torch.testing.assert_close(y.full_tensor(), wanted)


def test_placements_that_need_communication_run_torchs_function(mesh):
    """The result has torch's gradient function, and nothing is quantized."""
    x = _whole(normal((4, 32)), mesh, Shard(1))
    whole = _whole(normal((8, 32)), mesh, Replicate())
    vector = _whole(normal((32,)), mesh, Replicate())
    partial = DTensor.from_local(normal((4, 32)), mesh, [Partial()]).requires_grad_()
    for run in (
        lambda: F.linear(x, whole),
        lambda: F.layer_norm(x, (32,), vector, vector),
        lambda: F.gelu(partial),
        lambda: F.mul(x, _whole(normal((4, 32)), mesh, Shard(0))),
        lambda: F.softmax(x, 1),
    ):
        saved = []

        def pack(tensor, saved=saved):
            saved.append(tensor.dtype)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = run()
        assert isinstance(y, DTensor) and set(saved) == {torch.float32}
        y.full_tensor().square().sum().backward()
        x.grad = None


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_layers_keep_the_layout(placement, mesh):
    """Shape, placements and values are torch's, and strides fit, also of tensors that are not contiguous."""
    transposed = normal((4, 6, 32)).transpose(0, 1)
    vectors = [_whole(normal((32,)), mesh, Replicate()) for _ in range(2)]
    for ours, theirs in (
        (lambda x: F.gelu(x), lambda x: nn.functional.gelu(x)),
        (lambda x: F.mul(x, x), lambda x: x * x),
        (lambda x: F.swiglu(x, x), lambda x: nn.functional.silu(x) * x),
        (
            lambda x: F.layer_norm(x, (32,), *vectors),
            lambda x: nn.functional.layer_norm(x, (32,), *vectors),
        ),
        (
            lambda x: F.rms_norm(x, (32,), vectors[0]),
            lambda x: nn.functional.rms_norm(x, (32,), vectors[0]),
        ),
    ):
        x = _whole(transposed, mesh, placement)
        found, wanted = ours(x), theirs(x)
        assert found.shape == wanted.shape and found.placements == wanted.placements
        assert found.stride() == found.to_local().stride()  # the only process has all of it
        torch.testing.assert_close(found.to_local(), wanted.to_local())


def test_attention_of_heads(mesh):
    """Attention of whole tensors, and of tensors that are sharded by sample or by head."""
    q, k, v = (normal((2, 4, 8, 16)) for _ in range(3))
    for placement in (Replicate(), Shard(0), Shard(1)):
        whole = [_whole(x, mesh, placement) for x in (q, k, v)]
        y = F.scaled_dot_product_attention(*whole, is_causal=True, bits=8)
        assert y.placements == (placement,)
        wanted = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(y.to_local(), wanted)


def test_local_tensors_know_their_shard(mesh):
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(running.place)
            return x.clone()

    from fewbit.runtime.parallel import shards

    for placement in (Replicate(), Shard(1)):
        shards.elementwise(Spy.apply, _whole(normal((4, 8)), mesh, placement))
    assert seen == [(), ((0, 0),)] and running.place == ()


def test_other_products_of_dtensors_are_torchs(mesh):
    """einsum, baddbmm and addcmul have no rule for shards, so torch's own functions run."""

    class Products(nn.Module):
        def forward(self, x):
            y = torch.einsum("nij,nkj->nik", x, 2 * x)
            return torch.addcmul(y, y, torch.baddbmm(y, x, x.transpose(1, 2)))

    model, found = Products(), []
    for _ in range(2):
        x = _whole(normal((4, 32, 16)), mesh, Replicate())
        model(x * 1).sum().backward()
        found.append(x.grad.to_local())
        fewbit.compress_(model, bits=2, verbose=False)
    assert torch.equal(*found)


def test_parameters_of_one_module_may_be_sharded_over_several_meshes(mesh):
    """torch's property for a single mesh raises an error then."""
    placement = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(placement, "ShardPlacementResult"):
        pytest.skip("this version of torch has one mesh for each module")
    meshes = [DeviceMesh.from_group(distributed.new_group([0]), "cpu") for _ in range(2)]
    infos = [placement.FSDPMeshInfo(each, shard_mesh_dim=0) for each in meshes]
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    fewbit.compress_(model, bits=2, verbose=False)

    def place(parameter):
        return placement.ShardPlacementResult(Shard(0), infos[parameter.dim() - 1])

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    model(normal((4, 8))).sum().backward()
    assert process_groups(model) == ((), ())


def test_a_single_process_has_no_groups(mesh):
    """Groups of one process are no groups, and a model without a process group has none."""
    module = fewbit.nn.Linear(8, 8)
    assert process_groups(module) == ((), ())
    x = normal((2, 2))
    assert has_arrived(x) is x
