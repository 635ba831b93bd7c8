"""What rounding each variable adds to the variance of a model's gradient, found out in one backward pass.

Theorem 3 of ActNN (long version, section 3) is a sum over the tensors that are kept: what rounding one of them adds
to the gradients of the parameters of its own layer and, where the gradient of the layer's input depends on it, of
all layers below. Three things are measured while the backward pass of one forward runs, for one draw each:

- Each layer runs its own backward again with noise added to one of the tensors it restores, of the variance that
  rounding it has. The difference is what that noise does to the layer's gradients, own[p] of a parameter p and
  out[e] of an edge e of the graph, as sums of squares.
- It runs it again with random signs on the gradient that came in. What comes out says how noise in that gradient is
  carried on: gain[e], and what it does to the layer's parameters: both relative to the sum of squares of what came in.
  Where that gradient comes straight from a layer above, noise of the layer above is carried on as it is: that of batch
  norm is a multiple of the convolution's result in each channel, far from random signs.
- Of every other node of the graph the gain is that of the gradient itself.

Noise from different sources is uncorrelated, so that sums of squares add up along the graph. With

    S(node) = sum over its parameters of gain[p]  +  sum over its edges of gain[e] S(node below e)

rounding the tensor adds  sum of own[p] + sum of out[e] S(node below e)  in all (docs/controller.md).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial

import torch

from fewbit.runtime import backends, groups, layout
from fewbit.runtime.arrival import Arrival

SPREAD = 8
"""Points of the distribution of squares of ranges over a variable's samples that are remembered."""
_LEAF = -1
_OBSERVED = "_fewbit_observed"
_running = threading.local()


@dataclass
class Seen:
    """Of one variable in one forward and its backward.

    average: bits it had, fixed or not. elements: of all its tensors. samples: that share its bits, 0 where they do not. sensitivity: the variance that
    rounding adds, times (2^bits - 1)^2; 0 where no gradient came by. spread: SPREAD values in rising order, of
    the sum of length * range^2 of a sample.
    """

    average: float
    is_fixed: bool
    elements: int = 0
    samples: int = 0
    sensitivity: float = 0.0
    spread: torch.Tensor | list[float] | None = None


@dataclass
class _Node:
    """Of the graph. below: the number of the node at each edge, or _LEAF.

    arriving, leaving: norms of a gradient and, by edge, of what it becomes. handed: (name of a variable,
    (2^bits - 1)^2, the noise itself) from the layer above. noise: (name, (2^bits - 1)^2, norms by edge, whether it is the
    layer's own, which the layer below is handed).
    """

    below: list[int]
    is_layer: bool
    arriving: torch.Tensor | None = None
    leaving: list[torch.Tensor | None] = field(default_factory=list)
    handed: list[tuple] = field(default_factory=list)
    noise: list[tuple] = field(default_factory=list)
    is_probed: bool = False


