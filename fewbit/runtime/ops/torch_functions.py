"""torch's own computation of every function in `fewbit.functions`, called with its input and then its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fewbit import functions
from fewbit.runtime.interop.original_functions import functional as F


def _quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def _gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu_10(x):
    return torch.clip(F.gelu(x), -10.0, 10.0)


def _laplace(x, mu, sigma):
    return 0.5 * (1.0 + torch.erf((x - mu).div(sigma * math.sqrt(2.0))))


def _identity(x):
    return x.clone()  # an op's output may not be its input


FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(F, name) for name in functions.names() if hasattr(F, name)},
    "rrelu": lambda x, lower, upper: F.rrelu(x, lower, upper, training=False),
    "relu_squared": lambda x: torch.square(F.relu(x)),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": _gelu_fast,
    "gelu_10": _gelu_10,
    "quick_gelu": _quick_gelu,
    "sigmoid": torch.sigmoid,
    "laplace": _laplace,
    "tanh": torch.tanh,
    "sqrtsoftplus": lambda x: torch.sqrt(F.softplus(x)),
    "identity": _identity,
}
"""{name in `fewbit.functions`: the function}."""

IN_PLACE: dict[str, Callable[..., torch.Tensor]] = {
    "relu": torch.relu_,
    "relu6": lambda x: F.relu6(x, inplace=True),
    "leaky_relu": F.leaky_relu_,
    "rrelu": lambda x, lower, upper: F.rrelu(x, lower, upper, training=False, inplace=True),
    "threshold": F.threshold_,
    "elu": F.elu_,
    "celu": F.celu_,
    "selu": F.selu_,
    "hardtanh": F.hardtanh_,
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
}
"""{name in `fewbit.functions`: a function that computes in place}."""

AUTOCAST_FLOAT32 = {"cuda": {"softplus", "sqrtsoftplus"}}
"""{device type: functions that torch's autocast runs in float32}."""

CONTIGUOUS = {"logsigmoid", "rrelu"}
"""Functions whose results, on at least one device, are contiguous for inputs of any strides."""

OTHER_STRIDES = {"relu6", "hardtanh", "identity"}
"""Functions whose results, for contiguous inputs, may have other strides than those of contiguous tensors in dimensions of size 1."""

MADE_CONTIGUOUS = {"logsigmoid": {"cpu"}}
"""{function: types of devices on which torch computes it from a contiguous copy of the input, with a contiguous gradient}."""
