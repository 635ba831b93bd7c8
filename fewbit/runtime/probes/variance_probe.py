"""What rounding each slot adds to the variance of a model's gradient, found out in one backward pass.

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

rounding the tensor adds  sum of own[p] + sum of out[e] S(node below e)  in all (docs/controller.md). That is found
out for 1 bit, and for the bits that the slot has or 2: in between what 1 bit adds is least like the rest.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch

from fewbit.runtime.interop.async_host_copy import AsyncHostCopy
from fewbit.runtime.interop.containers import tensors_in
from fewbit.runtime.probes.norms import by_edge, is_dense, norm, squared
from fewbit.runtime.probes.restoring import OBSERVED, Restoring

SPREAD = 16
"""Parts that a slot's samples are remembered in, by what they share bits by."""
LEVELS = (1, 2)
"""Bits for which rounding is measured. The noise of more bits is as that of 2, but smaller."""
MOST_EARLIER = 1024
"""Nodes of a graph that was there before the forward; those further below count as if they had no parameters."""
_PARAMETER, _NOTHING = -1, -2  # below an edge in place of a node


@dataclass
class RoundingEffect:
    """Of one slot in one forward and its backward.

    average: bits it had, fixed or not. elements: of all its tensors. samples: that share its bits, 0 where they do
    not. sensitivity: the variance that rounding adds, times (2^bits - 1)^2; 0 where no gradient came by. at_one: the
    variance that rounding to 1 bit adds. spread: SPREAD values in rising order, what samples share bits by, each the
    mean of as many samples; of fewer samples than that the values themselves, and zeros. Of several tensors their sums.
    is_known: whether that is so; not of a layer that the backward pass reached on a way that was not watched, or that
    cannot be probed.
    """

    average: float
    is_fixed: bool
    elements: int = 0
    samples: int = 0
    sensitivity: float = 0.0
    at_one: float = 0.0
    spread: torch.Tensor | list[float] | None = None
    is_known: bool = True


@dataclass
class _Noise:
    """Norms by edge of what noise in a slot does. is_own: in the layer itself, which the one below takes over."""

    name: tuple[str, int]
    level: int
    scale: float
    norms: list[torch.Tensor | None]
    is_own: bool


@dataclass
class _Node:
    """Of the graph. below: by edge the number of a node, _PARAMETER or _NOTHING. exists: whether an edge leads on.

    arriving, leaving: norms of a gradient and, by edge, of what it becomes. handed: (slot's name, level, scale,
    noise) from the layer above.
    """

    below: list[int]
    exists: list[bool]
    is_layer: bool
    arriving: torch.Tensor | None = None
    leaving: list[torch.Tensor | None] = field(default_factory=list)
    handed: list[tuple] = field(default_factory=list)
    noise: list[_Noise] = field(default_factory=list)
    is_probed: bool = False