class Observation:
    """Of one forward and the backward pass through it. seed: of the noise."""

    def __init__(self, seed: int):
        self.variables: dict[tuple, Seen] = {}
        self._seed = seed
        self._generators = {}
        self._nodes: list[_Node] = []
        self._arrival = None

    # -- in the forward ----------------------------------------------------------------------------------

    def kept(self, variable, elements: int, sensitivities=None) -> None:
        """A tensor of that variable was kept; sensitivities: (samples,) float32, by which samples share bits."""
        seen = self.variables.setdefault(variable.name, Seen(variable.average, variable.is_fixed))
        seen.elements += elements
        if sensitivities is not None:
            seen.samples = len(sensitivities)
            points = ((torch.arange(SPREAD) + 0.5) * (seen.samples / SPREAD)).long()
            # (NaN, of a sample that is not finite, would be last and nothing can be said of it.)
            ordered = sensitivities.nan_to_num(0.0, 0.0, 0.0).sort().values
            seen.spread = ordered[points.to(ordered.device, non_blocking=True)]

    def watch(self, outputs) -> None:
        """Follows the backward pass from those results of the forward: tensors, in any nest of containers."""
        numbers, entered = {}, set()
        waiting = [(tensor.grad_fn, False) for tensor in _tensors(outputs) if tensor.grad_fn]
        while waiting:
            node, is_below_done = waiting.pop()
            following = [child for child, _ in node.next_functions]
            if is_below_done:
                numbers[node] = len(self._nodes)
                is_layer = self._attach(node, [child is not None for child in following])
                below = [
                    numbers.get(child, _LEAF)  # a leaf has no number
                    for child in following
                    if child is not None
                ]
                self._nodes.append(_Node(below, is_layer))
            elif node not in entered:
                entered.add(node)
                waiting.append((node, True))
                waiting += [(child, False) for child in following if _is_inner(child)]

    def _attach(self, node, exists) -> bool:
        is_layer = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_layer:
            setattr(node, _OBSERVED, (self, len(self._nodes)))
        node.register_hook(partial(self._passed, len(self._nodes), exists))
        return is_layer

    # -- in the backward pass ----------------------------------------------------------------------------

    def _passed(self, number, exists, leaving, arriving) -> None:
        node = self._nodes[number]
        node.handed = []
        if not node.is_probed:
            node.arriving = _norm(arriving)
            edges = zip(leaving, exists, strict=False)
            node.leaving = [_norm([each]) for each, does_exist in edges if does_exist]

    def probe(self, number: int, backward, context, grads):
        """The results of a layer's backward, run again with noise in what it restores and in `grads`."""
        context, node = _Context(context), self._nodes[number]
        with _Restoring() as restoring:
            results = backward(context, *grads)
        restoring.note(grads)
        if not restoring.variables:
            return results
        exact = _by_edge(context, results)
        node.noise = []
        for variable in restoring.variables.values():
            with _Restoring(variable, self):
                noisy = _by_edge(context, backward(context, *grads))
            self._add(
                node, variable, [_difference(*pair) for pair in zip(exact, noisy, strict=True)]
            )
        if len(grads) == 1:
            for name, scale, change in node.handed:
                changes = _by_edge(context, backward(context, change))
                node.noise.append((name, scale, [_norm([each]) for each in changes], False))
            with _Restoring():
                carried = backward(context, self._with_signs(*grads))
            node.leaving = [_norm([each]) for each in _by_edge(context, carried)]
            node.arriving, node.is_probed = _norm(grads), True
        return results

    def _add(self, node, variable, changes) -> None:
        scale = variable.levels**2
        node.noise.append((variable.name, scale, [_norm([each]) for each in changes], True))
        for change, below in zip(changes, node.below, strict=True):
            if change is not None and below != _LEAF and self._nodes[below].is_layer:
                self._nodes[below].handed.append((variable.name, scale, change))

    def noise(self, rows: torch.Tensor, variable, group_size: int) -> torch.Tensor:
        """As rounding restored values (samples, features) has, on average over each sample; float32."""
        # Groups run across samples that are short.
        parts = rows if rows.shape[1] >= groups.LEAST_FEATURES else rows.view(1, -1)
        squares = backends.of(rows).squares(parts, group_size).nan_to_num(0.0)
        deviation = (squares / (6 * parts.shape[1])).sqrt() / variable.levels
        return self._uniform(rows).sub_(0.5).mul_(deviation[:, None] * math.sqrt(12))

    def _with_signs(self, grad):
        return torch.where(self._uniform(grad) < 0.5, -grad, grad)

    def _uniform(self, like) -> torch.Tensor:
        generator = self._generators.get(like.device)
        if generator is None:
            generator = torch.Generator(like.device).manual_seed(self._seed)
            self._generators[like.device] = generator
        return torch.rand(like.shape, generator=generator, device=like.device)

    # -- afterwards --------------------------------------------------------------------------------------

    def send(self) -> None:
        """Starts to bring the measurements to the host; nothing waits for a device."""
        spreads = [each.spread for each in self.variables.values() if each.spread is not None]
        self._arrival = Arrival([*self._measured(), *spreads])

    def _measured(self):
        for node in self._nodes:
            yield from (each for each in (node.arriving, *node.leaving) if each is not None)
            for _, _, change, _ in node.noise:
                yield from (each for each in change if each is not None)

    def has_run(self) -> bool:
        """Whether a backward pass has come by."""
        return any(node.arriving is not None for node in self._nodes)

    def is_there(self) -> bool:
        """Whether `results` would not wait."""
        return self._arrival.is_there()

    def results(self) -> dict[tuple, Seen]:
        """By variable, with sensitivities of 0 where no backward pass came by.

        Nothing where a gradient was not finite: such a step says nothing, and whoever scales losses skips it.
        """
        host = self._arrival.values()
        if not all(math.isfinite(value) for each in self._measured() for value in host[id(each)]):
            return {}
        for seen in self.variables.values():
            if seen.spread is not None:
                seen.spread = host[id(seen.spread)]
        below = []  # S of each node; nodes come after those below them
        for node in self._nodes:
            at = [1.0 if number == _LEAF else below[number] for number in node.below]
            arriving = _square(host, node.arriving)
            passed = sum(_square(host, a) * b for a, b in zip(node.leaving, at, strict=False))
            below.append(passed / arriving if arriving > 0 else 0.0)
            taken = [number != _LEAF and self._nodes[number].is_probed for number in node.below]
            for name, scale, change, is_first in node.noise:
                self.variables[name].sensitivity += scale * sum(
                    _square(host, a) * b
                    for a, b, is_taken in zip(change, at, taken, strict=True)
                    if not (is_first and is_taken)
                )
        return self.variables


