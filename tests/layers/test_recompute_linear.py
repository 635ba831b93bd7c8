"""The setting recompute_linear: tensors that are computed again from the inputs of linear layers."""

import copy
import sys

import pytest
import torch
from composed import COPIES, Composed
from exact_copies import ExactSpec
from layers import relative
from samples import normal
from torch import nn
from torch.nn import functional as torch_f
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime.quantizers import linear_results
from fewbit.runtime.quantizers.copies import unquantized
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import SavedTensors

linear = sys.modules["fewbit.functional.linear"]  # the package has a function of this name
WIDTH = 64
ON = {"recompute_linear": True}
COS = normal((1, 1, 6, 8), scale=1.0, seed=1)
SIN = normal((1, 1, 6, 8), scale=1.0, seed=2)


def rotated(x):
    """Return queries that are rotated by their positions, as in transformers."""
    half = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
    return x * COS + half * SIN


def heads(x):
    return x.view(2, 6, 4, 8).transpose(1, 2)


def many(x):
    for _ in range(linear_results.MOST_OPERATIONS + 1):
        x = -x
    return x


def overwritten(x):
    with torch.no_grad():
        x.mul_(2)
    return x


def times_changed(x):
    constant = torch.ones(32)
    product = x * constant
    constant.add_(1)
    return product


FOLLOWING = {  # {name: (a function of the results of two linear layers, whether its result can be computed again)}
    "itself": (lambda x, y: x, True),
    "view": (lambda x, y: x.view(12, 32), True),
    "heads": (lambda x, y: heads(x), True),
    "permute": (lambda x, y: x.permute(2, 0, -2), True),
    "reshape of a transpose": (lambda x, y: heads(x).reshape(8, 48), True),
    "rotation": (lambda x, y: rotated(heads(x)), True),
    "slice": (lambda x, y: x[:, 1:, ::2], True),
    "dtype": (lambda x, y: x.double(), True),
    "clone": (lambda x, y: x.transpose(0, 1).clone(), True),
    "sum": (lambda x, y: x + y, True),
    "constants": (lambda x, y: 3 * (x * COS.view(6, 8).repeat(1, 4)), True),
    "difference": (lambda x, y: torch.add(x, y, alpha=-1), False),
    "product": (lambda x, y: x * y, False),
    "another operation": (lambda x, y: x.sin(), False),
    "many operations": (lambda x, y: many(x), False),
    "changed in place": (lambda x, y: overwritten(-x), False),
    "slice from the end": (lambda x, y: x[:, -3:, :-2], True),
    "concatenation with a constant": (lambda x, y: torch.cat((x, torch.ones(2, 6, 4)), -1), False),
    "changed constant": (lambda x, y: times_changed(x), False),
    "another device": (lambda x, y: -x.to("meta"), False),
    "four layers": (lambda x, y: x + y + (x + y), True),
    "no linear layer": (lambda x, y: -COS.clone().requires_grad_(), False),
}


@pytest.mark.parametrize("kind", FOLLOWING)
def test_what_follows_from_linear_layers(kind):
    x, y = (
        torch_f.linear(normal((2, 6, 16), seed=seed), normal((32, 16), seed=3).requires_grad_())
        for seed in (4, 5)
    )
    of_node = {
        x.grad_fn: unquantized(x.detach().clone()),
        y.grad_fn: unquantized(y.detach().clone()),
    }
    function, is_known = FOLLOWING[kind]
    wanted = function(x, y)
    found = linear_results.traced(wanted, of_node.get)
    assert (found is not None) == is_known
    if is_known:
        again = found.spec.dequantize(found.tensors)
        assert torch.equal(again, wanted) and again.dtype == wanted.dtype


def gated():
    def forward(self, x):
        x = self.norm(x)
        return self.down(torch_f.silu(self.gate(x)) * self.up(x))

    return Composed(
        forward,
        norm=nn.RMSNorm(WIDTH),
        gate=nn.Linear(WIDTH, 128, bias=False),
        up=nn.Linear(WIDTH, 128),
        down=nn.Linear(128, WIDTH),
    )