class VarianceProbe:
    """Of one forward and the backward pass through it. seed: of the noise.

    Nothing that it meets makes it raise: where gradients are not plain, dense or COO, it is void.
    """

    def __init__(self, seed: int):
        self.slots: dict[tuple, RoundingEffect] = {}
        self.is_void = False
        self._seed = seed
        self._generators = {}
        self._reached_within = set()  # names of slots, by a backward pass in the forward
        self._nodes: list[_Node] = []
        self._hooks = []  # of those nodes
        self._is_open = True
        self._is_watching = False
        self._start = torch.autograd._get_sequence_nr()  # of the first node that the forward makes
        self._runs = False
        self._is_over = False
        self._arrival = None

    # -- in the forward ----------------------------------------------------------------------------------

    def record_saved(
        self, slot, elements: int, sensitivities=None, fp32_min_bytes: int = 0
    ) -> None:
        if not self._is_open:
            return
        seen = self.slots.setdefault(slot.name, RoundingEffect(slot.average, slot.is_fixed))
        seen.elements += elements
        if sensitivities is not None:
            seen.samples = len(sensitivities)
            spread = _means(sensitivities.nan_to_num(0.0, 0.0, 0.0).sort().values)
            # The samples of each tensor share its bits in the order of their own.
            if seen.spread is not None:
                spread = seen.spread + spread.to(seen.spread.device)
            seen.spread = spread

    def record_rounding(self, slot, record) -> dict[int, torch.Tensor] | None:
        """{level: (samples,) variance of an element} of a tensor that is kept, if that is to be known.

        record: a `QuantizationRecord`.
        """
        if not self._is_open:
            return None
        return {level: record.variance(level, self._generator) for level in LEVELS}

    def knows(self, name: tuple[str, int]) -> bool:
        return name in self.slots

    def watch(self, outputs) -> None:
        """Follows the backward pass from those results of the forward: tensors, in any nest of containers."""
        self._is_watching = True
        tensors = tensors_in(outputs)
        if not self._can_measure(tensors):
            return
        roots = [each.grad_fn for each in tensors if each.grad_fn is not None]
        reached, numbers, entered = self._reached(roots), {}, set()
        waiting = [(node, False) for node in roots if node in reached]
        while waiting:
            node, is_below_done = waiting.pop()
            following = [child for child, _ in node.next_functions]
            if is_below_done:
                numbers[node] = len(self._nodes)
                below = [_below(child, numbers) for child in following if child is not None]
                exists = [child is not None for child in following]
                self._nodes.append(_Node(below, exists, _is_function(node)))
                self._attach(node, numbers[node])
            elif node not in entered:
                entered.add(node)
                waiting.append((node, True))
                waiting += [(child, False) for child in following if child in reached]

    def _reached(self, roots) -> set:
        """The nodes from those on, without leaves. Of what was there before the forward the nearest, but not all."""
        reached, waiting, earlier = set(), deque(roots), 0
        while waiting:
            node = waiting.popleft()
            if node in reached:
                continue
            if node._sequence_nr() < self._start:
                earlier += 1
                if earlier > MOST_EARLIER:
                    continue
            reached.add(node)
            waiting += [child for child, _ in node.next_functions if _is_inner(child)]
        return reached

    def _attach(self, node, number) -> None:
        if _is_function(node):
            # A graph below this forward may be followed by other probes too.
            others = (each for each in getattr(node, OBSERVED, ()) if each[0]._is_open)
            setattr(node, OBSERVED, (*others, (self, number)))
        self._hooks.append(node.register_hook(partial(self._passed, number)))

    # -- in the backward pass ----------------------------------------------------------------------------

    def _passed(self, number, leaving, arriving) -> None:
        node = self._nodes[number]
        node.handed = []
        self._begins()
        if self._is_open and not node.is_probed and self._can_measure((*leaving, *arriving)):
            node.arriving = norm(arriving)
            edges = zip(leaving, node.exists, strict=False)
            node.leaving = [norm([each]) for each, exists in edges if exists]

    def _begins(self) -> None:
        """A backward pass has come by."""
        if self._is_open and not self._runs:
            self._runs = True
            torch.autograd.Variable._execution_engine.queue_callback(_End(self))

    def reached(self, slots) -> None:
        """A backward pass restores those, in a layer that is not probed.

        One within the forward is no part of the step's: then what the step's says of them counts.
        """
        names = {each.name for each in slots} & self.slots.keys()
        if not self._is_open:
            return
        if self._is_watching:
            for name in names:
                self.slots[name].is_known = False
        else:
            self._reached_within |= names

    def probe(self, number: int, backward, context, grads, results, slots) -> None:
        """Runs a layer's backward again, with noise in those slots that it restores, and in `grads`."""
        node = self._nodes[number]
        results = by_edge(context, results)
        self.is_void |= any(each is not None and each.is_sparse for each in grads)
        if not (self._is_open and self._can_measure((*grads, *results))):
            return
        node.noise, handed, node.handed = [], node.handed, []
        for slot in slots:
            if slot.rounding is None or slot.name not in self.slots:
                continue
            for level in LEVELS:
                with Restoring(slot, level, self).running():
                    noisy = by_edge(context, backward(context, *grads))
                self._add(node, slot, level, results, noisy)
        if len(grads) == 1:
            while handed:
                name, level, scale, change = handed.pop()
                (like,) = grads
                passed = by_edge(context, backward(context, change.to(like.dtype)))
                del change
                norms = [norm([each]) for each in passed]
                del passed
                node.noise.append(_Noise(name, level, scale, norms, False))
            with Restoring().running():
                carried = backward(context, self._with_signs(*grads))
            node.leaving = [norm([each]) for each in by_edge(context, carried)]
            node.arriving, node.is_probed = norm(grads), True

    def _can_measure(self, tensors) -> bool:
        self.is_void |= not all(
            each is None or each.is_sparse or is_dense(each) for each in tensors
        )
        return not self.is_void

    def _add(self, node, slot, level, exact, noisy) -> None:
        scale, norms = _levels(slot, level) ** 2, []
        for at, below in enumerate(node.below):
            change = _difference(exact[at], noisy[at])
            noisy[at] = None
            norms.append(norm([change]))
            if change is not None and below >= 0 and self._nodes[below].is_layer:
                # (Two of these wait at a time: half the room, and noise needs no more.)
                noise = change.bfloat16() if change.dtype == torch.float32 else change
                self._nodes[below].handed.append((slot.name, level, scale, noise))
            del change
        node.noise.append(_Noise(slot.name, level, scale, norms, True))

    def _ends(self) -> None:
        """At the end of a backward pass."""
        self._runs, self._is_over = False, True
        self._let_go()

    def _fails(self) -> None:
        """Where a backward pass has raised: perhaps there is another one."""
        self._runs = False
        self._let_go()

    def _let_go(self) -> None:
        """Of noise that was handed to layers whose backward did not run."""
        for node in self._nodes:
            node.handed = []

    def noise(self, rows: torch.Tensor, slot, level: int) -> torch.Tensor:
        """As rounding restored values (samples, features) has, on average over each sample; float32."""
        variance = slot.rounding[level].nan_to_num(0.0)
        if len(variance) != len(rows):
            variance = variance.mean().expand(len(rows))
        deviation = variance.sqrt() * ((2**level - 1) / _levels(slot, level))
        return self._uniform(rows).sub_(0.5).mul_(deviation[:, None] * math.sqrt(12))

    def _with_signs(self, grad):
        return torch.where(self._uniform(grad) < 0.5, -grad, grad)

    def _uniform(self, like) -> torch.Tensor:
        return torch.rand(like.shape, generator=self._generator(like.device), device=like.device)

    def _generator(self, device) -> torch.Generator:
        generator = self._generators.get(device)
        if generator is None:
            generator = torch.Generator(device).manual_seed(self._seed)
            self._generators[device] = generator
        return generator

    # -- afterwards --------------------------------------------------------------------------------------

    def has_run(self) -> bool:
        """Whether a backward pass has come by, to its end."""
        return self.is_void or self._is_over

    def runs(self) -> bool:
        """Whether a backward pass is under way, perhaps in another thread."""
        return self._runs

    def end(self) -> None:
        """No more is measured."""
        self._is_open = False
        while self._hooks:
            self._hooks.pop().remove()

    def send(self) -> None:
        """Ends it, and starts to bring the measurements to the host; nothing waits for a device."""
        self.end()
        self._let_go()
        self._arrival = self._sent()

    def _sent(self) -> AsyncHostCopy:
        spreads = [each.spread for each in self.slots.values() if each.spread is not None]
        return AsyncHostCopy([*self._measured(), *spreads])

    def _measured(self):
        for node in self._nodes:
            yield from (each for each in (node.arriving, *node.leaving) if each is not None)
            for noise in node.noise:
                yield from (each for each in noise.norms if each is not None)

    def is_there(self) -> bool:
        """Whether `results` would not wait."""
        return self._arrival.is_there()

    def results(self) -> dict[tuple, RoundingEffect]:
        """By slot, with sensitivities of 0 where no backward pass came by.

        Nothing if void, or where a gradient was not finite: such a step says nothing, and whoever scales losses
        skips it.
        """
        return self._summed_up(self._arrival.values())

    def snapshot(self) -> dict[tuple, RoundingEffect]:
        """`results` of what was measured so far; waits for the devices, and goes on."""
        return self._summed_up(self._sent().values())

    def _summed_up(self, host) -> dict[tuple, RoundingEffect]:
        # (What came after it was sent, from a backward pass in another thread, is not there.)
        if self.is_void or any(id(each) not in host for each in self._measured()):
            return {}
        sums = {(name, level): 0.0 for name in self.slots for level in LEVELS}
        below = []  # S of each node; nodes come after those below them
        for node in self._nodes:
            at = [float(n == _PARAMETER) if n < 0 else below[n] for n in node.below]
            arriving = squared(host, node.arriving)
            passed = sum(squared(host, a) * b for a, b in zip(node.leaving, at, strict=False))
            below.append(passed / arriving if arriving > 0 else 0.0)
            taken = [n >= 0 and self._nodes[n].is_probed for n in node.below]
            for noise in node.noise:
                sums[noise.name, noise.level] += noise.scale * sum(
                    squared(host, a) * b
                    for a, b, is_taken in zip(noise.norms, at, taken, strict=True)
                    if not (noise.is_own and is_taken)
                )
        if not all(map(math.isfinite, (*below, *sums.values()))):
            return {}
        found = {}
        for name, seen in self.slots.items():
            spread = None if seen.spread is None else host[id(seen.spread)]
            at_one, sensitivity = (sums[name, level] for level in LEVELS)
            is_known = seen.is_known and (sensitivity > 0 or name not in self._reached_within)
            measured = {"at_one": at_one, "sensitivity": sensitivity, "is_known": is_known}
            found[name] = replace(seen, spread=spread, **measured)
        return found


