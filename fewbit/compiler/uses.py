"""The uses of a tensor in a backward graph: which ops of ATen may get a dequantized copy of an argument.

Those that are affine in it may: the expected value for an unbiased copy is the result for the exact tensor.
"""

from __future__ import annotations

import math
import operator

import torch
import torch._inductor.inductor_prims  # defines the ops of Inductor that `prims` has
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims

LINEAR, UNUSED = "linear", "unused"


def _overloads(*names: str, ops=aten) -> set:
    found = set()
    for name in names:
        packet, _, overload = name.partition(".")
        packet = getattr(ops, packet, None)
        if packet is not None and hasattr(packet, overload):
            found.add(getattr(packet, overload))
    return found


VIEWS = _overloads(
    "view.default", "reshape.default", "_unsafe_view.default", "permute.default", "transpose.int", "t.default",
    "unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default", "expand.default", "alias.default", "detach.default",
    "clone.default", "slice.Tensor", "select.int", "split_with_sizes.default", "split.Tensor", "unbind.int",
)  # fmt: skip
"""Ops that return elements of their argument in another order or shape."""
CASTS = _overloads("convert_element_type.default", ops=prims) | _overloads("_to_copy.default")
"""Ops that return their argument in another dtype."""
PADDING = _overloads("constant_pad_nd.default")
AFFINE = VIEWS | CASTS | PADDING | _overloads("fma.default", ops=prims) | _overloads(
    "mul.Tensor", "mul.Scalar", "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar", "neg.default",
)  # fmt: skip
"""Pointwise ops, views and padding, which are affine in each argument."""
MULTILINEAR = AFFINE | _overloads(
    "mm.default", "bmm.default", "addmm.default", "baddbmm.default", "mv.default", "dot.default", "sum.default",
    "sum.dim_IntList", "mean.default", "mean.dim", "cat.default", "stack.default", "where.self", "where.ScalarSelf",
    "convolution.default", "convolution_backward.default", "gather.default", "index_select.default", "index.Tensor",
    "slice_backward.default", "select_backward.default", "addcmul.default", "flip.default",
    "cumsum.default", "roll.default",
)  # fmt: skip
"""Ops that are affine in each floating argument."""
DIVISIONS = _overloads("div.Tensor", "div.Scalar")
VARIANCES = _overloads(
    "var.correction", "var_mean.correction", "std.correction", "std_mean.correction"
)
REDUCTIONS = VARIANCES | _overloads(
    "sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "amax.default", "amin.default", "logsumexp.default", "linalg_vector_norm.default",
)  # fmt: skip
"""Ops that compute a number for each row or channel."""
_SELECTIONS = _overloads("topk.default", "sort.default", "sort.stable", "max.dim", "min.dim")
"""Ops whose second result has the places of elements along a dimension."""
_POOLS = _overloads(
    "_low_memory_max_pool_with_offsets.default",
    "_low_memory_max_pool2d_with_offsets.default",
    ops=prims,
)
"""Ops whose second result has the place of each maximum in its window, whose size is the second argument."""
OF_OFFSETS = _overloads(
    "_low_memory_max_pool_offsets_to_indices.default",
    "_low_memory_max_pool2d_offsets_to_indices.default",
    ops=prims,
)
"""Ops that compute the indices of maxima from their places in windows."""
_ONLY_SIZES = _overloads(
    "max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default"
)
"""Ops that need only the size of their argument number 1."""

POINTWISE = AFFINE | DIVISIONS | _overloads(
    *(f"{name}.default" for name in (
        "abs erf exp exp2 expm1 log log1p log2 reciprocal relu rsqrt sqrt sigmoid sign sin cos tanh cosh sinh atan asinh "
        "minimum maximum clamp clamp_min clamp_max floor ceil round logical_not logical_and logical_or bitwise_not isnan "
        "full scalar_tensor iota ones zeros empty arange full_like zeros_like ones_like hardtanh leaky_relu elu softplus "
        "mish silu gelu lift_fresh_copy"
    ).split()),
    *(f"{name}.{kind}" for name in "eq ne lt le gt ge".split() for kind in ("Scalar", "Tensor")),
    "bitwise_and.Tensor", "bitwise_or.Tensor", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "where.self", "where.ScalarSelf",
    "clamp.Tensor", "arange.start_step", "arange.start", "scatter.value", "tril.default", "triu.default",
) | _overloads(
    "iota.default", "inductor_lookup_seed.default", "inductor_random.default", "inductor_randint.default", ops=prims
)  # fmt: skip
"""Ops whose result takes no longer to compute again than to dequantize."""
RANDOM = _overloads("inductor_random.default", "inductor_randint.default", ops=prims)
"""Inductor's ops that draw numbers from a seed, of which nothing needs to be saved."""
ELEMENTWISE = {op for op in POINTWISE if op.namespace == "aten"} - VIEWS - CASTS - PADDING - _overloads(
    "full.default", "scalar_tensor.default", "ones.default", "zeros.default", "empty.default", "arange.default",
    "arange.start", "arange.start_step", "full_like.default", "scatter.value", "tril.default", "triu.default",
)  # fmt: skip
"""Ops each element of whose result is a function of one element of each argument."""

