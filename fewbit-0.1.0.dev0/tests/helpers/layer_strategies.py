"""Strategies of hypothesis that draw rows of layers (`layers.Layer`) with arguments and sizes of all kinds."""

from functools import partial
from math import prod

import torch
from hypothesis import assume
from hypothesis import strategies as st
from layers import LAST, LAST_3D, Layer, function_row, indices
from samples import normal
from torch.nn import functional as torch_f

import fewbit.functional as F

sizes = partial(st.lists, st.integers(1, 6))


@st.composite
def orders(draw, dims):
    """Draw an order of dimensions in storage: contiguous, channels last, or any permutation."""
    last = (0, *range(2, dims), 1)[:dims]
    either = st.sampled_from((tuple(range(dims)), last)), st.permutations(range(dims)).map(tuple)
    return draw(st.one_of(*either))


@st.composite
def convolutions(draw):
    dims, groups = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3)))

    def each(most):
        return tuple(draw(st.integers(1, most)) for _ in range(dims))

    kernel = each(3)
    options = {
        "stride": each(2),
        "dilation": each(2),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    options["padding"] = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    channels = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    batch = (draw(st.integers(1, 3)),) if draw(st.booleans()) else ()
    shape = (*batch, channels[0], *(4 + size for size in each(3)))
    last = {2: LAST, 3: LAST_3D}.get(dims) if batch and draw(st.booleans()) else None
    name = f"Conv{draw(st.sampled_from(('', 'Transpose')))}{dims}d"
    return Layer(name, (*channels, kernel), shape, options, format=last)


@st.composite
def linears(draw):
    features = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    shape = (*draw(sizes(max_size=4)), features[0])
    options = {"bias": draw(st.booleans())}
    return Layer("Linear", features, shape, options, order=draw(orders(len(shape))))


@st.composite
def norms(draw):
    """Draw a norm with 4 elements or more for each statistic, also with one sample, one group or one channel."""
    kind = draw(st.sampled_from(("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm")))
    n, c = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    name, affine = kind, "affine"
    if kind in ("LayerNorm", "RMSNorm"):
        normalized = tuple(draw(sizes(min_size=1, max_size=3)))
        shape = (*draw(sizes(max_size=3)), *normalized)
        arguments, count, affine = (normalized,), prod(normalized), "elementwise_affine"
    elif kind == "GroupNorm":
        groups = draw(st.sampled_from([number for number in range(1, c + 1) if c % number == 0]))
        size = draw(sizes(max_size=3))
        arguments, shape, count = (groups, c), (n, c, *size), c // groups * prod(size)
    else:
        dims = draw(st.integers(1, 3))
        size = draw(sizes(min_size=dims, max_size=dims))
        name, arguments, shape, count = f"{kind}{dims}d", (c,), (n, c, *size), prod(size)
        if kind == "BatchNorm":
            count *= n
            if dims == 1 and draw(st.booleans()):
                shape, count = (size[0], c), size[0]
        elif draw(st.booleans()):
            shape = shape[1:]
    assume(count >= 4)
    options = {affine: draw(st.booleans())}
    if kind in ("BatchNorm", "InstanceNorm"):
        options["track_running_stats"] = draw(st.booleans())
    if kind == "LayerNorm":
        options["bias"] = draw(st.booleans())
    return Layer(name, arguments, shape, options, order=draw(orders(len(shape))))


@st.composite
def poolings(draw):
    dims = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(("Max", "Avg", "AdaptiveMax", "AdaptiveAvg")))
    lead = draw(st.sampled_from([(2, 3), (3,), (1, 1), (0, 2)]))
    shape = (*lead, *(draw(st.integers(1, 9)) for _ in range(dims)))

    def amounts(low, high):
        return draw(st.integers(low, high) | st.tuples(*[st.integers(low, high)] * dims))

    options = {}
    if "Adaptive" in kind:
        arguments = (amounts(1, 7),)
    else:
        kernel = amounts(1, 4)
        arguments = (kernel, draw(st.sampled_from([kernel, amounts(1, 3)])), amounts(0, 2))
        options["ceil_mode"] = draw(st.booleans())
        if kind == "Max":
            arguments += (amounts(1, 3),)
        else:
            options["count_include_pad"] = draw(st.booleans())
    if "Max" in kind:
        options["return_indices"] = draw(st.booleans())
    seed, has_ties = draw(st.integers(0, 9)), draw(st.booleans())
    order = draw(orders(len(shape)))

    def first(device, dtype):
        x = normal(shape, dtype, device, scale=1.0, seed=seed)
        if has_ties:
            x = x.round()
            x[x == 2] = torch.nan
        back = [order.index(dim) for dim in range(len(order))]
        return x.permute(order).contiguous().permute(back)

    name = f"{kind}Pool{dims}d"
    return Layer(name, arguments, shape, options, first=first, has_bits=False)


