"""The change of a joint graph: quantize tensors in the forward part, and use dequantized copies in the backward part."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import fx

from fewbit.compiler import uses
from fewbit.compiler.computed_again import compute_again
from fewbit.compiler.graphs import insert, origin
from fewbit.compiler.joint_graph import JointGraph, Root
from fewbit.compiler.seed_counters import draw_seeds_op
from fewbit.compiler.symbolic_sizes import hints
from fewbit.config import KIND_NUMBERS, MASKED, ROTATED, UNIFORM, usual_kind
from fewbit.convert.module_settings import ResolvedSettings
from fewbit.runtime.format import groups, layout
from fewbit.runtime.format.channels import LEAST_ROWS, usual_features
from fewbit.runtime.ops.dense_ops import (
    dequantize_by_channels_op,
    dequantize_dense_op,
    pack_mask_op,
    pack_op,
    quantize_by_channels_op,
    quantize_dense_op,
    unpack_mask_op,
    unpack_op,
)

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}


class Copy(NamedTuple):
    """A quantized copy of `root`, the nodes `saved`. `restore` appends the dequantization to the graph and returns its node."""

    root: Root
    bits: int
    saved: tuple[fx.Node, ...]
    restore: Callable[[], fx.Node]


class Rewriter:
    """Replaces the tensors that backward nodes use. `settings_of` returns a tensor's settings, or None if it stays exact."""

    def __init__(
        self,
        joint: JointGraph,
        settings_of: Callable[[Root], ResolvedSettings | None],
        is_inductor: bool = False,
    ):
        self.joint = joint
        self._is_inductor = is_inductor
        self.graph = joint.graph
        self.settings_of = settings_of
        self.copies: dict[fx.Node, Copy] = {}
        self._restored: dict[fx.Node, fx.Node] = {}
        self._seeds: dict[fx.Node, fx.Node] = {}
        self._mode = None

    def run(self) -> dict[fx.Node, Copy]:
        """Change the graph. Return {node: the copy of its tensor}."""
        joint = self.joint
        compute_again(joint, self.settings_of)
        chosen = {}
        for node, root in joint.roots.items():
            settings = self.settings_of(root)
            if settings is None:
                joint.exact[node] = "an override leaves it exact"
            else:
                chosen[node] = settings
        if not chosen:
            return {}
        self._mode = next(iter(chosen)).meta["val"].fake_mode
        self._move_forward(chosen)
        self._insert_seeds(chosen)
        for node, settings in chosen.items():
            self.copies[node] = self._quantize(joint.roots[node], settings)
        for user in joint.backward:
            self._restore_inputs(user)
        return self.copies

    # -- The forward part ----------------------------------------------------------------------------------------

    def _move_forward(self, chosen) -> None:
        """Move nodes of the backward part that make a chosen tensor to the place where their inputs are made.

        Otherwise inputs of activations would stay in memory until the forward graph ends.
        """
        last = max(i for i, node in enumerate(self.graph.nodes) if node in self.joint.forward)
        place = {node: (i,) for i, node in enumerate(self.graph.nodes)}
        needed, todo = set(), list(chosen)
        while todo:
            node = todo.pop()
            if node not in needed and node.op != "placeholder" and place[node] > (last,):
                needed.add(node)
                todo += node.all_input_nodes
        placeholders = self.graph.find_nodes(op="placeholder")
        counts: dict[fx.Node, int] = {}
        for node in [node for node in self.graph.nodes if node in needed]:
            inputs = [x for x in node.all_input_nodes if x.op != "placeholder"]
            after = max(inputs, key=place.get, default=placeholders[-1])
            counts[after] = counts.get(after, 0) - 1
            after.append(node)
            place[node] = (*place[after], counts[after])

    def _insert_seeds(self, chosen) -> None:
        devices: dict[torch.device, list[fx.Node]] = {}
        for node in chosen:
            if not self.joint.roots[node].codes:  # masks and indices are not rounded
                devices.setdefault(node.meta["val"].device, []).append(node)
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first):
            for device, nodes in devices.items():
                seeds = self._call(draw_seeds_op, (len(nodes),), {"device": device}, first)
                for i, node in enumerate(nodes):
                    self._seeds[node] = self._call(aten.slice.Tensor, (seeds, 0, i, i + 1))

    def _quantize(self, root: Root, settings: ResolvedSettings) -> Copy:
        after = root.node
        if after.op == "placeholder":
            last = self.graph.find_nodes(op="placeholder")[-1]
            after = self._seeds.get(root.node, last)
        with self.graph.inserting_before(after.next):
            return self._pack(root) if root.codes else self._group_copy(root, settings)

    def _pack(self, root: Root) -> Copy:
        node, value, bits = root.node, root.node.meta["val"], bits_of(root, None)
        order = _order(value)
        shape = self._sizes(value.shape[dim] for dim in order)
        (elements,) = self._sizes([value.numel()])
        if value.dtype is torch.bool:
            return self._pack_mask(root, order, shape, elements)
        codes = self._call(_CONVERT, (node, torch.uint8))
        codes = self._call(aten.permute.default, (codes, order))
        packed = self._call(pack_op, (codes, bits))

        def restore():
            flat = self._call(unpack_op, (packed, bits, elements), like=node, tag=True)
            shaped = self._call(aten.view.default, (flat, shape), tag=True)
            exact = self._call(_CONVERT, (shaped, value.dtype), tag=True)
            return self._call(aten.permute.default, (exact, _inverse(order)), tag=True)

        return Copy(root, bits, (packed,), restore)

    def _pack_mask(self, root: Root, order, shape, elements) -> Copy:
        mask = root.node
        # On the CPU, Inductor's code converts floats to bits in a tenth of the time that it takes to write bools.
        is_float = self._is_inductor and mask.meta["val"].device.type == "cpu"
        dtype = torch.float32 if is_float else torch.bool
        codes = self._call(_CONVERT, (mask, dtype)) if is_float else mask
        codes = self._call(aten.permute.default, (codes, order))
        packed = self._call(pack_mask_op, (codes,))

        def restore():
            how = {"dtype": dtype}
            flat = self._call(unpack_mask_op, (packed, elements), how, like=mask, tag=True)
            back = self._call(aten.view.default, (flat, shape), tag=True)
            if is_float:
                back = self._call(aten.gt.Scalar, (back, 0), tag=True)
            return self._call(aten.permute.default, (back, _inverse(order)), tag=True)

        return Copy(root, 1, (packed,), restore)

    def _group_copy(self, root: Root, settings: ResolvedSettings) -> Copy:
        node, value = root.node, root.node.meta["val"]
        bits, kind = bits_of(root, settings), kind_of(root, settings)
        mask = self._mask_of(node) if kind == ROTATED else None
        if mask is not None:
            kind = MASKED
        order = _order(value)
        source = self._call(aten.permute.default, (node, order))
        shape = [value.shape[dim] for dim in order]
        channels = _channels(root, order) if kind == ROTATED else 0
        settings, number = (bits, settings.group_size), KIND_NUMBERS[kind]
        op = quantize_by_channels_op if channels else quantize_dense_op
        arguments = source, self._seeds[node], *settings, channels or number
        result = self._call(op, arguments)
        saved = [self._call(operator.getitem, (result, i)) for i in range(3 if channels else 2)]
        rows, shape = self._sizes(groups.samples_of(shape)), self._sizes(shape)

        def restore():
            packed, ranges, *statistics = saved
            op = dequantize_by_channels_op if channels else dequantize_dense_op
            arguments = packed, ranges, *settings, *rows, value.dtype, *(statistics or [number])
            back = self._call(op, arguments, like=node, tag=True)
            if len(shape) != 2:
                back = self._call(aten.view.default, (back, shape), tag=True)
            back = self._call(aten.permute.default, (back, _inverse(order)), tag=True)
            return back if mask is None else self._zero_where(mask, back, node)

        return Copy(root, bits, tuple(saved), restore)

    def _mask_of(self, node) -> fx.Node | None:
        """Return the mask of a ReLU's result, if the backward pass uses the mask too."""
        if node.target is not aten.relu.default:
            return None
        masks = [x for x in self.joint.roots if x.target is aten.le.Scalar and x.args[1] == 0]
        return next((x for x in masks if uses.unaliased(x.args[0]) is node), None)

    def _zero_where(self, mask, x, like) -> fx.Node:
        value = like.meta["val"]
        kwargs = {"dtype": value.dtype, "device": value.device}
        zero = self._call(aten.scalar_tensor.default, (0.0,), kwargs, tag=True)
        return self._call(aten.where.self, (self._restore(mask), zero, x), like=like, tag=True)

    # -- The backward part ---------------------------------------------------------------------------------------

    def _restore_inputs(self, user: fx.Node) -> None:
        """Replace the inputs of a backward node that copies restore, and those that it does not read."""
        with self.graph.inserting_before(user):
            inputs = [x for x in user.all_input_nodes if self._may_be_restored(x)]
            forward = uses.attention_of(user)
            # The output and the sums have to be those of the queries, keys and values that the backward node gets.
            restored = {} if forward is None else self._attention_again(forward, user)
            for x in inputs:
                if x not in restored:
                    is_unused = uses.use_of(user, x) == uses.UNUSED
                    restored[x] = self._empty(x) if is_unused else self._restore(x)
            for x, other in restored.items():
                if other is not x:
                    user.replace_input_with(x, other)

    def _restore(self, node: fx.Node) -> fx.Node:
        if not self._may_be_restored(node):
            return node
        if node not in self._restored:
            self._restored[node] = self._restored_anew(node)
        return self._restored[node]

    def _cast_again(self, node) -> fx.Node:
        if node in self.joint.parameters:
            # torch merges nodes that compute the same. The alias makes this cast another one than that of the forward.
            return self._call(aten.alias.default, (node,), tag=True)
        source = node.all_input_nodes[0]
        return self._computed_again(node, {source: self._cast_again(source)})

    def _drawn_again(self, node) -> fx.Node:
        if node.target not in uses.RANDOM:
            return self._computed_again(node, {x: self._restore(x) for x in node.all_input_nodes})
        seed = uses.argument(node, "seed")
        # torch merges nodes that compute the same. The alias makes these numbers others than those of the forward.
        own = self._call(aten.alias.default, (seed,), tag=True)
        inputs = {x: own if x is seed else x for x in node.all_input_nodes}
        return self._computed_again(node, inputs)

    def _may_be_restored(self, node) -> bool:
        joint = self.joint
        if node in joint.backward:
            return False
        is_again = joint.is_cast_parameter(node) or node in joint.random
        return is_again or not (node in joint.constants or node in joint.exact)

    def _restored_anew(self, node):
        if node in self.copies:
            return self.copies[node].restore()
        if self.joint.is_cast_parameter(node):
            return self._cast_again(node)
        if node in self.joint.random:
            return self._drawn_again(node)
        mask = self._mask_of(node) if node in self.joint.again else None
        if mask is not None:  # the mean of relu(copy) is not the exact value
            return self._zero_where(mask, self._restore(node.args[0]), node)
        if self.joint.source_of(node) is None and node not in self.joint.again:
            return node
        inputs = {x: self._restore(x) for x in node.all_input_nodes}
        if all(x is other for x, other in inputs.items()):
            return node
        return self._computed_again(node, inputs)

    def _computed_again(self, node, inputs: dict[fx.Node, fx.Node]) -> fx.Node:
        again = self.graph.node_copy(node, inputs.get)
        again.meta = {"val": node.meta["val"], **origin(node), **_IN_BACKWARD}
        return again

    def _attention_again(self, forward: fx.Node, user: fx.Node) -> dict[fx.Node, fx.Node]:
        """Compute attention again from restored inputs. Return {result of the forward: the new one}."""
        inputs = {x: self._restore(x) for x in forward.all_input_nodes}
        results = [uses.argument(user, name) for name in uses.RESULTS]
        if all(x is other for x, other in inputs.items()):
            return {x: x for x in results}
        again = self._computed_again(forward, inputs)
        return {
            x: self._call(operator.getitem, (again, i), like=x, tag=True)
            for i, x in enumerate(results)
        }

    def _empty(self, x: fx.Node) -> fx.Node:
        value = x.meta["val"]
        settings = {"dtype": value.dtype, "device": value.device}
        place = self._sizes(value.shape), self._sizes(value.stride())
        return self._call(aten.empty_strided.default, place, settings, like=x, tag=True)

    def _sizes(self, sizes) -> list[int | fx.Node]:
        return [self.joint.sizes.of(size) for size in sizes]

    def _call(
        self, target, args, kwargs=None, like: fx.Node | None = None, tag: bool = False
    ) -> fx.Node:
        node = insert(self.graph, self._mode, target, args, kwargs, like)
        if tag:
            node.meta |= _IN_BACKWARD
        return node


