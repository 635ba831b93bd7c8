"""Measure the variance that rounding each slot adds to a model's gradient, in one backward pass.

The variances of all slots add up (ActNN, long version, Theorem 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain

import torch

from fewbit.runtime.format.distortion import relative_distortion
from fewbit.runtime.interop.containers import tensors_in
from fewbit.runtime.interop.cuda_streams import AsyncHostCopy, hold_for_stream
from fewbit.runtime.probes.backward_graph import bottom_up, is_function, number_below
from fewbit.runtime.probes.norms import by_edge, is_dense, norm
from fewbit.runtime.probes.restoring import OBSERVED, with_noise
from fewbit.runtime.probes.variances import LEVELS, Node, NoiseOfSlot, variances

RESHAPES = frozenset(
    f"{name}Backward{number}"
    for name in "View UnsafeView Alias T Transpose Permute Unsqueeze Squeeze Slice Expand Clone ToCopy".split()
    for number in (0, 1, 2)
)
"""Names of autograd nodes that only change a gradient's shape or dtype."""
SPREAD = 16
"""The number of entries of `RoundingEffect.spread`."""


@dataclass
class RoundingEffect:
    """The effect that rounding one slot has on the gradient, measured in one forward and backward pass.

    Args:
        bits: the average bits per element that the slot had.
        is_fixed: whether the user gave the bits.
        quantizer: the kind of the slot's copies, one of `fewbit.config.KINDS`.
        elements: the number of elements of all tensors that were saved for the slot.
        samples: the number of samples among which the bits were divided, or 0.
        sensitivity: the variance that rounding adds to the gradient, divided by `relative_distortion(quantizer, bits)`; 0 if
            no gradient reached the layer.
        at_one: the variance that rounding to 1 bit adds to the gradient, as measured.
        weight: the relative variance (`variances.py`) divided by the variance.
        spread: the means of SPREAD equal parts of the samples' sorted sensitivities, then zeros, summed over the slot's
            tensors. None if bits were not divided among samples.
        is_known: whether all gradients that depend on the slot were measured.
    """

    bits: float
    is_fixed: bool
    quantizer: str
    elements: int = 0
    samples: int = 0
    sensitivity: float = 0.0
    at_one: float = 0.0
    weight: float = 1.0
    spread: tuple[float, ...] | None = None
    is_known: bool = True


