"""Batched gradients, `torch.autograd.grad(..., is_grads_batched=True)`: each equals the gradient computed alone."""

from functools import partial

import pytest
import torch
from layers import EVERY, Called
from samples import ACTIVATIONS, normal

import fewbit
import fewbit.functional as F
from fewbit.errors import GradientError

QKV = [(2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 16)]


def _built(layer, **options):
    return lambda: (layer.pair(8, **options)[0], layer.inputs())


def _called(function, *shapes, **options):
    inputs = [normal(shape, scale=1.0, seed=seed) for seed, shape in enumerate(shapes)]
    return lambda: (Called(partial(function, **options)), inputs)


def _attended(**options):
    return _called(F.scaled_dot_product_attention, *QKV, bits=8, **options)


def _self_attention(need_weights):
    module = fewbit.nn.MultiheadAttention(16, 4, batch_first=True)
    return _called(lambda x: module(x, x, x, need_weights=need_weights)[0], (2, 9, 16))


CASES = {
    **{layer.id: _built(layer) for layer in EVERY},
    **{
        f"{layer.id}, two copies": _built(layer, copies=2)
        for layer in EVERY
        if "Norm" in layer.name
    },
    **{sample.id: _called(sample, (5, 9)) for sample in ACTIVATIONS},
    "RReLU in training": _called(F.rrelu, (5, 9), training=True),
    "unbiased GELU": _called(
        F.gelu, (5, 9), table=fewbit.load_table("gelu", 2, objective="unbiased")
    ),
    "Pointwise": _called(fewbit.nn.Pointwise(torch.sin), (5, 9)),
    "attention": _attended(),
    "causal attention": _attended(is_causal=True),
    "masked attention": _attended(attn_mask=torch.ones(9, 11, dtype=torch.bool).tril(1)),
    "attention with dropout": _attended(dropout_p=0.3),
    "MultiheadAttention": _self_attention(False),
    "MultiheadAttention with weights": _self_attention(True),
    "matmul": _called(F.matmul, (3, 5, 7), (3, 7, 4)),
    "mul": _called(F.mul, (5, 7), (5, 7)),
    "pad": _called(F.pad, (2, 3, 5, 6), pad=(1, 2, 1, 1), mode="reflect"),
    "interpolate": _called(F.interpolate, (2, 3, 8, 6), size=(4, 3), mode="area"),
    "Embedding": lambda: (fewbit.nn.Embedding(7, 4), [torch.tensor([[1, 2, 6], [1, 0, 3]])]),
}


# {case: the function in which a batch of its gradients is refused}.
REFUSED = {
    "attention with dropout": ("autograd", "vmap"),
    "attention": ("vmap",),
    "causal attention": ("vmap",),
    "masked attention": ("vmap",),
    "MultiheadAttention": ("vmap",),
    "MultiheadAttention with weights": ("vmap",),
    "RReLU in training": ("vmap",),
}


def _batch(by, y, wanted, grads):
    """Return the gradients of `wanted` for each of `grads`, computed together by autograd or vmap."""
    if by == "autograd":
        return torch.autograd.grad(y, wanted, grads, is_grads_batched=True, retain_graph=True)
    return torch.func.vmap(partial(torch.autograd.grad, y, wanted, retain_graph=True))(grads)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("by", ["autograd", "vmap"])
@pytest.mark.parametrize("case", CASES)
def test_a_batch_equals_single_gradients(case, by):
    module, inputs = CASES[case]()
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    y = module(*inputs)
    wanted = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    grads = normal((3, *y.shape), seed=7)
    if by in REFUSED.get(case, ()):
        with pytest.raises(GradientError, match="expected one gradient at a time"):
            _batch(by, y, wanted, grads)
        return
    batched = _batch(by, y, wanted, grads)
    for number, grad in enumerate(grads):
        expected = torch.autograd.grad(y, wanted, grad, retain_graph=True)
        ours = [gradient[number] for gradient in batched]
        torch.testing.assert_close(ours, list(expected), rtol=2e-5, atol=2e-5)