def attention():
    def forward(self, x):
        x = self.norm(x)
        q, k, v = (f(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch_f.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    parts = {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    return Composed(forward, norm=nn.LayerNorm(WIDTH), **parts)


def adapted():
    """A layer of LoRA, whose own weight is frozen, before a gated unit's activation."""

    def forward(self, x):
        x = self.norm(x)
        return self.last(torch_f.gelu(self.base(x) + 2 * self.b(self.a(x))))

    model = Composed(
        forward,
        norm=nn.LayerNorm(WIDTH),
        base=nn.Linear(WIDTH, 128).requires_grad_(False),
        a=nn.Linear(WIDTH, 4, bias=False),
        b=nn.Linear(4, 128, bias=False),
        last=nn.Linear(128, WIDTH),
    )
    return model


MODELS = {
    "gated": gated,
    "attention": attention,
    "adapted": adapted,
    "mlp": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)
    ),
}


def made(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def gradients(model, x):
    model.zero_grad()
    y = model(x.detach().requires_grad_())
    y.square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])


def save_exactly(monkeypatch):
    """Make all copies exact, so that gradients are those of the formulas."""

    def save(self, x, dtype, *_, **__):
        x = x.detach().clone()
        return SavedTensors((x,), ExactSpec(tuple(x.shape), x.stride(), dtype))

    def normalized(self, x, statistics, features=None):
        return save(self, statistics.normalized(x), torch.float32)

    monkeypatch.setattr(Quantizer, "_by_kernel", save)
    monkeypatch.setattr(Quantizer, "quantize_normalized", normalized)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_from_exact_copies_are_exact(kind, monkeypatch):
    model, x = made(kind), normal((2, 8, WIDTH), scale=1.0)
    expected = gradients(copy.deepcopy(model), x)
    save_exactly(monkeypatch)
    fewbit.compress_(model, bits=2, layers=ON, verbose=False)
    torch.testing.assert_close(gradients(model, x), expected)


@pytest.mark.parametrize("kind", MODELS)
def test_less_memory_and_small_errors(kind):
    x = normal((4, 64, WIDTH), scale=1.0)
    expected = gradients(made(kind), x)
    found = {}
    for layers in ({}, ON):
        model = made(kind)
        fewbit.compress_(model, bits=6, layers=layers, verbose=False)
        assert relative(flat(gradients(model, x)), flat(expected)) < 0.1
        found[len(layers)] = fewbit.saved_bytes(model, x).by_kind()["packed"]
    # The norm's copy has 2 bits more.
    assert (
        found[1] < {"gated": 0.45, "attention": 0.55, "adapted": 0.5, "mlp": 0.5}[kind] * found[0]
    )


CHANGES = {  # changes in place, which autograd does not record, of the result y of a linear layer
    "slice": lambda y: y[..., 40:].zero_(),
    "whole": lambda y: y.mul_(3),
    "view": lambda y: y.view(-1).mul_(3),
    "detached": lambda y: y.detach().mul_(3),
    "data": lambda y: y.data.mul_(3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("following", [torch.neg, lambda y: y * 1.0, lambda y: y.view(32, 8, 64)])
def test_a_changed_result_is_not_computed_again(change, following):
    def forward(self, x):
        y = self.first(self.norm(x))
        with torch.no_grad():
            CHANGES[change](y)
        return self.last(torch_f.silu(following(y)).flatten().view(4, 64, 64))

    torch.manual_seed(0)
    parts = {"norm": nn.LayerNorm(WIDTH), "first": nn.Linear(WIDTH, WIDTH)}
    model = Composed(forward, **parts, last=nn.Linear(WIDTH, WIDTH))
    x = normal((4, 64, WIDTH), scale=1.0)
    expected = gradients(copy.deepcopy(model), x)
    fewbit.compress_(model, bits=8, layers=ON, verbose=False)
    assert relative(flat(gradients(model, x)), flat(expected)) < 0.05


CHAINS = {
    "activations": lambda x, a, b: torch_f.silu(a(x)),
    "residual": lambda x, a, b: x + b(torch_f.silu(a(x))),
    "linear": lambda x, a, b: b(a(x)),
    "sums": lambda x, a, b: x + a(x),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_each_layer_of_a_chain_is_computed_again_at_most_once(kind, monkeypatch):
    """Nothing is computed from a copy that is itself computed by a linear layer."""
    depth = 12

    def forward(self, x):
        for a, b in zip(self.a, self.b, strict=True):
            x = CHAINS[kind](x, a, b)
        return torch_f.silu(x)

    torch.manual_seed(0)
    a, b = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth)) for _ in range(2))
    model = Composed(forward, a=a, b=b)
    fewbit.compress_(model, bits=4, layers=ON, verbose=False)
    products = []
    again = linear._again
    monkeypatch.setattr(linear, "_again", lambda *x: products.append(1) or again(*x))
    gradients(model, normal((4, 64, WIDTH), scale=1.0))
    assert len(products) <= 2 * depth + 3


