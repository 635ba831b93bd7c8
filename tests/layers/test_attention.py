"""Scaled dot-product attention and MultiheadAttention against torch's own."""

import math
import warnings
import weakref
from functools import partial

import pytest
import torch
from composed import Composed
from exact_copies import Exact, Remembering
from expectation import mean_square, variance
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import bytes_by, relative
from quantized import quantized_bytes
from samples import normal
from torch import nn
from torch.nn import functional as torch_f

from fewbit.convert.function_mode import FunctionMode, FunctionQuantizers
from fewbit.functional.attention import score_blocks
from fewbit.functional.attention.attention import (
    How,
    _attend,
    attention,
    scaled_dot_product_attention,
    uses_blocks,
)
from fewbit.functional.attention.score_blocks import are_products_fast
from fewbit.nn.attention import MultiheadAttention
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.calls import CallGuard
from fewbit.runtime.saved.context import ForwardContext

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:Dynamo detected a call to a `functools",
)
MASK = torch.ones(9, 11, dtype=torch.bool).tril(1)


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


# -- attention: values and gradients ---------------------------------------------------------------


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
def test_which_gradients_come_from_blocks():
    """All other calls run torch's own function again."""
    tensors = [x.detach() for x in inputs(query=(2, 4, 150, 16), keys=150)]
    query, key, value = tensors

    def fits(*factors, mask=None, grad=query, **options):
        return uses_blocks((*factors, mask, None), (grad,), How(**options))

    assert fits(*tensors)
    assert not fits(*tensors, repeats=2)
    assert not fits(*tensors, dropout_p=0.3)
    assert not fits(*tensors, mask=torch.ones(150, 150).tril() > 0)
    assert not fits(*tensors, grad=query.double())
    assert not fits(*(x.half() for x in tensors), grad=query.half())
    assert not fits(*tensors, grad=query.bfloat16())
    assert not fits(query, key[:, :1], value[:, :1], enable_gqa=True)
    assert not fits(query, key[:, :1], value[:, :1])
    assert not fits(*(x[..., :0, :] for x in tensors), grad=query[..., :0, :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_from_blocks(name, dtype, monkeypatch):
    """On the CPU, gradients are computed from blocks of probabilities, in the dtype of the products."""
    # So that there are several blocks of heads.
    monkeypatch.setattr("fewbit.functional.attention.score_blocks._BLOCK", 2**15)
    query, keys, values, options = BLOCKS[name]
    tensors = inputs(query=query, keys=keys, values=values)
    if dtype is torch.bfloat16:
        tensors = [x.detach().to(dtype).requires_grad_() for x in tensors]
    cast = torch.bfloat16 if dtype == "autocast" else None
    quantizer = Remembering(4)
    with torch.autocast("cpu", cast, enabled=cast is not None):
        y = scaled_dot_product_attention(*tensors, quantizer=quantizer, **options)
    grad = normal(y.shape, scale=1.0, seed=7).to(y.dtype)
    restored = [kept.spec.dequantize(kept.tensors) for kept in quantizer.kept]
    if not are_products_fast(y.dtype):
        pytest.skip(
            f"torch's own function computes the gradients, because products of {y.dtype} are slow here"
        )
    assert uses_blocks((*restored, None, None), (grad,), How(**options), cast)
    exact = [x.to(y.dtype).double().requires_grad_() for x in restored]
    expected = torch_f.scaled_dot_product_attention(*exact, **options)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    ours = torch.autograd.grad(y, tensors, grad, retain_graph=True)
    largest = 1e-5 if y.dtype is torch.float32 else 0.02
    for a, b, x in zip(ours, theirs, tensors, strict=True):
        assert a.dtype is x.dtype
        torch.testing.assert_close(a.double(), b, rtol=0, atol=largest * float(b.abs().max()))
    with torch.autocast("cpu", torch.bfloat16):
        (of_key,) = torch.autograd.grad(y, tensors[1], grad)
    assert torch.equal(of_key, ours[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scale_of_zero(dtype):
    """All probabilities are equal then, so queries and keys have gradients of 0."""
    query, key, value = (normal((2, 140, 16), seed=i).to(dtype).requires_grad_() for i in range(3))
    scaled_dot_product_attention(query, key, value, scale=0.0).sum().backward()
    assert not query.grad.any() and not key.grad.any() and value.grad.any()


@pytest.mark.parametrize("length,scale", [(128, None), (1024, None), (256, 2.0)])
def test_blocks_of_bfloat16_are_as_precise_as_torch(length, scale):
    """Scores and sums over blocks of queries are float32, so errors grow neither with the scores nor with the length."""
    if not are_products_fast(torch.bfloat16):
        pytest.skip("products of bfloat16 are slow here")
    *factors, grad = (normal((1, 2, length, 32), scale=1.0, seed=i).bfloat16() for i in range(4))

    def errors(found):
        pairs = zip(found, exact, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    def torchs(dtype):
        own = [x.to(dtype).requires_grad_() for x in factors]
        y = torch_f.scaled_dot_product_attention(*own, is_causal=True, scale=scale)
        return torch.autograd.grad(y, own, grad.to(dtype))

    exact = torchs(torch.float64)
    ours = errors(score_blocks.gradients(*factors, grad, True, scale))
    theirs = errors(torchs(torch.bfloat16))
    assert all(a <= 2.0 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


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
    y = attention(*tensors, mask, bias, how, Exact())
    expected = torch_f.scaled_dot_product_attention(*tensors, whole)
    assert torch.equal(y, expected)
    grads = (torch.autograd.grad(y.sin().sum(), [*tensors, bias]) for y in (y, expected))
    for ours, theirs in zip(*grads, strict=True):
        assert relative(ours, theirs) < 1e-5
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


@pytest.mark.parametrize(
    "needed, kept", [((0,), (0, 1, 2)), ((1,), (0, 1, 2)), ((2,), (0, 1)), ((0, 2), (0, 1, 2))]
)
@pytest.mark.parametrize("repeats", [1, 2])
def test_only_what_gradients_need(device, needed, kept, repeats):
    """Heads that share keys save the keys once."""
    tensors = inputs(device, heads=4 // repeats)
    for place, x in enumerate(tensors):
        x.requires_grad_(place in needed)
    found = bytes_by(lambda: attention(*tensors, None, None, How(repeats=repeats), Quantizer(8)))
    assert found == sum(quantized_bytes(tensors[place].shape, 8) for place in kept)


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
        with FunctionMode(FunctionQuantizers(Quantizer(2), 3, Quantizer(2), Quantizer(2))):
            return torch_f.scaled_dot_product_attention(*tensors, mask)

    assert bytes_by(run) == sum(quantized_bytes(x.shape, 2) for x in tensors) + mask.nbytes
    assert torch.equal(run(), torch_f.scaled_dot_product_attention(*tensors, mask))
    quantizer = Remembering(2)
    with FunctionMode(FunctionQuantizers(quantizer, 3, quantizer, quantizer)):
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


def draws(tensors, grad, bits, count, kind):
    """Return `count` independent gradients, of samples of 64 features that have groups of their own."""
    many = [x.expand(count, *x.shape).clone().requires_grad_() for x in tensors]
    y = scaled_dot_product_attention(*many, bits=bits, quantizer=kind)
    return [x.double() for x in torch.autograd.grad(y, many, grad.expand_as(y))]


@pytest.mark.slow
def test_bias_is_as_the_formula_says():
    """It is 1/2 sum Var[x^] d2G / dx2 over the elements x of q, k and v, which uniform copies round independently.

    Copies of keys and values are made without their means. So many bits make the terms of higher order small.
    """
    torch.manual_seed(1)
    q, k, v, grad = (normal((4, 16), scale=1.0, seed=seed) for seed in range(4))
    doubles, function = [x.double() for x in (q, k, v)], exact_gradients(grad.double())
    exact, bias = function(*doubles), [0, 0, 0]
    for place, x in enumerate((q, k - k.mean(0), v - v.mean(0))):
        second = torch.func.jacfwd(torch.func.jacfwd(function, place), place)(*doubles)
        for i, curvature in enumerate(second):
            bias[i] += torch.einsum("abcdcd,cd->ab", curvature, variance(x, 5, "uniform")) / 2
    for found, wanted, off in zip(
        draws((q, k, v), grad, 5, 20000, "uniform"), exact, bias, strict=True
    ):
        assert mean_square(found, wanted + off) < 2 and mean_square(found, wanted) > 10


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


def test_channels_of_many_tokens(device):
    """In the order of a projection, each entry of each head is a channel, so large entries spoil the copies of others less."""
    scales = torch.tensor([10.0, 0.5, 1.0, 1.0], device=device)
    errors, shape = [], (1, 2, 260, 4)
    for count in (8, 0):
        tensors = [
            (normal((1, 260, 2, 4), device=device, scale=1.0, seed=i) * scales).transpose(1, 2)
            for i in range(3)
        ]
        tensors = [(x if count else x.contiguous()).requires_grad_() for x in tensors]
        quantizer = Remembering(4)
        scaled_dot_product_attention(*tensors, scale=1e-4, quantizer=quantizer)
        for copy in quantizer.kept:
            assert sum(x.nbytes for x in copy.tensors) == quantized_bytes(shape, 4) + 4 * count
        restored = quantizer.kept[0].spec.dequantize(quantizer.kept[0].tensors)
        assert restored.stride() == tensors[0].stride()
        errors.append((restored - tensors[0]).square().mean((0, 1, 2)).sqrt())
    assert errors[0][1] < errors[1][1] / 2 and errors[0].norm() < errors[1].norm() / 1.3


def test_heads_without_entries():
    tensors = [torch.ones(1, 2, 300, 0, requires_grad=True) for _ in range(3)]
    scaled_dot_product_attention(*tensors).sum().backward()
    assert all(x.grad.shape == x.shape for x in tensors)


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


@pytest.mark.parametrize("shared", ["all", "keys", "none"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_module_kept_bytes(device, shared, need_weights, in_session, is_frozen):
    bits = 2
    layer, _ = pair(device, bits=bits)
    layer.requires_grad_(not is_frozen)
    tensors = sequences(layer, shared, device=device)
    call = partial(layer, need_weights=need_weights)
    if in_session:
        layer.quantizer = Quantizer(bits, context=ForwardContext())
        call = partial(CallGuard(layer.quantizer.context).call, layer, call)
    run = Composed(lambda _: call(tensors) if in_session else call(*tensors), layer=layer)
    found = bytes_by(run)
    keys = tensors[1].shape[0]
    inputs = {"all": [L], "keys": [L, S], "none": [L, S, S]}[shared]
    projected = L, keys, keys  # as they lie in memory, sequences first
    saved = projected if is_frozen else (*inputs, *projected)
    expected = sum(quantized_bytes((length, N, E), bits) for length in saved)
    # the output projection's input
    assert found == expected + (0 if is_frozen else quantized_bytes((L * N, E), bits))


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