class VarianceProbe:
    """The probe of one forward pass and of the backward pass through it, with the methods of `assignment.Probe`.

    Three kinds of numbers are measured. A layer runs its backward again with noise, of the variance of rounding, in one
    of its dequantized tensors: own[p] and out[e] are the sums of squares of the changes of the gradient of a parameter
    p, and of that which leaves through an edge e. It runs once more with random signs on the incoming gradient: gain[p]
    and gain[e] are the sums of squares of the gradients that leave, divided by that of the incoming gradient; at other
    nodes they are those of the gradient itself. If an edge leads to another layer, directly or through RESHAPES, that
    layer instead runs with the very change as incoming gradient, which can be far from random signs.

    A gradient that is neither an ordinary dense tensor nor a sparse COO tensor makes the probe void, without results.
    """

    def __init__(self, seed: int):
        self.slots: dict[tuple, RoundingEffect] = {}
        self.is_void = False
        self._seed = seed
        self._generators = {}
        self._spreads = {}  # {slot's name: the `_means` of each tensor that was saved for the slot}
        self._reached_within = (
            set()
        )  # names of slots that a backward pass reached before the forward pass was over
        self._nodes: list[Node] = []
        self._hooks = []  # on the nodes
        self._is_open = True
        self._is_watching = False
        self._start = (
            torch.autograd._get_sequence_nr()
        )  # number of the first node that the forward makes
        self._runs = False
        self._is_over = False
        self._host_copy = None

    # -- in the forward ----------------------------------------------------------------------------------

    def record_saved(self, slot, elements: int, sensitivities=None) -> None:
        if not self._is_open:
            return
        effect = RoundingEffect(slot.average, slot.is_fixed, slot.kind)
        seen = self.slots.setdefault(slot.name, effect)
        seen.elements += elements
        if sensitivities is not None:
            seen.samples = len(sensitivities)
            # Bits are divided among the samples of one tensor at a time, so each tensor's numbers are sorted alone. The
            # host adds them later, because the tensors may be on several devices or in several streams.
            spread = _means(sensitivities.nan_to_num(0.0, 0.0, 0.0).sort().values)
            self._spreads.setdefault(slot.name, []).append(spread)

    def record_rounding(self, slot, record) -> dict[int, torch.Tensor] | None:
        """Return {1 or 2 bits: variance of an element, mean for each sample, (samples,) float32}; None after `end` was called."""
        if not self._is_open:
            return None
        found = {}
        for level in LEVELS:
            # The variance of uniform copies of few large and many small values falls less with the bits than the formula says.
            bits = 1 if level == 1 else max(slot.uniform(), 2)
            share = relative_distortion(slot.kind, level) / relative_distortion(slot.kind, bits)
            found[level] = record.variance(bits, self._generator) * share
        return found

    def knows(self, name: tuple[str, int]) -> bool:
        return name in self.slots

    def watch(self, outputs) -> None:
        self._is_watching = True
        tensors = tensors_in(outputs)
        if not self._can_measure(tensors):
            return
        roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        numbers = {}
        for node in bottom_up(roots, self._start):
            numbers[node] = len(self._nodes)
            following = [child for child, _ in node.next_functions]
            below = [number_below(child, numbers) for child in following if child is not None]
            exists = [child is not None for child in following]
            self._nodes.append(Node(below, exists, is_function(node)))
            self._attach(node, numbers[node])

    def _attach(self, node, number) -> None:
        if is_function(node):
            # Other probes may follow this node too, if it is older than this forward pass.
            others = (entry for entry in getattr(node, OBSERVED, ()) if entry[0]._is_open)
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
            node.leaving = [norm([grad]) for grad, exists in edges if exists]
            node.parts = node.leaving

    def _begins(self) -> None:
        if torch.compiler.is_compiling():  # compiled autograd takes no callback
            self.is_void, self._is_open = True, False
        elif self._is_open and not self._runs:
            self._runs = True
            torch.autograd.Variable._execution_engine.queue_callback(_End(self))

    def reached(self, slots) -> None:
        """Record that a backward pass reached a layer that is not measured and has saved tensors of these slots.

        Their effects become unknown; after `torch.autograd.grad` within the forward pass, only if the step's own
        backward pass does not measure them.
        """
        names = {slot.name for slot in slots} & self.slots.keys()
        if not self._is_open:
            return
        if self._is_watching:
            for name in names:
                self.slots[name].is_known = False
        else:
            self._reached_within |= names

    def probe(self, number: int, backward, context, grads, results, slots) -> None:
        self._begins()
        node = self._nodes[number]
        results = by_edge(context, results)
        self.is_void |= any(grad is not None and grad.is_sparse for grad in grads)
        if not (self._is_open and self._can_measure((*grads, *results))):
            return
        node.noise, handed, node.handed = [], node.handed, []
        for slot in slots:
            if slot.rounding is None or slot.name not in self.slots:
                continue
            for level in LEVELS:
                noisy = by_edge(context, backward(with_noise(context, slot, level, self), *grads))
                self._add(node, slot, level, results, noisy, context)
        if len(grads) == 1:
            while handed:
                name, level, scale, change = handed.pop()
                hold_for_stream((change,))  # the layer above may run in another stream
                (like,) = grads
                passed = by_edge(context, backward(context, change.to(like.dtype)))
                del change
                norms = [norm([grad]) for grad in passed]
                del passed
                node.noise.append(NoiseOfSlot(name, level, scale, norms, False))
            signed = torch.where(self._uniform(grads[0]) < 0.5, -grads[0], grads[0])
            carried = backward(context, signed)
            node.leaving = [norm([grad]) for grad in by_edge(context, carried)]
            node.parts = [norm([grad]) for grad in results]
            node.arriving, node.is_probed = norm(grads), True

    def _can_measure(self, tensors) -> bool:
        self.is_void |= not all(
            tensor is None or tensor.is_sparse or is_dense(tensor) for tensor in tensors
        )
        return not self.is_void

    def _add(self, node, slot, level, exact, noisy, context) -> None:
        scale, norms = 1.0 / _share_at(slot, level), []
        edges = [child for child, _ in context.next_functions if child is not None]
        for at, below in enumerate(node.below):
            change = _difference(exact[at], noisy[at])
            noisy[at] = None
            norms.append(norm([change]))
            if change is not None:
                below, change = self._passed_on(edges[at], below, change)
            if change is not None and below >= 0 and self._nodes[below].is_layer:
                node.reaches[at] = below
                # The changes at both levels are held at a time. bfloat16 saves memory and is precise enough for noise.
                noise = change.bfloat16() if change.dtype == torch.float32 else change
                self._nodes[below].handed.append((slot.name, level, scale, noise))
            del change
        node.noise.append(NoiseOfSlot(slot.name, level, scale, norms, True))

    def _passed_on(self, edge, below: int, change):
        """Carry a change through RESHAPES. Return the node that it reaches, and the change there."""
        while below >= 0 and edge.name() in RESHAPES and len(self._nodes[below].below) == 1:
            change = edge(change)
            (edge,) = (child for child, _ in edge.next_functions if child is not None)
            (below,) = self._nodes[below].below
        return below, change

    def _ends(self) -> None:
        self._runs, self._is_over = False, True
        self._let_go()

    def _fails(self) -> None:
        self._runs = False
        self._let_go()

    def _let_go(self) -> None:
        """Free the changes that were handed to layers whose backward did not run."""
        for node in self._nodes:
            node.handed = []

    def noise(self, rows: torch.Tensor, slot, level: int, errors) -> torch.Tensor:
        """Return the errors of rounding again, multiplied in each sample to have the variance of rounding."""
        variance = slot.rounding[level].nan_to_num(0.0)
        if len(variance) != len(rows):
            variance = variance.mean().expand(len(rows))
        smaller = _share_at(slot, level) / relative_distortion(slot.kind, level)
        noise = (
            errors(level, self._generator(rows.device)).view(rows.shape).nan_to_num_(0.0, 0.0, 0.0)
        )
        found = noise.square().mean(1)
        factor = torch.where(found > 0, variance * smaller / found, 0.0).sqrt()
        return noise.mul_(factor[:, None])

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
        """Return whether a backward pass has ended, or the probe is void."""
        return self.is_void or self._is_over

    def runs(self) -> bool:
        """Return whether a backward pass is running, perhaps in another thread."""
        return self._runs

    def end(self) -> None:
        """Stop measuring, and remove the hooks from the autograd graph."""
        self._is_open = False
        while self._hooks:
            self._hooks.pop().remove()

    def send(self) -> None:
        """Stop measuring, and start to copy the measurements to the host."""
        self.end()
        self._let_go()
        self._host_copy = self._sent()

    def _sent(self) -> AsyncHostCopy:
        return AsyncHostCopy([*self._measured(), *chain(*self._spreads.values())])

    def _measured(self):
        return chain.from_iterable(node.norms() for node in self._nodes)

    def is_there(self) -> bool:
        return self._host_copy.is_there()

    def results(self) -> dict[tuple, RoundingEffect]:
        """Return {slot's name: RoundingEffect} when the measurements are on the host.

        The result is {} if the probe is void or if a gradient was not finite.
        """
        return self._summed_up(self._host_copy.values())

    def snapshot(self) -> dict[tuple, RoundingEffect]:
        """Return the measurements so far, as `results` does."""
        return self._summed_up(self._sent().values())

    def _spread(self, host, name) -> tuple[float, ...]:
        parts = [host[id(part)] for part in self._spreads[name]]
        return tuple(map(sum, zip(*parts, strict=True)))

    def _summed_up(self, host) -> dict[tuple, RoundingEffect]:
        # A backward pass in another thread may have measured more after the copy was started.
        if self.is_void or any(id(found) not in host for found in self._measured()):
            return {}
        sums = variances(self._nodes, self.slots, host)
        relative = variances(self._nodes, self.slots, host, is_relative=True)
        if sums is None or relative is None:
            return {}
        found = {}
        for name, seen in self.slots.items():
            spread = self._spread(host, name) if name in self._spreads else None
            at_one, sensitivity = (sums[name, level] for level in LEVELS)
            is_known = seen.is_known and (sensitivity > 0 or name not in self._reached_within)
            weight = relative[name, LEVELS[-1]] / sensitivity if sensitivity > 0 else 1.0
            measured = {"at_one": at_one, "sensitivity": sensitivity, "weight": weight}
            measured["is_known"] = is_known
            found[name] = replace(seen, spread=spread, **measured)
        return found


