"""What AC-GC's bounds are made of, found out in one backward pass: `policy="error-bound"` goes by it.

Rounding what a layer keeps adds D to the squared error of a gradient that the layer makes of it; allowed is
D <= e^2 V^2, V^2 being the squared norm of the exact gradient (docs/theory/ac_gc.md). While the backward pass of one
forward runs, each layer tells V^2 and D of its gradients:

- by the formulas of `demands`, from norms of tensors that are there;
- of other layers D is measured: their backward runs again with noise in one of the tensors that they restore. Its
  variance is that of the errors that the tensor has, or of rounding to 8 bits where that is more.

What comes out is the gradient with errors, whose squared norm has D of the present errors in it on average: that is
taken off. For some variables exact values are kept too, with which their layers' backward runs again:
for the truth about |g^|^2 / |g|^2, of gradients from one gradient of the layer's result.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fewbit.config import MAX_BITS
from fewbit.policies.error_bound import error_model as demands
from fewbit.policies.error_bound.error_model import Cost, Part
from fewbit.runtime.quantizers.spec import QuantizationRecord
from fewbit.runtime.saved.assignment import TensorSlot
from fewbit.runtime.saved.norms import is_dense, norm
from fewbit.runtime.saved.probe import SPREAD, VarianceProbe
from fewbit.runtime.saved.restoring import Restoring

EXPECTED, MEASURED = "in expectation", "measured"
_LEAST_ERROR = 1.0 / (6.0 * (2.0**MAX_BITS - 1) ** 2)
"""Times the sum of length times range squared: the sum of squared errors of 8 bits, the least that noise is tried of."""


@dataclass(frozen=True)
class GradientConstraint:
    """Of one gradient on one variable: its D is to be at most e^2 v2.

    label: which gradient: "weight", "input", "query" ..., with the layer's name in front where it is not the one that
    keeps the variable ("block.q_proj: weight"). kind: "in expectation" or "measured". v2: the squared norm of the
    gradient as it would be without errors. D = (first dx + second dx^2)^2, dx^2 being the mean squared error of the kept
    elements; where the gradient depends on several variables, D is that of this one times their number, so that each
    has an equal share. Of several calls of a layer their sums.
    """

    label: str
    kind: str
    v2: float
    first: float
    second: float = 0.0


@dataclass
class TensorNorms:
    """Of one variable in one forward and its backward.

    average: bits it had, fixed or not. elements: of all its tensors. samples: that share its bits, 0 where they do
    not. squares: SPREAD values in rising order, what samples share bits by (the sums over groups of length times range
    squared), each the mean of as many samples; of fewer samples the values themselves, and zeros; with samples = 0
    that of the whole tensor, and zeros. error2: the mean squared error that the elements had. dtype_bytes: of one
    that is kept exactly. demands: none where no gradient came by. channel_weights: 1 / dx*^2 of each channel (dimension
    1), of mean 1; None where there are no channels, or all are alike. is_known: whether all gradients that
    depend on it were seen.
    """

    average: float
    is_fixed: bool
    elements: int = 0
    samples: int = 0
    squares: list[float] = field(default_factory=list)
    error2: float = 0.0
    dtype_bytes: int = 4
    demands: list[GradientConstraint] = field(default_factory=list)
    channel_weights: list[float] | None = None
    is_known: bool = True


@dataclass
class ActivationNorms:
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

    variables: dict[tuple[str, int], TensorNorms]
    activations: dict[str, ActivationNorms]
    monitored: dict[tuple[str, int], list[tuple[str, float, float]]]


@dataclass
class _Tensor:
    """One that was kept. errors: (rows,) squared errors, summed over each entry of dimension 0; 0-D: error, the root of
    their sum, squares, what its rounding goes by, deviation, of the noise that is tried.
    """

    name: tuple[str, int]
    elements: int
    has_samples: bool
    errors: torch.Tensor
    error: torch.Tensor
    squares: torch.Tensor
    deviation: torch.Tensor


@dataclass(eq=False)
class _Rounding:
    """What the graph holds of a tensor, and nothing else does. exact: its values, where it is monitored."""

    tensor: _Tensor
    exact: torch.Tensor | None = None


@dataclass
class _Found:
    """Of one gradient of a layer, on its way to the host. place: among the inputs of the autograd Function. tensor: that
    is restored for it. size: its norm; numbers, finish: as of `demands.Part`. exact: its norm from exact values,
    where that is known.
    """

    place: int
    label: str
    kind: str
    tensor: _Tensor
    size: torch.Tensor
    numbers: tuple[torch.Tensor, ...]
    finish: Callable[[list[list[float]], float], Cost]
    exact: torch.Tensor | None = None


class ErrorBoundProbe(VarianceProbe):
    """Of one forward and the backward pass through it. seed: of noise. monitored: variables whose exact values are kept
    until the backward pass has ended or failed, or the graph is gone.

    Nothing that it meets makes it raise: of layers whose gradients are not plain nothing is known.
    """

    def __init__(self, seed: int, monitored: frozenset[tuple[str, int]] = frozenset()):
        super().__init__(seed)
        self.monitored = monitored
        self._tensors: list[_Tensor] = []
        self._exact = weakref.WeakSet()  # what the graph holds of those that are monitored
        self._bytes: dict[tuple[str, int], int] = {}
        self._found: dict[int, list[_Found]] = {}  # by node
        self._calls: dict[int, tuple] = {}  # activations, by node: name, function, parameters
        self._passes: dict[int, tuple] = {}  # norms of their gradients: of the input, of the result

    # -- in the forward ----------------------------------------------------------------------------------

    def rounding(self, variable: TensorSlot, rounded: QuantizationRecord) -> _Rounding | None:
        if not self._is_open:
            return None
        exact = rounded.exact() if variable.name in self.monitored else None
        difference = rounded.errors(exact)
        errors = _row_squares(difference)
        squares = rounded.squares().double()
        error2, elements = errors.sum(), difference.numel()
        deviation = (torch.maximum(error2, _LEAST_ERROR * squares) / elements).sqrt()
        has_samples = rounded.spec.samples is not None
        numbers = errors, error2.sqrt(), squares, deviation
        tensor = _Tensor(variable.name, elements, has_samples, *numbers)
        self._tensors.append(tensor)
        self._bytes[variable.name] = difference.element_size()
        rounding = _Rounding(tensor, exact)
        if exact is not None:
            self._exact.add(rounding)
        return rounding

    def _attach(self, node, number) -> None:
        super()._attach(node, number)
        called = getattr(node, "observed_as", None)
        if called is not None:
            self._calls[number] = called

    # -- in the backward pass ----------------------------------------------------------------------------

    def _passed(self, number, leaving, arriving) -> None:
        self._begins()
        if number in self._calls and self._is_open and _are_dense((*leaving, *arriving)):
            sizes = norm(leaving[:1]), norm(arriving[:1])
            if None not in sizes:
                self._passes[number] = sizes

    def probe(self, number: int, backward, context, grads, results, variables) -> None:
        """Finds out what the layer's gradients demand of those variables that it restores."""
        self._begins()
        results = results if isinstance(results, tuple) else (results,)
        if not self._is_open or not _are_dense((*grads, *results)):
            self.reached(variables)
            return
        variables = [each for each in variables if each.rounding is not None]
        parts = None
        if len(variables) == 1:
            errors = variables[0].rounding.tensor.errors
            parts = demands.of_layer(context, grads, results, errors)
        labels = demands.labels(context._forward_cls)
        exact = None
        if any(each.rounding.exact is not None for each in variables):
            with _Exactly().running():
                exact = backward(context, *grads)
            exact = exact if isinstance(exact, tuple) else (exact,)
        found = []
        for variable in variables:
            tensor = variable.rounding.tensor
            kind = EXPECTED
            of = parts
            if parts is None:
                kind = MEASURED
                with Restoring(variable, 0, self).running():
                    noisy = backward(context, *grads)
                of = _measured(results, noisy if isinstance(noisy, tuple) else (noisy,), tensor)
            for part in of:
                label = labels[part.place]
                if variable.user is not None:
                    label = f"{variable.user}: {label}"
                size = norm([part.of(results)])
                one = _Found(part.place, label, kind, tensor, size, part.numbers, part.finish)
                if exact is not None and variable.rounding.exact is not None:
                    one.exact = norm([part.of(exact)])
                found.append(one)
        self._found[number] = found

    def noise(self, rows: torch.Tensor, variable: TensorSlot, level: int) -> torch.Tensor:
        """Of the variance that `_Tensor` says, all elements alike; float32."""
        deviation = variable.rounding.tensor.deviation
        return self._uniform(rows).sub_(0.5).mul_(math.sqrt(12.0) * deviation)

    def _let_go(self) -> None:
        for each in list(self._exact):
            each.exact = None

    # -- afterwards --------------------------------------------------------------------------------------

    def end(self) -> None:
        super().end()
        self._let_go()

    def results(self) -> BoundsSeen | None:
        """None where no backward pass came by, or a gradient was not finite: such a step says nothing."""
        return super().results()

    def snapshot(self) -> BoundsSeen | None:
        """`results` of what was measured so far; waits for the devices, and goes on."""
        return super().snapshot()

    def _measured(self):
        for each in self._tensors:
            yield from (each.error, each.squares, each.deviation)
        for found in self._found.values():
            for each in found:
                yield from (each.size, *each.numbers)
                if each.exact is not None:
                    yield each.exact
        for sizes in self._passes.values():
            yield from sizes

    def _summed_up(self, host) -> BoundsSeen | None:
        # (What came after it was sent, from a backward pass in another thread, is not there.)
        if self.is_void or any(id(each) not in host for each in self._measured()):
            return None
        if not all(math.isfinite(number) for each in host.values() for number in each):
            return None
        if not (self._found or self._passes):
            return None
        found = {}
        for of in self._found.values():
            for part in _of_node(host, of):
                found.setdefault(part.found.tensor.name, []).append(part)
        tensors = {}
        for each in self._tensors:
            tensors.setdefault(each.name, []).append(each)
        variables = {
            name: self._variable(host, name, of, found.get(name, []))
            for name, of in tensors.items()
        }
        monitored = {}
        for name, of in found.items():
            pairs = [each.found for each in of if each.found.exact is not None]
            if pairs:
                monitored[name] = [
                    (each.label, _square(host, each.size), _square(host, each.exact))
                    for each in pairs
                ]
        return BoundsSeen(variables, self._seen_activations(host), monitored)

    def _variable(self, host, name, tensors, found) -> TensorNorms:
        seen = self.variables[name]
        elements = sum(each.elements for each in tensors)
        errors = sum(_square(host, each.error) for each in tensors)
        squares = sum(host[id(each.squares)][0] for each in tensors)
        spread = [squares] + [0.0] * (SPREAD - 1)
        has_samples = all(each.has_samples for each in tensors)
        if has_samples:
            spread = host[id(seen.spread)]
        tried = sum(_square(host, each.deviation) * each.elements for each in tensors) / elements
        costs = _costs(host, found, tried)
        return TensorNorms(
            seen.average,
            seen.is_fixed,
            elements,
            seen.samples if has_samples else 0,
            spread,
            errors / elements,
            self._bytes[name],
            [demand for demand, _ in costs],
            _channel_weights(costs),
            seen.is_known and (bool(costs) or name not in self._reached_within),
        )

    def _seen_activations(self, host) -> dict[str, ActivationNorms]:
        found = {}
        for number, (of_input, of_result) in self._passes.items():
            name, function, parameters = self._calls[number]
            seen = found.setdefault(name, ActivationNorms(function, tuple(parameters), 0.0, 0.0))
            seen.v2 += _square(host, of_input)
            seen.grad2 += _square(host, of_result)
        return found