def observed(backward, context, grads):
    """The results of a layer's backward; on the way what the layer's variables are to be known by is found out."""
    found = getattr(context, _OBSERVED, None)
    if found is not None:
        observation, number = found
        return observation.probe(number, backward, context, grads)
    with _Restoring() as restoring:
        results = backward(context, *grads)
    restoring.note(grads)
    return results


class _Restoring:
    """Within it the variables of restored tensors are noted, and those of one, the target, have noise."""

    def __init__(self, target=None, observation: Observation | None = None):
        self.target, self.observation = target, observation
        self.variables = {}
        self._noise = {}  # a tensor restored more than once has the same noise each time

    def __enter__(self):
        self._before, _running.restoring = getattr(_running, "restoring", None), self
        return self

    def __exit__(self, *_):
        _running.restoring = self._before

    def note(self, grads) -> None:
        """Says how large the gradients were, which the samples are remembered by."""
        for variable in self.variables.values():
            if variable.plan is not None and grads[0] is not None:
                variable.plan.note(variable, grads[0])

    def is_target(self, variable) -> bool:
        return self.target is not None and variable.name == self.target.name

    def restored(self, values, recipe, packed):
        variable = recipe.variable
        self.variables.setdefault(variable.name, variable)
        if self.is_target(variable) and values.numel():
            flat = layout.storage_order(values)
            rows = flat.view(recipe.samples or (len(values) if values.dim() else 1), -1)
            noise = self._noise.get(packed.data_ptr())
            if noise is None:
                noise = self.observation.noise(rows, variable, recipe.group_size)
                self._noise[packed.data_ptr()] = noise
            rows += noise.to(rows.dtype)
        return values


def restored(values, recipe, packed):
    """The values of a variable that a layer's backward restores; with noise, if that is what is being tried."""
    if recipe.variable is None:
        return values
    restoring = getattr(_running, "restoring", None)
    return values if restoring is None else restoring.restored(values, recipe, packed)


def has_noise(recipe) -> bool:
    """Whether `restored` adds noise."""
    restoring = getattr(_running, "restoring", None)
    return (
        restoring is not None
        and recipe.variable is not None
        and restoring.is_target(recipe.variable)
    )


class _Context:
    """An autograd context whose saved tensors may be asked for again, which a checkpoint allows once."""

    def __init__(self, context):
        self._context = context
        self.saved_tensors = context.saved_tensors

    def __getattr__(self, name):
        return getattr(self._context, name)


def _by_edge(context, results) -> list:
    """The gradients of a Function's backward for its edges: of the inputs that need one."""
    results = results if isinstance(results, tuple) else (results,)
    return [
        each for each, is_needed in zip(results, context.needs_input_grad, strict=True) if is_needed
    ]


def _difference(exact, noisy):
    if exact is None or noisy is None or exact.is_sparse:
        return None
    return noisy - exact


def _is_inner(node) -> bool:
    return node is not None and not hasattr(node, "variable")


def _norm(tensors) -> torch.Tensor | None:
    """0-D float32: the square root of the sum of squares of all entries of all that are tensors; None without any."""
    norms = [
        torch.linalg.vector_norm(
            each.detach(), dtype=torch.promote_types(each.dtype, torch.float32)
        ).float()
        for each in tensors
        if each is not None and not each.is_sparse
    ]
    if len(norms) < 2:
        return norms[0] if norms else None
    return torch.linalg.vector_norm(torch.stack(norms))


def _square(host, norm) -> float:
    if norm is None:
        return 0.0
    (value,) = host[id(norm)]
    return value * value


def _tensors(outputs) -> list[torch.Tensor]:
    """Those in a nest of tensors, mappings, sequences and dataclasses."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = outputs.values()
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        outputs = [getattr(outputs, each.name) for each in fields(outputs)]
    elif not isinstance(outputs, list | tuple | set):
        return []
    return [tensor for each in outputs for tensor in _tensors(each)]
