"""Scaled dot-product attention and MultiheadAttention against torch's own."""

import copy
import io
import math
import pickle
import warnings
import weakref
from functools import partial

import pytest
import torch
from exact_copies import Exact, Remembering
from expectation import bias_of, covariance
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import bytes_by, relative, saved_by
from samples import normal
from torch import nn
from torch.nn import functional as torch_f

from fewbit.convert.functions import FunctionMode, FunctionQuantizers
from fewbit.functional.attention.attention import (
    How,
    _attend,
    attention,
    scaled_dot_product_attention,
    uses_blocks,
)
from fewbit.nn.attention import MultiheadAttention
from fewbit.runtime.format.groups import quantized_bytes
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.calls import CallGuard
from fewbit.runtime.saved.context import ForwardContext

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:Dynamo detected a call to a `functools",
)
CPU_STATE = 5056
MASK = torch.ones(9, 11, dtype=torch.bool).tril(1)
FLOAT_MASK = normal((9, 11), scale=1.0, seed=9)
SAMPLES = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": FLOAT_MASK},
    "mask of a head": {"attn_mask": FLOAT_MASK.expand(1, 4, 9, 11).contiguous()},
    "scale": {"scale": 0.1},
    "dropout": {"dropout_p": 0.3},
    "dropout and mask": {"dropout_p": 0.3, "attn_mask": MASK},
}


def options_of(sample, device):
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in SAMPLES[sample].items()
    }


@pytest.fixture(params=SAMPLES)
def options(request, device):
    return options_of(request.param, device)


def inputs(
    device="cpu", dtype=torch.float32, query=(3, 4, 9, 16), keys=11, heads=None, values=None
):
    """Return query, key and value, which need gradients."""
    *batch, _, features = query
    batch = batch if heads is None else (*batch[:-1], heads)
    shapes = query, (*batch, keys, features), (*batch, keys, values or features)
    return [
        normal(shape, dtype, device, scale=1.0, seed=i + 1).requires_grad_()
        for i, shape in enumerate(shapes)
    ]


def check(ours, theirs, wanted, within=0.02):
    """Check for equal values from equal random states, and for gradients within a fraction of their norm."""
    torch.manual_seed(1)
    y = ours()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    expected = theirs()
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    assert y.stride() == expected.stride()
    grad = normal(y.shape, y.dtype, y.device, scale=1.0, seed=7)
    torch.manual_seed(2)
    mine = torch.autograd.grad(y, wanted, grad)
    for a, b, x in zip(mine, torch.autograd.grad(expected, wanted, grad), wanted, strict=True):
        assert a.dtype == x.dtype and a.shape == x.shape
        assert relative(a, b) < within
    return after


# -- attention: values and gradients ---------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
def test_the_backward_pass_is_that_of_the_restored_tensors(device, options, autocast):
    """It is exactly torch's, in the dtype of the forward pass. Dropout draws the same mask again."""
    tensors = inputs(device)
    quantizer = Remembering(4)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        torch.manual_seed(3)
        y = scaled_dot_product_attention(*tensors, quantizer=quantizer, **options)
        restored = [kept.spec.dequantize(kept.tensors).requires_grad_() for kept in quantizer.kept]
        torch.manual_seed(3)
        expected = torch_f.scaled_dot_product_attention(*restored, **options)
    grad = normal(y.shape, y.dtype, device, scale=1.0, seed=7)
    ours = torch.autograd.grad(y, tensors, grad)
    theirs = torch.autograd.grad(expected, restored, grad)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


BLOCKS = {
    # The shape of the query, the number of keys, the features of a value, and the settings of the call
    "plain": ((2, 4, 150, 16), 150, 16, {}),
    "causal": ((2, 4, 150, 16), 150, 16, {"is_causal": True}),
    "fewer keys, causal": ((2, 4, 300, 16), 60, 24, {"is_causal": True}),
    "more keys, causal": ((2, 4, 60, 16), 300, 8, {"is_causal": True}),
    "three dimensions": ((5, 150, 16), 140, 16, {"scale": 0.7}),
}


needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="blocks are only faster with MKL"
)


@needs_mkl
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_from_blocks(name, monkeypatch):
    """On the CPU, float32 gradients of calls that are not small are computed from blocks of probabilities."""
    # So that there are several blocks of heads.
    monkeypatch.setattr("fewbit.functional.attention.blocks._BLOCK", 2**15)
    query, keys, values, options = BLOCKS[name]
    tensors = inputs(query=query, keys=keys, values=values)
    quantizer = Remembering(4)
    y = scaled_dot_product_attention(*tensors, quantizer=quantizer, **options)
    grad = normal(y.shape, scale=1.0, seed=7)
    restored = [kept.spec.dequantize(kept.tensors) for kept in quantizer.kept]
    assert uses_blocks((*restored, None, None), (grad,), How(**options))
    exact = [x.double().requires_grad_() for x in restored]
    expected = torch_f.scaled_dot_product_attention(*exact, **options)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    ours = torch.autograd.grad(y, tensors, grad, retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0, atol=1e-5 * float(b.abs().max()))
    (of_key,) = torch.autograd.grad(y, tensors[1], grad)
    assert torch.equal(of_key, ours[1])


@needs_mkl
def test_which_gradients_come_from_blocks():
    """Other calls run torch's own function again, as small ones do."""
    tensors = [x.detach() for x in inputs(query=(2, 4, 150, 16), keys=150)]
    query, key, value = tensors

    def fits(*factors, grad=query, **options):
        return uses_blocks((*factors, None, None), (grad,), How(**options))

    assert fits(*tensors)
    assert not fits(*tensors, repeats=2)
    assert not fits(*tensors, grad=query.double())
    assert not fits(*(x.bfloat16() for x in tensors), grad=query.bfloat16())
    assert not fits(query, key[:, :1], value[:, :1], enable_gqa=True)
    assert not fits(query, key[:, :1], value[:, :1])
    assert not fits(*(x[..., :20, :] for x in tensors), grad=query[..., :20, :])
    for options in ({"attn_mask": torch.ones(150, 150).tril() > 0}, {"dropout_p": 0.3}):
        wanted = [x.clone().requires_grad_() for x in tensors]
        quantizer = Remembering(4)
        torch.manual_seed(3)
        y = scaled_dot_product_attention(*wanted, quantizer=quantizer, **options)
        restored = [kept.spec.dequantize(kept.tensors).requires_grad_() for kept in quantizer.kept]
        torch.manual_seed(3)
        expected = torch_f.scaled_dot_product_attention(*restored, **options)
        pairs = zip(
            torch.autograd.grad(y, wanted, query),
            torch.autograd.grad(expected, restored, query),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_mask_that_is_learned(device):
    for shape in ((9, 11), (3, 1, 9, 11), (4, 1, 11)):
        mask = normal(shape, device=device, scale=1.0, seed=5).requires_grad_()
        tensors = inputs(device)
        check(
            lambda mask=mask, tensors=tensors: scaled_dot_product_attention(*tensors, mask, bits=8),
            lambda mask=mask, tensors=tensors: torch_f.scaled_dot_product_attention(*tensors, mask),
            [*tensors, mask],
        )


def test_heads_that_share_keys(device):
    """Keys are repeated by torch's enable_gqa, or after they are saved, as transformers does it."""
    tensors = inputs(device, heads=2)
    query, key, value = tensors
    for masked in (False, True):
        mask = FLOAT_MASK.to(device) if masked else None
        check(
            lambda mask=mask: attention(*tensors, mask, None, How(repeats=2), Quantizer(8)),
            lambda mask=mask: torch_f.scaled_dot_product_attention(
                query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), mask
            ),
            tensors,
        )
    found = bytes_by(lambda: attention(*tensors, None, None, How(repeats=2), Quantizer(8)))
    assert found == sum(quantized_bytes(x.shape, 8) for x in tensors)


@pytest.mark.parametrize("masked", [None, "boolean", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_position_bias(device, masked, is_causal):
    tensors = inputs(device, keys=9)
    bias = normal((1, 4, 9, 9), device=device, scale=1.0, seed=6).requires_grad_()
    mask = normal((3, 1, 9, 9), device=device, scale=1.0, seed=8) if masked else None
    mask = mask > -2 if masked == "boolean" else mask
    floor = torch.finfo(torch.float32).min
    whole = bias
    if masked == "boolean":
        whole = torch.where(mask, bias, floor)
    elif masked == "float":
        whole = bias + mask
    elif is_causal:
        whole = torch.where(torch.ones(9, 9, dtype=torch.bool, device=device).tril(), bias, floor)
    how = How(is_causal=is_causal)
    check(
        lambda: attention(*tensors, mask, bias, how, Quantizer(8)),
        lambda: torch_f.scaled_dot_product_attention(*tensors, whole),
        [*tensors, bias],
    )
    found = bytes_by(lambda: attention(*tensors, mask, bias, how, Quantizer(2)))
    expected = sum(quantized_bytes(x.shape, 2) for x in tensors) + bias.nbytes
    assert found == expected + (0 if mask is None else mask.nbytes)


def test_attention_with_a_learned_bias_leaves_no_graph():
    """The forward computes with gradients then. No node of that graph may hold its own result, a cycle in C++."""
    tensors = [normal((1, 2, 5, 8), seed=i).requires_grad_() for i in range(3)]
    bias = normal((1, 2, 5, 5), seed=3).requires_grad_()
    first = attention(*tensors, None, bias, How(), Quantizer(2))
    node = weakref.ref(first.grad_fn)
    attention(first, *tensors[1:], None, bias, How(), Quantizer(2))
    assert node() is not None
    del first
    assert node() is None


# -- attention: saved tensors ----------------------------------------------------------------------


def test_only_what_gradients_need(device):
    for needed, kept in (((0,), (0, 1, 2)), ((1,), (0, 1, 2)), ((2,), (0, 1)), ((0, 2), (0, 1, 2))):
        tensors = inputs(device)
        for i, x in enumerate(tensors):
            x.requires_grad_(i in needed)
        wanted = [tensors[i] for i in needed]
        check(
            lambda tensors=tensors: scaled_dot_product_attention(*tensors, bits=8),
            lambda tensors=tensors: torch_f.scaled_dot_product_attention(*tensors),
            wanted,
        )
        found = bytes_by(lambda tensors=tensors: scaled_dot_product_attention(*tensors, bits=8))
        assert found == sum(quantized_bytes(tensors[i].shape, 8) for i in kept)
    tensors = [x.detach() for x in inputs(device)]
    y, saved = saved_by(lambda: scaled_dot_product_attention(*tensors))
    assert not saved and not y.requires_grad


def test_a_tensor_in_three_roles_is_rounded_three_times(device):
    x, _, _ = inputs(device)
    quantizer = Quantizer(4, context=ForwardContext())
    attend = partial(scaled_dot_product_attention, quantizer=quantizer)
    found = bytes_by(lambda: CallGuard(quantizer.context).call(nn.Identity(), attend, (x, x, x)))
    assert found == 3 * quantized_bytes(x.shape, 4)


def test_dropout_leaves_torchs_generator_as_it_was(device):
    tensors = inputs(device)
    y = scaled_dot_product_attention(*tensors, dropout_p=0.5)
    torch.manual_seed(5)
    y.sum().backward(retain_graph=True)
    first = torch.rand(4, device=device)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(4, device=device))
    before = [x.grad.clone() for x in tensors]
    y.sum().backward()
    assert all(torch.equal(x.grad, 2 * b) for x, b in zip(tensors, before, strict=True))


def test_where_functions_are_replaced(device):
    """Functions that attention calls stay torch's own, also with gradients (a learned mask)."""
    mask = normal((9, 11), device=device, scale=1.0, seed=5).requires_grad_()
    tensors = inputs(device)

    def run():
        with FunctionMode(FunctionQuantizers(Quantizer(2), 3, Quantizer(2))):
            return torch_f.scaled_dot_product_attention(*tensors, mask)

    assert bytes_by(run) == sum(quantized_bytes(x.shape, 2) for x in tensors) + mask.nbytes
    assert torch.equal(run(), torch_f.scaled_dot_product_attention(*tensors, mask))
    quantizer = Remembering(2)
    with FunctionMode(FunctionQuantizers(quantizer, 3, quantizer)):
        layer, _ = pair(device, bits=2)
        layer(*sequences(layer, device=device))
        layer.eval()(*sequences(layer, device=device))
        scaled_dot_product_attention(*tensors, mask)
    assert not quantizer.kept


# -- attention: bias -------------------------------------------------------------------------------


def exact_gradients(grad):
    def function(q, k, v):
        scale = 1 / math.sqrt(q.shape[-1])
        p = torch.softmax(scale * q @ k.mT, -1)
        d = grad @ v.mT
        s = p * (d - (d * p).sum(-1, keepdim=True))
        return scale * s @ k, scale * s.mT @ q, p.mT @ grad

    return function


def second_order(function, tensors, covariances):
    """Return 1/2 sum_x,y Cov[x^, y^] d2G / dx dy of each result G, over the elements x, y of each tensor.

    A covariance is a sum of r r^T over the columns r of a root, so the sum is that of second derivatives along r.
    """
    total = 0
    for i, (x, cov) in enumerate(zip(tensors, covariances, strict=True)):
        values, vectors = torch.linalg.eigh(cov)
        roots = (vectors * values.clamp(min=0).sqrt()).T.view(-1, *x.shape)

        def along(direction, i=i, x=x):
            def first(x):
                at = lambda x: function(*tensors[:i], x, *tensors[i + 1 :])  # noqa: E731
                return torch.func.jvp(at, (x,), (direction,))[1]

            return torch.func.jvp(first, (x,), (direction,))[1]

        curvatures = torch.func.vmap(along)(roots)
        total = [
            old + new.sum(0) / 2
            for old, new in zip([0, 0, 0] if total == 0 else total, curvatures, strict=True)
        ]
    return total


def probability_bias(q, k, var_q, var_k):
    """Return E[P^] - P by the formula of the module."""
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.softmax(scale * q @ k.mT, -1)
    mean = p @ k
    centered = k[None] - mean[:, None]  # (L, S, E)
    of_query = (var_q[:, None] * centered**2).sum(-1)
    # Var[k_jd - a_id]: of weights (j == m) - P_im of independent k_md
    weights = (torch.eye(len(k), dtype=k.dtype)[None] - p[:, None]) ** 2  # (L, S, S)
    of_key = ((q**2)[:, None] * (weights @ var_k)).sum(-1)
    w = scale**2 * (of_query + of_key)
    return p / 2 * (w - (p * w).sum(-1, keepdim=True))


def draws(tensors, grad, bits, count, kind):
    """Return `count` independent gradients, of samples of 64 features that have groups of their own."""
    many = [x.expand(count, *x.shape).clone().requires_grad_() for x in tensors]
    y = scaled_dot_product_attention(*many, bits=bits, quantizer=kind)
    return [x.double() for x in torch.autograd.grad(y, many, grad.expand_as(y))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bits"), [("uniform", 5), ("rotated", 4), ("unbiased", 4)])
def test_bias_is_as_the_formula_says(kind, bits):
    """Copies of keys and values are made without their means. So many bits make the terms of higher order small."""
    torch.manual_seed(1)
    count, times = 20000, 4
    q, k, v, grad = (normal((4, 16), scale=1.0, seed=seed) for seed in range(4))
    doubles = [x.double() for x in (q, k, v)]
    covariances = [covariance(x, bits, kind) for x in (q, k - k.mean(0), v - v.mean(0))]
    function = exact_gradients(grad.double())
    exact, bias = function(*doubles), second_order(function, doubles, covariances)
    # Squares of errors in standard errors, with the formula and without, meaned over runs too: the
    # gradient's elements are not independent, so that those of one run scatter.
    squares = torch.zeros(2, 3)
    for _ in range(times):
        for i, drawn in enumerate(draws((q, k, v), grad, bits, count, kind)):
            error = drawn.std(0) / math.sqrt(count)
            for j, expected in enumerate((exact[i] + bias[i], exact[i])):
                z = (drawn.mean(0) - expected) / error
                squares[j, i] += float(z.square().mean()) / times
    assert (squares[0] < 2).all() and (squares[1] > 10).all()
    # The formula of the bias of the probabilities is for elements that are rounded independently.
    variances = [cov.diagonal().view(4, 16) for cov in covariances]
    independent = second_order(function, doubles, [var.flatten().diag() for var in variances])
    of_values = probability_bias(*doubles[:2], *variances[:2]).mT @ grad.double()
    torch.testing.assert_close(of_values, independent[2])


def noise_of(drawn, exact):
    """Return the median of ||grad^ - grad|| / ||grad|| over single backward passes."""
    return float((drawn - exact).flatten(1).norm(dim=1).median() / exact.norm())


SIZES = {  # {kind of copies: {bits: (bias of q and k, bias of v, noise of q and k)}}
    "uniform": {
        2: (0.24, 0.14, 1.55),
        3: (0.05, 0.028, 0.6),
        4: (0.011, 0.006, 0.275),
        8: (None, None, 0.0164),
    },
    "rotated": {
        2: (0.062, 0.034, 0.67),
        3: (0.0165, 0.0092, 0.34),
        4: (0.0045, 0.0025, 0.175),
        8: (None, None, 0.012),
    },
    "unbiased": {
        2: (0.11, 0.06, 0.95),
        3: (0.021, 0.012, 0.38),
        4: (0.0045, 0.0025, 0.175),
        8: (None, None, 0.0105),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_size_of_the_bias(bits, kind):
    """There is one head with 16 queries and keys of 16 features. The result is the median over 24 draws of these."""
    torch.manual_seed(1)
    *sizes, noise = SIZES[kind][bits]
    biases, noises = [], []
    for seed in range(24):
        *tensors, grad = (normal((16, 16), scale=1.0, seed=4 * seed + i) for i in range(4))
        exact = exact_gradients(grad.double())(*(x.double() for x in tensors))
        pairs = list(zip(draws(tensors, grad, bits, 2000, kind), exact, strict=True))
        biases.append([bias_of(*pair) for pair in pairs])
        noises.append([noise_of(*pair) for pair in pairs[:2]])
    found = torch.tensor(noises).median(0).values / noise
    assert ((found > 0.8) & (found < 1.2)).all()
    of_query, of_value = sizes
    if of_query is not None:  # else it is below the sampling error
        expected = torch.tensor([of_query, of_query, of_value])
        found = torch.tensor(biases).median(0).values / expected
        assert ((found > 0.8) & (found < 1.2)).all()


# -- attention: keys and values without their means --------------------------------------------------


def blocks(rows, columns):
    """Return the mask of packed sequences, each of which attends to itself."""
    numbers = torch.arange(len(rows))
    of_rows, of_columns = (numbers.repeat_interleave(torch.tensor(x)) for x in (rows, columns))
    return of_rows[:, None] == of_columns[None, :]


PARTLY = torch.rand(3, 1, 9, 11, generator=torch.Generator().manual_seed(0)) < 0.4
PARTLY[..., 0] = True
ROWS = torch.ones(9, 11, dtype=torch.bool)
ROWS[4] = False
FLOATS = normal((3, 1, 9, 11), torch.float64, scale=1.0, seed=5)
BIAS = normal((1, 4, 9, 11), torch.float64, scale=1.0, seed=6)
PLAIN = (3, 4, 9, 16), (3, 4, 11, 16)
WEIGHED = (12, 9, 16), (12, 11, 16)
FEWER_HEADS = (3, 4, 9, 16), (3, 2, 11, 16)
WITHOUT_MEANS = {
    # the shapes of the query and of key and value, mask, position bias, and the settings of the call
    "plain": (*PLAIN, None, None, {}),
    "causal": (*PLAIN, None, None, {"is_causal": True}),
    "scale": (*PLAIN, None, None, {"scale": 0.7}),
    "boolean mask": (*PLAIN, MASK, None, {}),
    "float mask": (*PLAIN, FLOATS, None, {}),
    "minus infinity": (*PLAIN, FLOATS.masked_fill(~PARTLY, -math.inf), None, {}),
    "partly masked rows": (*PLAIN, PARTLY, None, {}),
    "a row without keys": (*PLAIN, ROWS, None, {}),
    "packed sequences": (*PLAIN, blocks([2, 3, 4], [2, 5, 4]), None, {}),
    "position bias": (*PLAIN, None, BIAS, {}),
    "position bias, causal": (*PLAIN, None, BIAS, {"is_causal": True}),
    "position bias, boolean mask": (*PLAIN, PARTLY, BIAS, {}),
    "position bias, float mask": (*PLAIN, FLOATS, BIAS, {}),
    "enable_gqa": (*FEWER_HEADS, None, None, {"enable_gqa": True}),
    "repeats": (*FEWER_HEADS, PARTLY, None, {"repeats": 2}),
    "weighed": (*WEIGHED, None, None, {"weighed": True}),
    "weighed, float mask": (*WEIGHED, FLOATS[:1, 0].repeat(12, 1, 1), None, {"weighed": True}),
    "dropout": (*PLAIN, FLOATS, None, {"dropout_p": 0.3}),
    "dropout, position bias": (*PLAIN, None, BIAS, {"dropout_p": 0.3}),
    "weighed, dropout": (*WEIGHED, None, None, {"weighed": True, "dropout_p": 0.3}),
}


def gradients_of(run, tensors):
    """Return the gradients of a call of attention, which draws the same dropout mask in every call."""
    torch.manual_seed(3)
    results = run()
    results = results if isinstance(results, tuple) else (results,)
    grads = [normal(y.shape, y.dtype, scale=1.0, seed=20 + i) for i, y in enumerate(results)]
    wanted = [x for x in tensors if x is not None and x.requires_grad]
    return torch.autograd.grad(results, wanted, grads)


def arguments_of(name):
    """Return query, key, value, mask and position bias in float64, with large means, and the settings of the call."""
    query, keys, mask, bias, how = WITHOUT_MEANS[name]
    shapes = query, keys, keys
    tensors = [normal(s, torch.float64, scale=1.0, seed=i) for i, s in enumerate(shapes)]
    tensors[1] = tensors[1] + normal((16,), torch.float64, scale=3.0, seed=8)
    tensors[2] = tensors[2] + 5.0
    tensors += [mask, bias]
    tensors = [
        x.clone().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in tensors
    ]
    return tensors, How(**how)


@pytest.mark.parametrize("name", WITHOUT_MEANS)
def test_no_gradient_needs_the_means_of_keys_and_values(name):
    """Saved exactly but without their means, they give torch's gradients, also those of the mask and the bias."""
    tensors, how = arguments_of(name)
    exact = Exact()
    ours = gradients_of(lambda: attention(*tensors, how, exact), tensors)
    theirs = gradients_of(lambda: _attend(*tensors, how), tensors)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * float(b.abs().max()))
    _, key, value = exact.saved
    assert float(key.mean(-2).abs().max()) < 1e-12
    if how.dropout_p > 0:
        assert torch.equal(value, tensors[2])
    else:
        assert float(value.mean(-2).abs().max()) < 1e-12


def test_with_dropout_gradients_need_the_mean_of_the_values():
    """Each query has other keys dropped, so its probabilities do not add up to 1."""
    (query, key, value, mask, bias), how = arguments_of("dropout")
    shifted = value.detach() - value.detach().mean(-2, keepdim=True)
    run = lambda value: _attend(query, key, value, mask, bias, how)  # noqa: E731
    wanted = [query, key]
    ours, theirs = (gradients_of(lambda x=x: run(x), wanted) for x in (shifted, value))
    assert all(relative(a, b) > 0.1 for a, b in zip(ours, theirs, strict=True))


# -- attention: errors -----------------------------------------------------------------------------


# -- MultiheadAttention ----------------------------------------------------------------------------

L, S, N, E, H = 7, 9, 3, 32, 4


def pair(device="cpu", bits=8, **options):
    """Return torch's module and ours with the same parameters."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, device=device, **options)
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    ours = MultiheadAttention(E, H, device=device, bits=bits, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def sequences(layer, shared="none", batched=True, device="cpu"):
    widths = E, layer.kdim, layer.vdim
    lengths = (L if shared == "all" else S,) * 2
    shapes = zip((L, *lengths), widths, strict=True)
    made = []
    for seed, (length, width) in enumerate(shapes):
        shape = (length, N, width) if batched else (length, width)
        x = normal(shape, device=device, scale=1.0, seed=seed)
        made.append(x.transpose(0, 1).contiguous() if layer.batch_first and batched else x)
    query, key, value = (x.requires_grad_() for x in made)
    if shared == "all":
        return query, query, query
    return (query, key, key) if shared == "keys" else (query, key, value)


def step(layer, tensors, masks):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of masks of different types
        torch.manual_seed(2)
        y, weights = layer(*tensors, **masks)
    loss = (y * normal(y.shape, y.dtype, y.device, scale=1.0, seed=6)).sum()
    if weights is not None:
        loss = loss + weights.square().sum()
    wanted = [*{id(x): x for x in tensors}.values(), *layer.parameters()]
    wanted = [x for x in wanted if x.requires_grad]
    return y, weights, torch.autograd.grad(loss, wanted)


def compare(ours, theirs, tensors, masks, within=0.02):
    y, weights, grads = step(ours, tensors, masks)
    expected, expected_weights, expected_grads = step(theirs, tensors, masks)
    assert torch.equal(y, expected) and y.stride() == expected.stride()
    if expected_weights is None:
        assert weights is None
    else:
        assert torch.equal(weights, expected_weights)
    flat = [
        torch.cat([x.flatten().float() for x in tensors]) for tensors in (grads, expected_grads)
    ]
    assert relative(*flat) < within
    assert all(a.shape == b.shape for a, b in zip(grads, expected_grads, strict=True))


@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "batch_first": st.just(True),
            "bias": st.just(False),
            "add_bias_kv": st.just(True),
            "add_zero_attn": st.just(True),
        },
    ),
    widths=st.sampled_from([{}, {}, {"kdim": 24, "vdim": 16}]),
    shared=st.sampled_from(["none", "keys", "all"]),
    batched=st.booleans(),
    padding=st.sampled_from([None, "boolean", "float"]),
    mask=st.sampled_from([None, "boolean", "float", "3-D", "causal"]),
    need_weights=st.booleans(),
    average=st.booleans(),
)
@settings(max_examples=8)
def test_module_in_any_configuration(
    options, widths, shared, batched, padding, mask, need_weights, average
):
    if widths:
        shared = "none"
    ours, theirs = pair(**options, **widths)
    tensors = sequences(ours, shared, batched)
    keys = L if shared == "all" else S
    masks = {"need_weights": need_weights, "average_attn_weights": average}
    if padding:
        masks["key_padding_mask"] = torch.zeros((N, keys) if batched else (keys,), dtype=torch.bool)
        masks["key_padding_mask"][..., -2:] = True
    if padding == "float":
        masks["key_padding_mask"] = masks["key_padding_mask"] * -3.0
    if mask is not None:
        shape = ((N if batched else 1) * H, L, keys) if mask == "3-D" else (L, keys)
        masks["attn_mask"] = normal(shape, scale=1.0, seed=4)
    if mask == "boolean":
        masks["attn_mask"] = masks["attn_mask"] > 1
        masks["attn_mask"][:, 0] = False
    if mask == "causal":
        masks["attn_mask"] = torch.full((L, keys), -math.inf).triu(1)
        masks["is_causal"] = True
    compare(ours, theirs, tensors, masks)


@pytest.mark.parametrize("need_weights", [False, True])
def test_module_with_dropout(device, need_weights):
    """With frozen projections no seed is drawn before torch draws the mask, so random states are equal."""
    ours, theirs = pair(device, dropout=0.4)
    for layer in (ours, theirs):
        layer.requires_grad_(False)
    tensors = sequences(ours, device=device)
    compare(ours, theirs, tensors, {"need_weights": need_weights})


def saved_bytes(layer, call):
    """Return the bytes that a call saves besides the layer's parameters."""
    own = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    storages = [x.untyped_storage() for x in saved_by(call)[1]]
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in own)


@pytest.mark.parametrize("shared", ["all", "keys", "none"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("in_session", [False, True])
def test_module_kept_bytes(device, shared, need_weights, in_session):
    bits = 2
    layer, _ = pair(device, bits=bits)
    tensors = sequences(layer, shared, device=device)
    call = partial(layer, need_weights=need_weights)
    if in_session:
        layer.quantizer = Quantizer(bits, context=ForwardContext())
        call = partial(CallGuard(layer.quantizer.context).call, layer, call)
    found = saved_bytes(layer, lambda: call(tensors) if in_session else call(*tensors))
    keys = tensors[1].shape[0]
    inputs = {"all": [L], "keys": [L, S], "none": [L, S, S]}[shared]
    expected = sum(quantized_bytes((length, N, E), bits) for length in inputs)
    for length in (L, keys, keys):  # as they lie in memory, sequences first
        expected += quantized_bytes((length, N, E), bits)
    expected += quantized_bytes((L * N, E), bits)  # the output projection's input
    assert found == expected


def test_masks_are_kept_apart():
    """The sum of the masks, a matrix for each head and sample, is not saved."""
    layer, _ = pair(bits=2)
    tensors = sequences(layer, "all")
    mask = torch.zeros(L, L)
    padding = torch.zeros(N, L)
    masks = {"key_padding_mask": padding, "attn_mask": mask}
    found = bytes_by(lambda: layer(*tensors, **masks, need_weights=False))
    without = bytes_by(lambda: layer(*tensors, need_weights=False))
    assert found - without == mask.nbytes + padding.nbytes


def test_frozen_modules():
    layer, _ = pair(bits=2)
    layer.requires_grad_(False)
    tensors = sequences(layer, "none")
    found = saved_bytes(layer, lambda: layer(*tensors, need_weights=False))
    assert found == sum(quantized_bytes((n, N, E), 2) for n in (L, S, S))
    y, saved = saved_by(lambda: layer(*(x.detach() for x in tensors))[0])
    assert not saved and not y.requires_grad


@pytest.mark.parametrize("norm_first", [False, True])
def test_within_transformer_layers(device, norm_first):
    """The attention is swapped in place, as a conversion does it."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "device": device}
    encoder = nn.TransformerEncoderLayer(E, H, 48, **options)
    decoder = nn.TransformerDecoderLayer(E, H, 48, **options)
    x = normal((N, L, E), device=device, scale=1.0, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(L, device=device)

    def run(encoder, decoder):
        memory = encoder(x, src_key_padding_mask=torch.zeros(N, L, device=device))
        y = decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)
        parameters = [*encoder.parameters(), *decoder.parameters()]
        return y, torch.autograd.grad((y * x).sum(), parameters)

    expected, grads = run(encoder, decoder)
    keys = [*encoder.state_dict()], [*decoder.state_dict()]
    for module in (*encoder.modules(), *decoder.modules()):
        if type(module) is nn.MultiheadAttention:
            module.__class__, module.quantizer = MultiheadAttention, Quantizer(8)
    y, ours = run(encoder, decoder)
    assert torch.equal(y, expected)
    flat = [torch.cat([g.flatten() for g in tensors]) for tensors in (ours, grads)]
    assert relative(*flat) < 0.02
    assert keys == ([*encoder.state_dict()], [*decoder.state_dict()])
    encoder.eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), encoder.train()(x), rtol=1e-4, atol=1e-5)


def test_module_is_torchs_in_all_else():
    layer, theirs = pair(add_bias_kv=True)
    assert isinstance(layer, nn.MultiheadAttention)
    assert [*layer.state_dict()] == [*theirs.state_dict()]
    assert "bits=8" in repr(layer)
    tensors = sequences(layer)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(*tensors)[0], layer(*tensors)[0])
        assert again.quantizer.bits == 8
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    theirs.load_state_dict(torch.load(buffer))
