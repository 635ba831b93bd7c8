"""What AC-GC's bounds are made of, found out in one backward pass: `policy="error-bound"` goes by it.

The rounding of what a layer keeps adds D to the squared error of a gradient that the layer makes from it; allowed is
D <= e^2 V^2 (docs/theory/ac_gc.md). Here is V^2 of each such gradient, and D as a function of the mean squared error of
what is kept, either from a formula of `error_bounds` or measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Demand:
    """Of one gradient on one variable: its D is to be at most e^2 v2.

    label: which gradient: "weight", "input", "query" ..., with the layer's name in front where it is not the one that
    keeps the variable ("block.q_proj: weight"). kind: "in expectation" or "measured". v2: the squared norm of the
    gradient as it would be without errors. D = (first dx + second dx^2)^2, dx^2 being the mean squared error of the kept
    elements. Of several calls of a layer their sums.
    """

    label: str
    kind: str
    v2: float
    first: float
    second: float = 0.0


@dataclass
class VariableSeen:
    """Of one variable in one forward and its backward.

    average: bits it had, fixed or not. elements: of all its tensors. samples: that share its bits, 0 where they do
    not. squares: 16 values in rising order: what rounding adds to samples is measured by (runtime/variables.py), each
    the mean of as many samples; of fewer samples than that the values themselves, and zeros; with samples = 0 the first
    is that of the whole tensor. error2: the mean squared error that its elements had. dtype_bytes: of an element that is kept exactly. demands: none where no gradient came by. channel_weights: 1 / dx*^2 of each channel
    (dimension 1), of mean 1; None where there are no channels, or all are alike. is_known: whether all gradients that
    it goes into have been seen.
    """

    average: float
    is_fixed: bool
    elements: int = 0
    samples: int = 0
    squares: list[float] = field(default_factory=list)
    error2: float = 0.0
    dtype_bytes: int = 4
    demands: list[Demand] = field(default_factory=list)
    channel_weights: list[float] | None = None
    is_known: bool = True


@dataclass
class ActivationSeen:
    """Of a few-bit activation: function and parameters of `fewbit.functions`, v2 = |gradient of its input|^2, grad2 =
    |gradient of its result|^2; of several calls their sums.
    """

    function: str
    parameters: tuple[float, ...]
    v2: float
    grad2: float


@dataclass
class BoundsSeen:
    """What an observation says.

    variables: by (name of the layer, number of its input). activations: by the path of the module, or
    "path of the module that calls:function". monitored: by variable (label of a demand, squared norm of the gradient
    as it was, that of the gradient from exact values), both from the same gradient of the layer's result.
    """

    variables: dict[tuple[str, int], VariableSeen]
    activations: dict[str, ActivationSeen]
    monitored: dict[tuple[str, int], list[tuple[str, float, float]]]
