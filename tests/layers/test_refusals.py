"""Bad inputs and settings of layers: fewbit's own messages, and errors of the types that torch raises."""

import warnings
from functools import partial

import pytest
import torch
from layers import ROWS, first_of_each
from samples import normal
from torch import nn
from torch.nn import functional as torch_f

import fewbit.functional as F
import fewbit.nn
from fewbit.errors import InputError

X = normal((3, 4))
FUNCTIONS = {  # {name: a call with settings}
    "linear": partial(F.linear, X, normal((4, 4))),
    "prelu": partial(F.prelu, X, X[0, :1]),
    "softmax": partial(F.softmax, X, 1),
    "log_softmax": partial(F.log_softmax, X, 1),
    "bilinear": partial(F.bilinear, X, X, normal((2, 4, 4))),
    "swiglu": partial(F.swiglu, X, X),
    "geglu": partial(F.geglu, X, X),
    "reglu": partial(F.reglu, X, X),
    "attention": partial(F.scaled_dot_product_attention, X, X, X),
    "cross_entropy": partial(F.cross_entropy, X, torch.tensor([0, 1, 2])),
    "layer_norm": partial(F.layer_norm, X, (4,)),
    "conv1d": partial(F.conv1d, X, normal((2, 3, 2))),
    "matmul": partial(F.matmul, X, X.t()),
    "mul": partial(F.mul, X, X),
}


@pytest.mark.parametrize("options, message", [
    ({"bits": 0}, "bits: expected a whole number from 1 to 8, got 0"),
    ({"bits": 9}, "bits: expected a whole number from 1 to 8, got 9"),
    ({"group_size": 100}, "group_size: expected a multiple of 32 from 32 to 65536, got 100"),
])  # fmt: skip
def test_bad_settings(options, message):
    modules = [row for row in first_of_each(ROWS) if row.has_bits and hasattr(fewbit.nn, row.name)]
    calls = {row.name: row.ours for row in modules if "bits" in options or row.has_copies}
    for name, call in (FUNCTIONS | calls).items():
        with pytest.raises(InputError, match=message):
            call(**options)
            pytest.fail(name)


LOSS = {
    "input": torch.rand(5, 8),
    "linear_weight": torch.rand(9, 8),
    "target": torch.zeros(5, dtype=torch.int64),
}
OWN = {  # {message: a call}
    "copies: expected 1 or 2, got 3": lambda: fewbit.nn.LayerNorm(3, copies=3),
    "approximate: .* none or tanh, got 'sigmoid'": lambda: F.geglu(X, X, "sigmoid"),
    "approximate: expected none or tanh, got 'sigmoid'": lambda: fewbit.nn.GEGLU("sigmoid"),
    r"expected a torch\.Tensor, got \[1\.0\]": lambda: F.mul(X, [1.0]),
    "input: expected a tensor, got list": lambda: F.linear_cross_entropy(**LOSS | {"input": [1.0]}),
    "reduction: expected mean or sum or none, got 'max'":
        lambda: F.linear_cross_entropy(**LOSS, reduction="max"),
    "chunk_size: expected at least 1, got 0": lambda: F.linear_cross_entropy(**LOSS, chunk_size=0),
    r"target: expected indices of classes \(int64\), got torch.float32":
        lambda: F.linear_cross_entropy(**LOSS | {"target": torch.rand(5)}),
    r"target: expected the shape \(5,\), got \(4,\)":
        lambda: F.linear_cross_entropy(**LOSS | {"target": torch.zeros(4, dtype=torch.int64)}),
    r"input and linear_weight: expected \(\*, features\) and \(classes, features\), got \(5, 8\) and \(9, 7\)":
        lambda: F.linear_cross_entropy(**LOSS | {"linear_weight": torch.rand(9, 7)}),
}  # fmt: skip


@pytest.mark.parametrize("message", OWN)
def test_messages(message):
    with pytest.raises(InputError, match=f"^{message}$"):
        OWN[message]()


def leaf(*shape):
    return normal(shape).requires_grad_()