@st.composite
def dropouts(draw):
    name, dims = draw(
        st.sampled_from([
            ("Dropout", (0, 5)), ("Dropout1d", (2, 3)), ("Dropout2d", (4, 4)), ("Dropout3d", (4, 5)),
            ("AlphaDropout", (0, 5)), ("FeatureAlphaDropout", (2, 5)),
        ])
    )  # fmt: skip
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=dims[0], max_size=dims[1])))
    order = draw(orders(len(shape))) if shape else None
    return Layer(name, (draw(st.floats(0.0, 1.0)),), shape, order=order, has_bits=False)


@st.composite
def functions_of_one(draw):
    shape = tuple(draw(sizes(min_size=2, max_size=4)))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    name, arguments = draw(
        st.sampled_from(
            [("PReLU", ()), ("PReLU", (shape[1],)), ("Softmax", (dim,)), ("LogSoftmax", (dim,))]
        )
    )
    return Layer(name, arguments, shape, order=draw(orders(len(shape))))


@st.composite
def functions_of_two(draw):
    shape = tuple(draw(sizes(min_size=1, max_size=4)))
    if draw(st.booleans()):
        other = draw(st.integers(1, 6))
        arguments = shape[-1], other, 3, draw(st.booleans())
        return Layer("Bilinear", arguments, shape, others=((*shape[:-1], other),))
    name = draw(st.sampled_from(("SwiGLU", "GEGLU", "ReGLU")))
    repeats = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    other = tuple(1 if is_one else size for size, is_one in zip(shape, repeats, strict=True))
    pair = draw(st.permutations([shape, other[draw(st.integers(0, len(shape))) :]]))
    return Layer(name, (), pair[0], others=(pair[1],))


@st.composite
def attentions(draw):
    query = draw(st.sampled_from([(5, 8), (3, 5, 8), (2, 4, 5, 8), (2, 3, 4, 5, 8), (2, 4, 1, 8)]))
    keys, is_grouped = draw(st.integers(1, 7)), draw(st.booleans()) and len(query) == 4
    batch = (*query[:-3], 2) if is_grouped else query[:-2]
    key, value = (*batch, keys, 8), (*batch, keys, draw(st.sampled_from([8, 3, 32])))
    options = {"scale": draw(st.sampled_from([None, 0.5])), "enable_gqa": is_grouped}
    options["dropout_p"] = draw(st.sampled_from([0.0, 0.5]))
    masked = draw(st.sampled_from([None, "boolean", "float"]))
    mask = ()
    if masked == "float":
        mask = ((query[-2], keys),)
    elif masked == "boolean":
        mask = (lambda device, dtype: normal((query[-2], keys), scale=1.0, seed=4) > -2,)
    else:
        options["is_causal"] = draw(st.booleans())
    functions = (
        partial(library.scaled_dot_product_attention, **options) for library in (F, torch_f)
    )
    return function_row("scaled_dot_product_attention", *functions, query, (key, value, *mask))


@st.composite
def losses(draw):
    shape = tuple(draw(sizes(min_size=1, max_size=4)))
    classes = shape[min(1, len(shape) - 1)]
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "ignore_index": draw(st.sampled_from([-100, 0])),
    }
    target = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    is_weighted = draw(st.booleans())

    def call(function, logits, target, **ours):
        weight = torch.arange(1, classes + 1, dtype=logits.dtype) if is_weighted else None
        return function(logits, target, weight, **options, **ours)

    functions = (partial(call, library.cross_entropy) for library in (F, torch_f))
    return function_row("cross_entropy", *functions, shape, (indices(classes, *target),))


@st.composite
def embeddings(draw):
    rows, shape = draw(st.integers(1, 400)), draw(st.lists(st.integers(0, 5), max_size=3))
    options = {
        "scale_grad_by_freq": draw(st.booleans()),
        "padding_idx": draw(st.sampled_from([None, 0, -1])),
        "max_norm": draw(st.sampled_from([None, 0.5])),
    }
    first = indices(rows, *shape)
    return Layer("Embedding", (rows, 4), tuple(shape), options, first=first, has_bits=False)


STRATEGIES = {
    "convolution": convolutions,
    "linear": linears,
    "norm": norms,
    "pooling": poolings,
    "dropout": dropouts,
    "one input": functions_of_one,
    "two inputs": functions_of_two,
    "attention": attentions,
    "loss": losses,
    "embedding": embeddings,
}
"""{kind of layer: function that returns a strategy}."""
