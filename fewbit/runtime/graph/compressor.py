"""`GraphCompressor` replaces tensors that torch's operations have saved by copies of a few bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from fewbit.config import name_of_class, usual_kind
from fewbit.errors import GradientError, InputError
from fewbit.runtime.format.groups import LEAST_ELEMENTS
from fewbit.runtime.graph import packs
from fewbit.runtime.graph.known_functions import linear_positions
from fewbit.runtime.graph.packs import Pack, PackedCopy
from fewbit.runtime.graph.rules import (
    LINEAR,
    NAMED,
    TWO_VALUED,
    Rule,
    is_broadcast,
    rule_of,
)
from fewbit.runtime.interop.autograd_graph import (
    SavedArgument,
    count_of_saved,
    ends_at_leaves,
    function_of,
    next_sequence_number,
    nodes_of,
    nodes_since,
    saved_by,
)
from fewbit.runtime.interop.checkpoint import in_backward
from fewbit.runtime.interop.containers import tensors_in
from fewbit.runtime.interop.cuda_streams import hold_for_stream
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.ops.library import NO_SECOND_DERIVATIVE
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.spec import SavedTensors, in_storage_order
from fewbit.runtime.saved.context import ForwardContext
from fewbit.runtime.saved.seeds import purpose
from fewbit.runtime.saved.sharing import address_of

_LEAST_GAIN = 2
"""The least factor by which a replaced storage is larger than the codes."""


class GraphSettings(NamedTuple):
    """The settings for the tensors that torch's operations save in one module.

    Args:
        bits: the bits per element of tensors in which gradients are linear.
        derivative_bits: the bits per element of derivatives.
        kind: the kind of the copies; None for the usual kind.
        functions: {name of an autograd Function: positions of saved tensors in which its gradients are linear}.
        least: the number of elements from which on small tensors of one pack are quantized.
    """

    bits: int
    derivative_bits: int
    group_size: int
    kind: str | None
    functions: Mapping[str, list[int]]
    least: int = LEAST_ELEMENTS

    def rules_of(self, node) -> Iterator[tuple[SavedArgument, Rule | None]]:
        """Yield the tensors that an autograd node has saved, each with its rule; None if it has to stay exact.

        Raises:
            InputError: the user has named a position at which the node has no tensor.
        """
        function = function_of(node)
        count = None if function is None else count_of_saved(node)
        named = () if function is None else self.functions.get(name_of_class(function))
        if named is None:
            named = linear_positions(function, node, count)
        if named and count is not None and max(named) >= count:
            raise InputError(
                f"autograd_functions: expected positions below {count} for {name_of_class(function)}, which saves "
                f"{count} tensors, got {max(named)}"
            )
        for argument in saved_by(node):
            if function is None:
                rule = rule_of(node, argument.name)
                yield argument, TWO_VALUED if _is_factor(argument, rule) else rule
            else:
                yield argument, NAMED if argument.number in named else None


class _Candidate(NamedTuple):
    argument: SavedArgument
    rule: Rule | None


class GraphCompressor:
    """Compresses what torch's operations save in a model's forward passes. A copy has the same settings.

    Args:
        settings: the settings for modules that `own` does not name.
        own: {path of a module: its settings, or None if tensors that are saved in it stay exact}.
    """

    def __init__(self, settings: GraphSettings | None, own: Mapping[str, GraphSettings | None]):
        self.settings = settings
        self.own = dict(own)
        self._local = _StateOfThread()

    def __getstate__(self):
        return {"settings": self.settings, "own": self.own}

    def __setstate__(self, state):
        self.__init__(**state)

    def begin(self, module: nn.Module, inputs) -> None:
        """Start a forward pass of `module`. Existing autograd nodes are not touched."""
        local = self._local
        # Sequence numbers do not suffice: nodes of another thread may have larger ones.
        local.start, local.seen = next_sequence_number(), {*nodes_of(tensors_in(inputs))}
        local.owned, local.earlier = _storages(module, inputs), []
        local.exact, local.packs = set(), {}

    def end(self) -> None:
        local = self._local
        local.start, local.seen, local.owned, local.earlier = None, set(), set(), []
        local.exact, local.packs = set(), {}

    def compress(self, path: str, start: int, outputs, context: ForwardContext) -> None:
        """Compress what was saved in a call of the module at `path`, except in modules that were compressed before.

        `start` is the sequence number of the next autograd node when the call began.
        """
        local = self._local
        if local.start is None:
            return
        ends = nodes_of(tensors_in(outputs))
        nodes, earlier = nodes_since([*ends, *local.earlier], start, local.seen)
        # Nodes that were made before this call belong to the module that made the call.
        local.earlier = [node for node in earlier if node._sequence_nr() >= local.start]
        settings = self.own.get(path, self.settings)
        if not nodes or settings is None:
            return
        candidates = [
            _Candidate(argument, rule)
            for node in nodes
            for argument, rule in settings.rules_of(node)
            if argument.tensor is not None and is_plain(argument.tensor)
        ]
        # A storage that an earlier call needs in full is not freed by copies of this call.
        exact = local.exact
        exact |= {
            address_of(one.argument.tensor)
            for one in candidates
            if one.rule is None or self._stays(one.argument, one.rule)
        }
        exact |= _without_gain(candidates, settings)
        shared = context.innermost_forward().shared
        if shared is not None and shared.wanted:
            for one in candidates:
                if address_of(one.argument.tensor) in exact:
                    shared.note_kept(one.argument.tensor)
        candidates.reverse()
        while candidates:  # a tensor is freed as soon as its copies are made
            one = candidates.pop()
            if address_of(one.argument.tensor) not in exact:
                self._replace(one, settings, path, context)

    def finish(self, context: ForwardContext) -> None:
        """Make the copies of packs that are not full."""
        local = self._local
        waiting = [*local.packs.values()]
        while waiting:
            small = [pack for pack in waiting if pack.count(local.exact) < pack.settings.least]
            if not small:
                break
            # A copy of a tensor would free nothing if another pack keeps the tensor in full.
            for pack in small:
                local.exact |= {address_of(one.tensor) for one in pack.arguments}
            waiting = [pack for pack in waiting if pack not in small]
        local.packs = {}
        for pack in waiting:
            self._close(pack, context)

    def _stays(self, argument: SavedArgument, rule: Rule) -> bool:
        x = argument.tensor
        if x.numel() < packs.LEAST_ELEMENTS or address_of(x) in self._local.owned:
            return True
        if x.numel() < LEAST_ELEMENTS and is_broadcast(argument.node, x):
            return True
        if x.untyped_storage().nbytes() == 0:
            return True
        is_constant = not argument.needs_grad and (
            rule.takes_constants or ends_at_leaves(argument.node)
        )
        return not (rule.is_exact or argument.is_computed or is_constant)

    def _replace(self, one: _Candidate, settings: GraphSettings, path: str, context) -> None:
        argument, rule = one.argument, one.rule
        x = argument.tensor.detach()
        # `softmax_copies.quantize_softmax` says why matrix products may use softmax's copy.
        shared = None
        if argument.node.name() in ("MmBackward0", "BmmBackward0"):
            copies = context.saving(x).shared
            shared = None if copies is None else copies.get_softmax(x)
        if shared is None and x.numel() <= packs.MOST_ELEMENTS:
            key = packs.key_of(x, rule, id(settings))
            pack = self._local.packs.get(key)
            if pack is None:
                pack = self._local.packs[key] = Pack(rule, settings)
            pack.add(argument)
            if pack.is_full:
                self._close(self._local.packs.pop(key), context)
            return
        name = f"{path}:{argument.node.name()}.{argument.name}"
        copy = shared or _copied(x, rule, settings, name, context)
        if copy is not None:
            restore = partial(packs.dequantized, copy)
            _hold(argument, copy.tensors, _checked(restore, rule.is_exact))

    def _close(self, pack: Pack, context) -> None:
        members = pack.members(self._local.exact)
        if not members:
            return
        tensors = [member.tensor for member in members]
        hold_for_stream(tensors)  # their nodes may have run in other streams
        with torch.no_grad(), torch._C.DisableTorchFunction():
            x = torch.cat(tensors)
        copy = _copied(x, pack.rule, pack.settings, "packed", context)
        if copy is None:
            return
        packed, end = PackedCopy(copy, len(members)), 0
        for member in members:
            start, end = end, end + len(member.tensor)
            restore = partial(packed.member, start, end, member.order)
            _hold(member.argument, copy.tensors, _checked(restore, pack.rule.is_exact))


LEAST_ROW = 128
"""From this number of elements on, rows of a tensor have groups of their own."""


def _copied(x, rule: Rule, settings: GraphSettings, name: str, context) -> SavedTensors | None:
    def quantize(x, bits, kind):
        kind = usual_kind(kind, settings.group_size)
        seed = context.saving(x).seed(x, purpose(name))
        given = seed, bits, settings.group_size, kind

        def save(x):
            if x.dim() < 3 or x.shape[-1] < LEAST_ROW or x.shape[-1] % settings.group_size == 0:
                return copies.quantized(x, *given)
            # No group crosses from one row, which may be a channel, to the next.
            return copies.quantized(x.flatten(0, -2), *given).viewed(tuple(x.shape))

        return in_storage_order(x, save)

    hold_for_stream((x,))  # the node may have run in another stream
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return rule.compress(x, settings, quantize)


def _hold(argument: SavedArgument, tensors, restore: Callable) -> None:
    if argument.meter is not None:
        argument.meter.replace(tensors, restore)
    else:
        argument.raw.register_hooks(lambda _: None, restore)


def _is_factor(argument: SavedArgument, rule: Rule | None) -> bool:
    """Return whether the argument is a factor without gradient, and the other factor comes from parameters."""
    if rule is not LINEAR or not argument.node.name().startswith("MulBackward"):
        return False
    is_constant = not (argument.needs_grad or argument.is_computed)
    return is_constant and not ends_at_leaves(argument.node)


def _checked(restore: Callable[[], torch.Tensor], is_exact: bool) -> Callable:
    """Return a hook that calls `restore`, but refuses second derivatives of an inexact copy."""

    def hook(_):
        # Gradients are enabled in a backward pass only for second derivatives, which are not those of the copy.
        if not is_exact and torch.is_grad_enabled() and in_backward():
            raise GradientError(NO_SECOND_DERIVATIVE)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return restore()

    return hook


def _without_gain(candidates: list[_Candidate], settings: GraphSettings) -> set[int]:
    """Return the storages that are hardly larger than their tensors' copies."""
    bits, sizes = {}, {}
    for argument, rule in candidates:
        if rule is not None:
            x, key = argument.tensor, address_of(argument.tensor)
            bits[key] = bits.get(key, 0) + rule.bits(settings) * x.numel()
            sizes[key] = 8 * x.untyped_storage().nbytes()
    return {key for key, size in sizes.items() if bits[key] * _LEAST_GAIN > size}


def _storages(module: nn.Module, inputs) -> set[int]:
    given = [x for x in tensors_in(inputs) if x.grad_fn is None]
    tensors = (*module.parameters(), *module.buffers(), *given)
    return {address_of(x) for x in tensors if is_plain(x)}


class _StateOfThread(threading.local):
    def __init__(self):
        self.start = None  # the sequence number of its first autograd node, or None
        self.seen = set()  # nodes that `compress` has visited
        self.owned = set()  # storages of the parameters, buffers and inputs of its module
        self.earlier = []  # nodes that `compress` has reached, and that belong to calls that have not ended
        self.exact = set()  # storages that stay, because a node needs them in full
        self.packs = {}  # {key: Pack} of small tensors that wait for others