class _Exactly(Restoring):
    """Within it tensors that are monitored are restored without errors."""

    def is_target(self, variable) -> bool:
        return variable.rounding is not None and variable.rounding.exact is not None

    def changed(self, values, spec, packed):
        return values.copy_(spec.variable.rounding.exact)


def _measured(results, noisy, tensor: _Tensor) -> list[Part]:
    """Of gradients, and what noise in the tensor makes of them; those that it does not change have a cost of 0."""
    parts = []
    for place, (clean, other) in enumerate(zip(results, noisy, strict=True)):
        if clean is not None and other is not None:
            numbers = norm([other - clean]).double()[None], tensor.deviation[None]
            parts.append(Part(place, numbers, _measured_cost))
    return parts


def _measured_cost(entries, _):
    (change,), (deviation,) = entries
    return Cost(change / deviation if deviation > 0 else 0.0)


class _Part(NamedTuple):
    """Of one gradient of one call. v2: its squared norm without errors; sharing: how many variables it depends on."""

    found: _Found
    cost: Cost
    v2: float
    sharing: int


def _of_node(host, found: list[_Found]) -> list[_Part]:
    """Those that cost something."""
    by_place = {}
    for each in found:
        error2 = _square(host, each.tensor.error) / each.tensor.elements
        cost = each.finish([host[id(one)] for one in each.numbers], error2)
        if cost.first or cost.second:
            present = (cost.first * math.sqrt(error2) + cost.second * error2) ** 2
            by_place.setdefault(each.place, []).append((each, cost, present))
    parts = []
    for of in by_place.values():
        present = sum(each for *_, each in of)
        parts += [
            _Part(each, cost, _square(host, each.size) - present, len(of)) for each, cost, _ in of
        ]
    return parts