@pytest.mark.parametrize(
    "config", [fewbit.PreActivationBits(8), fewbit.AdaptiveBits(8), fewbit.SampleBits(8)], ids=repr
)
@pytest.mark.parametrize("kind", ["attention", "gated", "transposed"])
def test_policies(kind, config):
    def transposed(self, x):
        x = torch_f.silu(self.first(x.flatten(0, 1))).t()
        return self.last(torch_f.silu(self.second(x)))

    torch.manual_seed(0)
    parts = {
        "first": nn.Linear(WIDTH, 32),
        "second": nn.Linear(256, WIDTH),
        "last": nn.Linear(WIDTH, 8),
    }
    model = Composed(transposed, **parts) if kind == "transposed" else made(kind)
    x = normal((4, 64, WIDTH), scale=1.0)
    expected = gradients(copy.deepcopy(model), x)
    fewbit.compress_(model, config, layers=ON, verbose=False)
    assert relative(flat(gradients(model, x)), flat(expected)) < 0.05


def test_relu_saves_its_sides_and_the_layer_after_it_nothing():
    found = []
    for layers in ({}, ON):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)
        )
        x = normal((4, 64, WIDTH), scale=1.0)
        expected = gradients(copy.deepcopy(model), x)
        fewbit.compress_(model, bits=6, layers=layers, verbose=False)
        assert relative(flat(gradients(model, x)), flat(expected)) < 0.05
        found.append(fewbit.saved_bytes(model, x).by_kind()["packed"])
    # The norm's copy, 8 bits in place of 7, and 1 bit for each element of the ReLU.
    assert found[1] == 4 * 64 * (WIDTH * 8 + 256) // 8 < found[0]


@pytest.mark.parametrize("run", ["torch", "fewbit", "copy", "policy", "evaluation", "frozen"])
def test_other_ways_to_run(run):
    model, x = made("gated"), normal((4, 64, WIDTH), scale=1.0)
    expected = gradients(copy.deepcopy(model), x)
    bits = fewbit.AdaptiveBits(6) if run == "policy" else 6
    fewbit.compress_(model, bits, layers=ON, verbose=False)
    if run in ("torch", "fewbit"):
        # In a checkpointed region, the setting has no effect.
        function = fewbit.checkpoint if run == "fewbit" else checkpoint
        options = {} if run == "fewbit" else {"use_reentrant": False}
        whole = Composed(lambda self, x: function(self.inner, x, **options), inner=model)
    else:
        whole = COPIES["deepcopy"](model) if run == "copy" else model
    if run == "evaluation":
        whole.eval()
        with torch.no_grad():
            whole(x)
        whole.train()
    assert relative(flat(gradients(whole, x)), flat(expected)) < 0.1


def test_a_changed_weight_is_refused_as_by_torch():
    model, x = made("gated"), normal((2, 8, WIDTH), scale=1.0)
    fewbit.compress_(model, bits=4, layers=ON, verbose=False)
    loss = model(x).sum()
    with torch.no_grad():
        model.gate.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_code_saves_as_without_the_setting():
    x = normal((4, 64, WIDTH), scale=1.0)
    found = []
    for layers in ({}, ON):
        model = made("gated")
        fewbit.compress_(model, bits=6, layers=layers, verbose=False)
        compiled = torch.compile(model, backend="aot_eager")
        expected = gradients(made("gated"), x)
        assert relative(flat(gradients(compiled, x)), flat(expected)) < 0.1
        found.append(fewbit.saved_bytes(compiled, x).by_kind()["packed"])
    assert found[1] <= 1.2 * found[0]
