"""fewbit.compile_blocks_: the blocks of a model share the code of one block."""

import copy

import pytest
import torch
from compiled_models import MARKS, gradient
from composed import Composed
from layers import relative
from samples import normal
from tiny_models import llama
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import fewbit
from fewbit.compiler import self_check
from fewbit.compiler.compiling import undo_compile
from fewbit.errors import InputError

pytestmark = [
    *MARKS,
    pytest.mark.inductor,
    # torch.compile asks the input of a block for its gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]
WIDTH = 64


def block():
    inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    return Composed(
        lambda own, x: x + own.inner(own.norm(x)), norm=nn.LayerNorm(WIDTH), inner=inner
    )


def model(count=6):
    torch.manual_seed(0)
    blocks = nn.ModuleList(block() for _ in range(count))

    def forward(own, x):
        x = own.first(x)
        for each in own.blocks:
            x = each(x)
        return own.last(x).square().mean()

    ends = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, WIDTH)}
    return Composed(forward, blocks=blocks, **ends)


def compiled(net, bits, **settings):
    return fewbit.compile_blocks_(net, bits, backend="aot_eager", **settings)


def test_blocks_share_their_code():
    assert self_check.failure() is None  # which compiles a graph
    torch._dynamo.utils.counters.clear()
    net, x = model(), normal((4, 32, WIDTH), scale=1.0)
    exact, usual = gradient(net, net, x), fewbit.saved_bytes(net, x).total
    (partitioner,) = compiled(net, 8)
    assert 0 < relative(gradient(net, net, x), exact) < 0.02
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert partitioner.report.graphs == 1
    assert fewbit.saved_bytes(net, x).total < 0.4 * usual
    assert {row.module for row in partitioner.report.rows} == {"norm", "inner.0"}


def test_the_rest_of_a_model_may_be_compressed():
    net, x = model(), normal((4, 32, WIDTH), scale=1.0)
    exact = gradient(net, net, x)
    fewbit.compress_(net, 8, exclude="blocks.*", verbose=False)
    kept = fewbit.saved_bytes(net, x).total
    (partitioner,) = compiled(net, 8)
    assert 0 < relative(gradient(net, net, x), exact) < 0.02
    assert partitioner.report.graphs == 1
    assert fewbit.saved_bytes(net, x).total < 0.4 * kept


@pytest.mark.parametrize("overrides", [{}, {"inner.0": 8}], ids=str)
def test_overrides_are_paths_in_a_block(overrides):
    net, x = model(2), normal((4, 32, WIDTH), scale=1.0)
    (partitioner,) = compiled(net, 2, overrides=overrides)
    gradient(net, net, x)
    assert (8 in {row.bits for row in partitioner.report.rows}) == bool(overrides)


@pytest.mark.parametrize("place", ["blocks.1", "blocks.1.inner.0", "blocks.0"])
def test_hooks_of_one_block(place):
    net, x = model(3), normal((4, 32, WIDTH), scale=1.0)
    net.get_submodule(place).register_forward_hook(lambda module, args, y: 3 * y)
    exact = net(x)
    assert len(compiled(net, 8)) == 2
    for _ in range(2):
        torch.testing.assert_close(net(x), exact)


def test_a_list_of_lists():
    torch.manual_seed(0)
    net = Composed(
        lambda own, x: own.pairs[1][1](own.pairs[1][0](own.pairs[0][1](own.pairs[0][0](x)))).sum(),
        pairs=nn.ModuleList(nn.ModuleList([block(), block()]) for _ in range(2)),
    )
    x = normal((4, 32, WIDTH), scale=1.0)
    usual = fewbit.saved_bytes(net, x).total
    (partitioner,) = compiled(net, 8)
    gradient(net, net, x)
    assert partitioner.report.graphs <= 2 and fewbit.saved_bytes(net, x).total < 0.4 * usual


def test_a_block_has_an_argument_of_any_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, block=1):
            return self.inner(x) * block

    net = nn.Sequential(Named(), Named())
    compiled(net, 2)
    assert net[0](normal((4, WIDTH)), block=2).shape == (4, WIDTH)


