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
    compiled(net, 8)
    assert 0 < relative(gradient(net, net, x), exact) < 0.02
    assert fewbit.saved_bytes(net, x).total < 0.4 * kept


@pytest.mark.parametrize("overrides", [{}, {"inner.0": 8}], ids=str)
def test_overrides_are_paths_in_a_block(overrides):
    net, x = model(2), normal((4, 32, WIDTH), scale=1.0)
    (partitioner,) = compiled(net, 2, overrides=overrides)
    gradient(net, net, x)
    assert (8 in {row.bits for row in partitioner.report.rows}) == bool(overrides)


def test_a_copy_of_a_model_is_not_compiled():
    net, x = model(2), normal((4, 32, WIDTH), scale=1.0)
    exact = gradient(net, net, x)
    compiled(net, 2)
    other = copy.deepcopy(net)
    assert torch.equal(gradient(other, other, x), exact)


def test_blocks_of_several_classes():
    torch.manual_seed(0)
    plain = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    alone = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    net = nn.ModuleList(
        [block(), plain[0], block(), plain[1], nn.Linear(WIDTH, WIDTH), nn.ModuleList([alone])]
    )
    assert len(compiled(net, 4)) == 2
    assert net[0]._compiled_call_impl is not None and net[1]._compiled_call_impl is not None
    assert net[4]._compiled_call_impl is None and alone._compiled_call_impl is None
    assert net[0].inner._compiled_call_impl is None


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