_ATTENTION = "_scaled_dot_product_"
_ATTENTIONS = "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"
ATTENTIONS = {
    getattr(aten, f"{_ATTENTION}{name}_backward").default: getattr(aten, _ATTENTION + name).default
    for name in _ATTENTIONS
    if hasattr(aten, f"{_ATTENTION}{name}_backward")
}
"""{backward op of an attention: the forward op}. Its results begin with the output and the rows' log-sum-exp."""


_QKV = "query", "key", "value"
ATTENTION = {name: ("attention", number) for number, name in enumerate(_QKV)}
"""{the name of an argument of attention: its use}."""
RESULTS = "out", "logsumexp"
"""The names of the backward op's arguments that are the first two results of the forward op."""


def argument(node: fx.Node, name: str):
    """Return the argument of this name in the schema of the node's op, or None."""
    names = [declared.name for declared in node.target._schema.arguments]
    return dict(zip(names, node.args)).get(name, node.kwargs.get(name))  # noqa: B905 - defaults may be left out


def attention_of(node: fx.Node) -> fx.Node | None:
    """Return the forward node of an attention's backward node, unless it has dropout and so cannot be computed again."""
    if node.target not in ATTENTIONS or argument(node, "dropout_p"):
        return None
    out, sums = (unaliased(argument(node, name)) for name in RESULTS)
    if any(x.target is not operator.getitem for x in (out, sums)):
        return None
    forward = out.args[0]
    inputs = [argument(forward, name) for name in _QKV] if forward.op == "call_function" else []
    is_own = forward.target is ATTENTIONS[node.target] and forward is sums.args[0]
    return forward if is_own and inputs == [argument(node, name) for name in _QKV] else None


def codes_of(node: fx.Node) -> int | None:
    """Return the number of values, up to 256, that a mask or an index can have; else None."""
    value = node.meta["val"]
    if value.dtype == torch.bool:
        return 2
    if value.is_floating_point() or node.target is not operator.getitem or node.args[1] != 1:
        return None
    producer = node.args[0]
    if producer.target in _POOLS:
        count = math.prod(producer.args[1])
    elif producer.target in _SELECTIONS:
        source = producer.args[0].meta["val"]
        dim = argument(producer, "dim")
        count = source.shape[-1 if dim is None else dim]
    else:
        return None
    return count if isinstance(count, int) and count <= 256 else None


def unaliased(node: fx.Node) -> fx.Node:
    """Return the node of which a node is an alias, else the node."""
    while node.target in (aten.alias.default, aten.detach.default):
        node = node.args[0]
    return node


def use_of(user: fx.Node, x: fx.Node) -> str | tuple[str, int] | None:
    """Return how a node of the backward graph uses its input x, which does not depend on the tangents.

    Returns:
        LINEAR: user is linear in x, or x is a mask or an index. A value of ATTENTION: x is an input of an attention
        that is computed again. UNUSED: only the size of x is needed, or x is a result of such an attention. None: user
        needs x exactly.
    """
    if user.op != "call_function" or not isinstance(x.meta.get("val"), torch.Tensor):
        return None
    if user.target in ATTENTIONS:
        if attention_of(user) is None:
            return None
        for name in _QKV:
            if argument(user, name) is x:
                return ATTENTION[name]
        is_result = any(argument(user, name) is x for name in RESULTS)
        return UNUSED if is_result else None
    if user.target in _ONLY_SIZES:
        return UNUSED if user.args[1] is x and user.args.count(x) == 1 else None
    if codes_of(x) is not None:
        return LINEAR
    if not x.meta["val"].is_floating_point():
        return None
    if user.target in DIVISIONS:
        return LINEAR if user.args[1] is not x else None
    return LINEAR if user.target in MULTILINEAR else None