IMAGE = (2, 3, 9, 8)
ATTENTION = (3, 4, 9, 16), (3, 4, 11, 16), (3, 4, 11, 16)
LIKE_TORCH = {  # {name: functions of functional, nn}
    "linear": lambda functional, nn: nn.Linear(3, 4)(torch.ones(2, 5)),
    "a batch of one": lambda functional, nn: nn.BatchNorm1d(4)(torch.ones(1, 4)),
    "dimensions of batch norm": lambda functional, nn: nn.BatchNorm2d(4)(torch.ones(1, 4)),
    "strided 'same'": lambda functional, nn: functional.conv1d(
        torch.ones(1, 1, 9), leaf(1, 1, 3), None, 2, "same"
    ),
    **{
        f"glu of {shape}": lambda functional, nn, shape=shape, dim=dim: nn.GLU(dim)(leaf(*shape))
        for shape, dim in (((4, 5), -1), ((4, 6), 2), ((), 0))
    },
    "softmax": lambda functional, nn: functional.softmax(leaf(3, 4), 5),
    "log_softmax": lambda functional, nn: functional.log_softmax(leaf(3, 4), 5),
    "an index": lambda functional, nn: functional.embedding(torch.tensor([5]), leaf(5, 3)),
    "padding_idx": lambda functional, nn: functional.embedding(
        torch.tensor([1]), leaf(5, 3), padding_idx=7
    ),
    "an index that is no integer": lambda functional, nn: functional.embedding(
        torch.tensor([1.0]), leaf(5, 3)
    ),
    "dropout1d": lambda functional, nn: functional.dropout1d(leaf(2, 3, 4, 5), 0.3),
    **{
        f"p of {name}": lambda functional, nn, name=name: getattr(functional, name)(
            leaf(2, 3, 4, 5), 1.5, True
        )
        for name in ("dropout", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    },
    **{
        f"{name}, {dims}": lambda functional, nn, name=name, dims=dims: getattr(functional, name)(
            leaf(*(2, 3, 4, 5)[:dims]), (9, 9, 9)
        )
        for name, dims in (
            ("max_pool2d", 2),
            ("max_pool2d", 4),
            ("avg_pool2d", 4),
            ("adaptive_avg_pool3d", 2),
        )
    },
    "max_pool2d of integers": lambda functional, nn: functional.max_pool2d(leaf(*IMAGE).long(), 9),
    **{
        f"interpolate {options}": lambda functional, nn, options=options: functional.interpolate(
            leaf(*IMAGE), **options
        )
        for options in (
            {"mode": "area"},
            {"mode": "area", "size": 3, "scale_factor": 2.0},
            {"mode": "area", "size": 3, "align_corners": True},
            {"mode": "area", "size": (3, 3, 3)},
            {"mode": "area", "scale_factor": (3.0,)},
            {"mode": "area", "size": 3, "recompute_scale_factor": True},
            {"mode": "area", "size": 3, "antialias": True},
            {"mode": "linear", "size": 3},
        )
    },
    "features of attention": lambda functional, nn: functional.scaled_dot_product_attention(
        leaf(3, 4, 9, 16), leaf(3, 4, 11, 5), leaf(3, 4, 11, 16)
    ),
    "dropout of attention": lambda functional, nn: functional.scaled_dot_product_attention(
        *(leaf(*shape) for shape in ATTENTION), dropout_p=2.0
    ),
    "too many arguments of attention": lambda functional, nn: (
        functional.scaled_dot_product_attention(
            *(leaf(*shape) for shape in ATTENTION), None, 0.0, False, None, False, 2
        )
    ),
    "a weight of cross_entropy that needs a gradient": lambda functional, nn: (
        functional.cross_entropy(leaf(3, 4), torch.tensor([0, 1, 2]), leaf(4).abs())
    ),
    "heads": lambda functional, nn: nn.MultiheadAttention(32, 5),
}
L, S, N, E = 7, 9, 3, 32
HEADS = {  # {name: (change of query, key and value, masks)}
    "features": (lambda q, k, v: (q[..., :5], k, v), {}),
    "lengths": (lambda q, k, v: (q, k[:5], v), {}),
    "dimensions": (lambda q, k, v: (q[None], k, v), {}),
    "a mask's shape": (lambda *x: x, {"attn_mask": torch.zeros(L, L)}),
    "a mask's heads": (lambda *x: x, {"attn_mask": torch.zeros(2, L, S)}),
    "a mask's dtype": (lambda *x: x, {"attn_mask": torch.zeros(L, S, dtype=torch.int64)}),
    "padding": (lambda *x: x, {"key_padding_mask": torch.zeros(N, L)}),
    "is_causal without a mask": (lambda *x: x, {"is_causal": True}),
}


def _attend(name, functional, nn):
    change, masks = HEADS[name]
    return nn.MultiheadAttention(E, 4)(*change(*(leaf(n, N, E) for n in (L, S, S))), **masks)


LIKE_TORCH |= {f"MultiheadAttention: {name}": partial(_attend, name) for name in HEADS}


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_what_torch_refuses(name):
    refusals = []
    for libraries in ((torch_f, nn), (F, fewbit.nn)):
        with warnings.catch_warnings(), pytest.raises(Exception) as error:  # noqa: PT011
            warnings.simplefilter("ignore")
            LIKE_TORCH[name](*libraries)
        refusals.append(error.type)
    assert refusals[0] is refusals[1] and not issubclass(refusals[0], pytest.fail.Exception)