def bits_of(root: Root, settings: ResolvedSettings | None) -> int:
    """Return the bits per element of a tensor's copy."""
    if root.codes:
        return max(1, (root.codes - 1).bit_length())
    if root.is_derivative:
        return settings.activation_bits
    is_before_linear = root.node.meta["val"].dim() <= 3  # rather than before a convolution
    makers = {
        "attention": settings.make_attention_quantizer,
        "gates": settings.make_gate_quantizer,
        "activations": settings.make_activation_quantizer,
        "norms": partial(settings.make_norm_quantizer, is_before_linear=is_before_linear),
    }
    found = [makers[role](None).bits_of(number) for role, number in root.roles]
    return max(found, default=math.floor(settings.bits))


def kind_of(root: Root, settings: ResolvedSettings) -> str:
    """Return the kind of a copy: uniform for derivatives and results of softmax (docs/decisions/0016)."""
    usual = UNIFORM if root.is_derivative or root.is_probability else ROTATED
    return settings.quantizer or usual_kind(usual, settings.group_size)


def _order(value: torch.Tensor) -> list[int]:
    shape, stride = hints(value.shape), hints(value.stride())
    is_dense = layout.are_dense(shape, stride)
    return layout.outermost_first(shape, stride) if is_dense else list(range(value.dim()))


def _channels(root: Root, order: list[int]) -> int:
    """Return the number of channels of a tensor's rotated copy; `order` is that of storage."""
    value = root.node.meta["val"]
    features = set(usual_features(value.dim()))
    if root.is_attention and value.dim() == 4:
        features = {1, 3}  # heads and the entries of a head's vectors
    if not features:
        return 0
    sizes = [value.shape[dim] for dim in features]
    if set(order[-len(features) :]) != features or not all(isinstance(n, int) for n in sizes):
        return 0
    count = math.prod(sizes)
    elements = math.prod(hints(value.shape))
    return count if count > 1 and elements >= LEAST_ROWS * count else 0


def _inverse(order) -> list[int]:
    return [list(order).index(dim) for dim in range(len(order))]