class _End:
    """What autograd calls at the end of a backward pass; one that raises drops it uncalled."""

    def __init__(self, probe: VarianceProbe):
        self._probe = probe

    def __call__(self):
        probe, self._probe = self._probe, None
        probe._ends()

    def __del__(self):
        if self._probe is not None:
            self._probe._fails()


def _means(values: torch.Tensor) -> torch.Tensor:
    """(SPREAD,) float64: of parts of equal length, as far as whole values allow."""
    ends, lengths = _ends(len(values), values.device)
    sums = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    parts = sums[ends].diff() / lengths
    return torch.nn.functional.pad(parts, (0, SPREAD - len(lengths)))


@lru_cache(maxsize=256)
def _ends(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where parts of `count` values end, after a 0 at which the first begins, and how long they are."""
    parts = min(count, SPREAD)
    ends = torch.tensor([round(i * count / parts) for i in range(parts + 1)], device="cpu")
    return ends.to(device), ends.diff().double().to(device)


def _levels(slot, level: int) -> float:
    """2^bits - 1 of the noise that is tried: of 1 bit, or of the slot's own and 2 at least."""
    return 1.0 if level == 1 else max(slot.levels, 3.0)


def _difference(exact, noisy):
    if exact is None or noisy is None or exact.is_sparse:
        return None
    return noisy - exact


def _is_function(node) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _is_inner(node) -> bool:
    return node is not None and not _is_leaf(node)


def _is_leaf(node) -> bool:
    return not _is_function(node) and hasattr(node, "variable")


def _below(node, numbers) -> int:
    if _is_leaf(node):
        return _PARAMETER if isinstance(node.variable, torch.nn.Parameter) else _NOTHING
    return numbers.get(node, _NOTHING)