def around(net):
    return torch.compile(net, backend="aot_eager")


def in_place(net):
    net.compile(backend="aot_eager")
    return net


def by_regions(net):
    return pytest.importorskip("accelerate.utils").compile_regions(net, backend="aot_eager")


@pytest.mark.parametrize("compile_around", [around, in_place, by_regions])
def test_torch_compile_around_the_blocks(compile_around):
    net, x = model(), normal((4, 32, WIDTH), scale=1.0)
    exact, usual = gradient(net, net, x), fewbit.saved_bytes(net, x).total
    (partitioner,) = compiled(net, 8)
    outer = compile_around(net)
    for _ in range(2):
        assert 0 < relative(gradient(net, outer, x), exact) < 0.02
    assert partitioner.report.graphs == 1
    assert fewbit.saved_bytes(outer, x).total < 0.4 * usual


def test_torch_compile_around_the_blocks_in_one_graph():
    net, x = model(), normal((4, 32, WIDTH), scale=1.0)
    compiled(net, 8)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="has compiled this block: leave out fullgraph=True"
    ):
        torch.compile(net, backend="aot_eager", fullgraph=True)(x)


def test_fewbit_compiles_blocks_with_the_model_around_them():
    net, x = model(), normal((4, 32, WIDTH), scale=1.0)
    compiled(net, 8)
    outer = fewbit.compile(net, 8, backend="aot_eager", fullgraph=True)
    gradient(net, outer, x)
    assert outer.partitioner.report.graphs == 1


def test_undo():
    net = model(2)
    compiled(net, 2)
    assert len(compiled(net, 2)) == 1  # the hooks of the first call are no hooks of the model
    assert len(net.blocks[0]._forward_pre_hooks) == 1
    undo_compile(net)
    assert all(module._compiled_call_impl is None for module in net.modules())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_copy_of_a_model_is_not_compiled():
    net, x = model(2), normal((4, 32, WIDTH), scale=1.0)
    exact = gradient(net, net, x)
    compiled(net, 2)
    other = copy.deepcopy(net)
    assert torch.equal(gradient(other, other, x), exact)
    assert not any(module._forward_pre_hooks for module in other.modules())
    assert all(len(block._forward_pre_hooks) == 1 for block in net.blocks)


def test_blocks_of_several_classes():
    torch.manual_seed(0)
    plain = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    alone = nn.TransformerEncoderLayer(WIDTH, 4, 8)
    net = nn.ModuleList([block(), plain[0], block(), plain[1], nn.Linear(WIDTH, WIDTH), alone])
    assert len(compiled(net, 4)) == 2
    assert net[0]._compiled_call_impl is not None and net[1]._compiled_call_impl is not None
    assert net[4]._compiled_call_impl is None and alone._compiled_call_impl is None
    assert net[0].inner._compiled_call_impl is None
    undo_compile(net)
    with pytest.raises(InputError, match="matches a module in a block, got 'outer'"):
        compiled(net, 4, overrides={"inner.0": 8, "outer": 2})
    assert net[0]._compiled_call_impl is None
    assert len(compiled(net, 4, overrides={"inner.0": 8})) == 2


def test_a_model_of_transformers():
    torch.manual_seed(0)
    net, ids = LlamaForCausalLM(llama()), torch.randint(0, 60, (2, 48))

    def trained():
        net.zero_grad()
        net(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([weight.grad.flatten() for weight in net.parameters()])

    exact = trained()
    (partitioner,) = compiled(net, 8)
    assert 0 < relative(trained(), exact) < 0.03
    assert partitioner.report.graphs <= 2


@pytest.mark.parametrize(
    ("net", "settings", "message"),
    [
        (nn.Linear(2, 2), {}, "several blocks of one class"),
        (3, {}, "expected a torch.nn.Module, got int"),
        (nn.ModuleList([block(), block()]), {"backend": "eager"}, 'expected "inductor" or "aot_eager"'),
    ],
)  # fmt: skip
def test_refusals(net, settings, message):
    with pytest.raises(InputError, match=message):
        fewbit.compile_blocks_(net, 2, **settings)