def _costs(
    host, parts: list[_Part], tried: float
) -> list[tuple[GradientConstraint, list[float] | None]]:
    """A demand of one variable for each label, and the channels of its cost.

    tried: the mean of the variances of noise that is tried, over all elements of the variable: what one tensor
    adds in a call is D where all errors are in proportion to those.
    """
    by_label = {}
    for each in parts:
        by_label.setdefault((each.found.label, each.found.kind), []).append(each)
    costs = []
    for (label, kind), of in by_label.items():
        first2 = second2 = 0.0
        channels = []
        for each in of:
            ratio = _square(host, each.found.tensor.deviation) / tried if tried > 0 else 1.0
            first2 += each.sharing * ratio * each.cost.first**2
            second2 += each.sharing * (ratio * each.cost.second) ** 2
            channels.append([ratio * one for one in each.cost.channels or ()])
        v2 = max(sum(each.v2 for each in of), 0.0)
        demand = GradientConstraint(label, kind, v2, math.sqrt(first2), math.sqrt(second2))
        is_one_size = len({len(each) for each in channels}) == 1 and channels[0]
        of_channels = [sum(each) for each in zip(*channels, strict=True)] if is_one_size else None
        costs.append((demand, of_channels))
    return costs


def _channel_weights(costs) -> list[float] | None:
    """Of mean 1: by each demand's first^2 / V^2 of a channel the largest."""
    costs = [(demand, of) for demand, of in costs if demand.v2 > 0 and demand.first > 0]
    lengths = {len(of) for _, of in costs if of is not None and sum(of) > 0}
    if len(lengths) != 1:
        return None
    (count,) = lengths
    weights = [0.0] * count
    for demand, of in costs:
        each = [1.0 / count] * count if of is None else [one / sum(of) for one in of]
        relative = demand.first**2 / demand.v2
        weights = [max(a, relative * b) for a, b in zip(weights, each, strict=True)]
    mean = sum(weights) / count
    if max(weights) - min(weights) <= 1e-9 * mean:
        return None
    return [each / mean for each in weights]


def _row_squares(x) -> torch.Tensor:
    """(len(x),) float64, or (1,) of a number: sums of squares."""
    x = x if x.dim() > 1 else x.reshape(-1, 1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), dtype=dtype).double().square()


def _are_dense(tensors) -> bool:
    return all(each is None or is_dense(each) for each in tensors)


def _square(host, number) -> float:
    (value,) = host[id(number)]
    return value * value