class _End:
    """The callback that autograd calls when a backward pass ends, or deletes if it raises."""

    _probe = None  # for __del__, if an interrupt prevents __init__ from running

    def __init__(self, probe: VarianceProbe):
        self._probe = probe

    def __call__(self):
        probe, self._probe = self._probe, None
        probe._ends()

    def __del__(self):
        if self._probe is not None:
            self._probe._fails()


def _means(values: torch.Tensor) -> torch.Tensor:
    """Return the means of SPREAD nearly equal parts of a vector, and zeros if it is shorter: (SPREAD,) float64."""
    ends, lengths = _part_ends(len(values), values.device)
    sums = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    parts = sums[ends].diff() / lengths
    return torch.nn.functional.pad(parts, (0, SPREAD - len(lengths)))


@lru_cache(maxsize=256)
def _part_ends(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 0 and the ends of the parts of `count` values, (parts + 1,) int64, and the parts' lengths."""
    parts = min(count, SPREAD)
    ends = torch.tensor([round(i * count / parts) for i in range(parts + 1)], device="cpu")
    return ends.to(device), ends.diff().double().to(device)


def _share_at(slot, level: int) -> float:
    return relative_distortion(slot.kind, 1 if level == 1 else max(slot.average, 2))


def _difference(exact, noisy):
    if exact is None or noisy is None or exact.is_sparse:
        return None
    return noisy - exact
