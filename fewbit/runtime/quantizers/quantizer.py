"""The group quantizer of a layer, which makes copies in the forward pass (docs/concepts/quantizer.md)."""

from __future__ import annotations

import math
from copy import copy
from functools import lru_cache

import torch

from fewbit.config import (
    DEFAULT_BITS,
    GROUP_SIZE,
    LARGEST_ROTATED_GROUP,
    MASKED,
    MAX_BITS,
    ROTATED,
    UNIFORM,
    check_bits,
    check_group_size,
    check_quantizer,
    check_rotated_size,
    usual_kind,
)
from fewbit.runtime import backends
from fewbit.runtime.format import layout
from fewbit.runtime.format.channels import Normalization, Statistics, channels_of, count_of
from fewbit.runtime.interop.checkpoint import top_hooks
from fewbit.runtime.interop.compiler_tracing import notify_traced
from fewbit.runtime.interop.tensor_kinds import (
    is_abstract,
    is_eager,
    is_plain,
)
from fewbit.runtime.ops import library, traced_copies
from fewbit.runtime.parallel.shards import has_arrived
from fewbit.runtime.quantizers import computed
from fewbit.runtime.quantizers.copies import with_channels
from fewbit.runtime.quantizers.fixed_point_copies import fixed_point_of
from fewbit.runtime.quantizers.policy_copies import quantize_slot
from fewbit.runtime.quantizers.spec import (
    QuantizedTensorSpec,
    SavedTensors,
    flat,
    in_order,
    in_storage_order,
    spec_of,
)
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.assignment import COMPILED
from fewbit.runtime.saved.context import ForwardContext
from fewbit.runtime.saved.forward import running
from fewbit.runtime.saved.seeds import purpose
from fewbit.runtime.saved.sharing import place_of

EXTRA_BITS_OF_MODEL_INPUTS = 1


class Quantizer:
    """Quantizes the tensors that a layer saves. Layers may share one quantizer.

    Args:
        bits: the bits per element if no policy chooses them, 1 to 8.
        group_size: the number of elements in a group, a multiple of 32.
        context: the state that the layers of a converted model share; None for a layer outside a converted model.
        name: the path of the layer in the converted model.
        average: the mean number of bits per element, if a policy divides bits among samples; `bits` unless given.
        is_fixed: whether the policy must not change the average.
        fuse: whether norms make fixed-point copies.
        kind: the kind of copies, "rotated" or "uniform"; None for the usual kind of each layer (`kind_of`).
        extra_bits: the bits that each of the layer's inputs has more than `bits`, in the order of slots, 0 unless
            given, to at most 8 bits. A policy that chooses the layer's bits ignores them.
        recomputes_linear: whether results of linear layers are computed again instead of saved.

    Raises:
        InputError: bits, group_size or kind is not valid.
    """

    def __init__(
        self,
        bits: int = DEFAULT_BITS,
        group_size: int = GROUP_SIZE,
        context: ForwardContext | None = None,
        name: str = "",
        average: float | None = None,
        is_fixed: bool = True,
        fuse: bool = False,
        kind: str | None = None,
        extra_bits: tuple[float, ...] = (),
        recomputes_linear: bool = False,
    ):
        check_bits(bits)
        check_group_size(group_size)
        if kind is not None:
            check_quantizer(kind)
            check_rotated_size(kind, group_size)
        self.bits = bits
        self.group_size = group_size
        self.context = context
        self.name = name
        self.average = bits if average is None else average
        self.is_fixed = is_fixed
        self.fuse = fuse
        self.kind = kind
        self.extra_bits = extra_bits
        self.recomputes_linear = recomputes_linear

    def copy_for(self, name: str, **changes) -> Quantizer:
        other = copy(self)
        vars(other).update(changes, name=name)
        return other

    def bits_of(self, slot: int, average: float | None = None) -> float:
        """Return the bits of an input, of which `average` (`bits` unless given) does not include `extra_bits`."""
        extra = self.extra_bits[slot] if slot < len(self.extra_bits) else 0
        if average is None:  # compiled code cannot give samples different bits
            return min(math.floor(self.bits + extra), MAX_BITS)
        return min(average + extra, MAX_BITS)

    @property
    def mean_bits(self) -> float:
        """The average bits of the layer's inputs, an int if it is whole."""
        found = [self.bits_of(slot, self.average) for slot in range(len(self.extra_bits))]
        mean = sum(found) / len(found) if found else self.average
        return int(mean) if mean == int(mean) else mean

    def kind_of(self, usual: str) -> str:
        """Return the quantizer's kind of copies, or `usual` if it has none and groups are small enough to be rotated.

        The usual kind is "uniform" for results of softmax, and "rotated" for all other tensors (docs/decisions/0016).
        """
        if self.kind is not None:
            return self.kind
        return usual_kind(usual, self.group_size)

    def quantize_input(
        self,
        x: torch.Tensor,
        features: tuple[int, ...] | None = None,
        needs_grad: bool = True,
    ) -> SavedTensors:
        """Return the fixed-point copy of a linear layer's or convolution's input x if a norm has made one, else quantize x.

        A converted model saves its own inputs, which have no gradient, with 1 bit more, because the gradient of the
        first layer is often large.
        """
        forward, context = running.forward, self.context
        if forward is not None and forward.context.is_private:
            context = forward.context
        if context is not None and context.has_fixed_point and is_eager(x):
            saved = fixed_point_of(context, x)
            if saved is not None:
                return saved
        extra = EXTRA_BITS_OF_MODEL_INPUTS if self.context is not None and not needs_grad else 0
        return self.quantize(x, features=features, extra_bits=extra, recomputes=False)

    @property
    def fixed_point_context(self) -> ForwardContext | None:
        """The context in whose forward pass norms share fixed-point copies: a running pre-activation block's, else `context`.

        A layer can be in several blocks.
        """
        forward = running.forward
        if forward is not None and forward.context.is_private:
            return forward.context
        return self.context

    def quantize(
        self,
        x: torch.Tensor,
        shared: bool = True,
        slot: int = 0,
        usual: str = ROTATED,
        features: tuple[int, ...] | None = None,
        extra_bits: int = 0,
        recomputes: bool = True,
    ) -> SavedTensors:
        """Return a quantized copy of x, made now or by another layer that saved x in the same forward pass.

        Args:
            x: a floating tensor of any shape and strides. A transposed view is quantized in the order of its memory.
            shared: whether several layers that save x may use one copy.
            slot: the number of x among the layer's inputs, from 0.
            usual: the kind of the copy if the quantizer has no kind.
            features: the dimensions of x along which its channels differ, as negative numbers; None if x has no
                channels.
            extra_bits: the bits that x has more than other inputs, if no policy chooses them.
            recomputes: whether `computed.again` may take the place of a copy.
        """
        context, kind = self.context, self.kind
        if kind is None:
            kind = usual if self.group_size <= LARGEST_ROTATED_GROUP else UNIFORM
        is_usual = is_plain(x)
        if not is_usual:
            x = has_arrived(x)
            is_usual = is_plain(x)
        if self.recomputes_linear and shared and recomputes:
            saved = computed.again(self, x)
            if saved is not None:
                return saved
        if context is None or not (is_usual or is_abstract(x)):
            return self._quantize_alone(x, is_usual, slot, kind, features, extra_bits)

        # Every layer of a model runs the code that follows, so it calls few functions.
        saving = running.forward
        # Hooks may be those of a checkpointed region, which has bits, seeds and copies of its own.
        if saving is None or saving.context is not context or top_hooks(False) is not None:
            saving = context.saving(x)
        stride = None
        # Sizes of fake tensors may be symbolic, which have no hash.
        order_of, channels_in = (_order, _channels) if is_usual else (_order_of, _channels_in)
        if not x.is_contiguous():
            order, stride = order_of(x.shape, x.stride())
            if order is not None:
                features = layout.moved(features, order)
                how = shared, slot, usual, features, extra_bits, False
                return in_order(x, order, lambda x: Quantizer.quantize(self, x, *how))
        channels = channels_in(x.shape, stride, features) if kind == ROTATED else 0

        copies, place, result, mask = saving.shared, None, None, None
        if shared and copies is not None:
            place = place_of(x, stride=stride)
        if place is not None:
            key = self.key
            if place in copies.copies or copies.results or copies.masks:
                saved, result, mask = self._find(x, saving, place, key, kind, channels)
                if saved is not None:
                    return saved
                if mask is not None:
                    kind, channels = MASKED, 0

        if not is_usual:
            saved = self._quantize_traced(x, kind, channels, slot, extra_bits)
        else:
            if result is None:
                seed = saving.seed(x, purpose(self.name, slot))
            else:
                saving.has_saved = True
                seed = _seed_of_result(saving, x, result.number[0], key)
            if context.policy is None:
                bits = _bits(self.bits, self.extra_bits, slot, extra_bits)
                saved = self._by_kernel(x, x.dtype, bits, kind, seed, channels, stride, mask)
            else:
                how = None, x.dtype, kind, mask, channels, saving.assignment
                saved = quantize_slot(self, x, seed, x.dtype, slot, *how)
        if place is not None:
            copies.put(x, place, key, saved)
        return saved

    def _find(self, x, saving, place, key, kind, channels) -> tuple:
        """Return (the copy of x, or None; the `ActivationResult` that x is, or None; the mask of a ReLU's result x, or None)."""
        shared, result, mask = saving.shared, None, None
        is_known = place in shared.copies
        saved = shared.get(place, key) if is_known else None
        if not saving.is_region:
            result = shared.results.get(place)
            if kind == ROTATED and (saved is None or channels):
                mask = shared.get_mask(x)
        # An activation chooses its copy by the forward before this one, so only equal settings share the copy.
        if is_known and saved is None and result is None:
            saved = shared.with_more_bits(place, key)
        # An activation does not know the means and scales of channels while it computes its result.
        if channels and mask is None:
            result = None
        if result is not None:
            self.context.add_consumer(result, self)
        if saved is not None:
            saving.has_saved = True
            if saved.is_observed:
                saved = saved.for_consumer(self.name)
        return saved, result, mask

    def _quantize_alone(self, x, is_usual, slot, kind, features, extra_bits) -> SavedTensors:
        """Quantize x outside a model, or while a compiler or a transform traces."""
        channels = self._channels_of(x, kind, features)

        def save(x):
            if not is_usual:
                return self._quantize_traced(x, kind, channels, slot, extra_bits)
            bits = _bits(self.bits, self.extra_bits, slot, extra_bits)
            stride = None if x.is_contiguous() else layout.by_sample_stride(x)
            return self._by_kernel(x, x.dtype, bits, kind, self._seed_alone(x), channels, stride)

        return in_storage_order(x, save)

    def _by_kernel(self, x, dtype, bits, kind, seed, channels, stride, mask=None, normalize=None):
        """Return a copy of x, normalized if `normalize` is given, whose dimensions are in storage order."""
        if stride is not None and x.stride() != stride:
            x = x.detach().contiguous()
        if x.dtype is torch.float64:
            x = x.float()  # the kernels compute in float32
        if channels:
            normalize = with_channels(x, normalize, channels)
        tensors = backends.on[x.device].quantize(
            x, seed, bits, self.group_size, None, None, normalize, kind
        )
        if channels:
            tensors = (*tensors, normalize.channels)
        if mask is not None:
            tensors = (*tensors, mask)
        if offload.running.entered:
            offload.mark(*tensors)
        how = self.group_size, kind, mask is not None, channels > 0
        spec = spec_of(x.shape, stride, dtype, bits, *how)
        return _new(SavedTensors, (tensors, spec, None, False))

    def _channels_of(self, x, kind, features) -> int:
        if features is None or kind != ROTATED or x.dim() < 2:
            return 0
        return channels_of(x, tuple(dim % x.dim() for dim in features))

    def quantize_independent(
        self, x: torch.Tensor, *others: torch.Tensor, features: tuple[int, ...] | None = None
    ) -> SavedTensors:
        """Return a copy of x that is rounded independently of the copies of `others`, even if x is among them.

        Only then is the product of dequantized tensors exact in expectation. `others` are the layer's inputs before x.
        """
        is_one = any(_is_same_memory(x, other) for other in others)
        return self.quantize(x, not is_one, slot=len(others), features=features)

    def quantize_normalized(
        self, x, statistics: Statistics, features: tuple[int, ...] | None = None
    ) -> SavedTensors:
        """Return a quantized copy of the normalized input of a norm layer, that is not shared.

        Args:
            x: the input of the norm, a floating tensor of any shape and strides.
            statistics: those of x.
            features: as in `quantize`.
        """
        mean, rstd, inner, _ = statistics
        is_usual = is_plain(x)
        if not is_usual:
            x = has_arrived(x)
            is_usual = is_plain(x)
        kind, dtype = self.kind, x.dtype
        if kind is None:
            kind = ROTATED if self.group_size <= LARGEST_ROTATED_GROUP else UNIFORM
        fits = inner is not None and rstd.dtype == torch.float32 and dtype != torch.float64
        stride = None if is_usual and x.is_contiguous() else x.stride()
        if fits and (stride is None or layout.is_by_sample(x)):
            # A kernel normalizes while it quantizes, so no memory is taken for the normalized values.
            if is_usual:
                channels = _channels(x.shape, stride, features) if kind == ROTATED else 0
                by = _new(Normalization, (flat(mean), flat(rstd), inner, None))
                return self._save_normalized(x, torch.float32, kind, channels, stride, by, dtype)
            if is_abstract(x):
                copy = self._quantize_traced(x, kind, self._channels_of(x, kind, features))
                return copy._replace(spec=copy.spec._replace(dtype=torch.float32))
        channels = self._channels_of(x, kind, features)
        x = statistics.normalized(x)
        if not is_plain(x):
            return self._quantize_traced(x, kind, channels)
        stride = None if x.is_contiguous() else layout.by_sample_stride(x)
        return self._save_normalized(x, x.dtype, kind, channels, stride, None, dtype)

    def _save_normalized(self, x, dtype, kind, channels, stride, normalize, input_dtype):
        context, saving = self.context, None
        if context is None:
            seed = self._seed_alone(x)
        else:
            saving = context.saving(x)
            seed = saving.seed(x, purpose(self.name, 0))
            if context.policy is not None:
                how = normalize, input_dtype, kind, None, channels, saving.assignment
                return quantize_slot(self, x, seed, dtype, 0, *how)
        bits = _bits(self.bits, self.extra_bits, 0, 0)
        return self._by_kernel(x, dtype, bits, kind, seed, channels, stride, None, normalize)

    def _seed_alone(self, x) -> torch.Tensor:
        return library.new_seed(x)

    @property
    def _policy(self):
        return None if self.context is None else self.context.policy

    def quantize_with_activation(self, run, y, are_masks: bool = False) -> tuple | None:
        """Compute an activation's result y, the activation's codes and the copy of y in one pass over memory.

        Args:
            run: run(seed, bits, group_size, kind) writes y and returns a `backends.results.QuantizedForward`, or
                returns None if the backend has no kernel for this.
            y: the memory of the result: a plain tensor, samples outermost.
            are_masks: whether the activation's codes say where y is 0.

        Returns:
            (the codes, SavedTensors of y); None if nothing was written.
        """
        if self._policy is not None:
            return None
        saving = self.context.saving(y)
        seed = _seed_of_result(saving, y, len(saving.shared.results), self.key)
        kind = self.kind_of(ROTATED)
        is_masked = kind == ROTATED and are_masks
        kind = MASKED if is_masked else kind
        made = run(seed, self.bits, self.group_size, kind)
        if made is None:
            return None
        codes, packed, ranges = made
        if offload.running.entered:
            offload.mark(packed, ranges)
        spec = self._spec(y, self.bits, kind)._replace(has_mask=is_masked)
        mask = (codes,) if is_masked else ()
        return codes, SavedTensors((packed, ranges, *mask), spec)

    @property
    def key(self) -> tuple:
        """The settings that two layers must have in common to share a copy.

        Some seeds are hashes of the key. To keep them, append a new setting only if it differs from its default value.
        """
        bits, context = self.bits, self.context
        if context is not None and context.policy is not None:
            bits = self.average if self.is_fixed else None
        key = bits, self.group_size
        return key if self.kind == UNIFORM else (*key, self.kind)

    def _quantize_traced(self, x, kind, channels=0, slot=0, extra_bits=0) -> SavedTensors:
        notify_traced(self)
        bits = min(self.bits_of(slot) + extra_bits, MAX_BITS)
        spec = self._spec(x, bits, kind)._replace(has_channels=bool(channels))
        settings = bits, self.group_size, kind, channels
        made = traced_copies.quantize(x, spec.stride, library.new_seed(x), *settings)
        tensors = tuple(made[: 3 if channels else 2])
        return SavedTensors(tensors, spec, None if is_abstract(x) else made[-1])

    def was_traced(self) -> None:
        """Tell the policy that no probe can measure the layer, which is compiled."""
        # A quantizer that is made in the traced code has no attributes yet.
        if "context" in vars(self) and self._policy is not None and not self.is_fixed:
            self._policy.report_unobserved(self.name, COMPILED)

    def _spec(self, x, bits: int, kind: str) -> QuantizedTensorSpec:
        size, stride = tuple(x.shape), tuple(layout.by_sample_stride(x))
        return QuantizedTensorSpec(bits, self.group_size, size, stride, x.dtype, kind=kind)

    def __repr__(self) -> str:
        parts = [f"bits={self.mean_bits:g}"]
        if self.group_size != GROUP_SIZE:
            parts.append(f"group_size={self.group_size}")
        if self.kind is not None:
            parts.append(f"quantizer={self.kind!r}")
        return ", ".join(parts)


_new = tuple.__new__
_order_of = layout.place_in_storage
_order = lru_cache(maxsize=4096)(_order_of)


def _channels_in(shape, stride, features: tuple[int, ...] | None) -> int:
    dims = len(shape)
    if features is None or dims < 2:
        return 0
    if stride is None:
        stride = layout.contiguous_stride(shape)
    _, stride = _order_of(shape, stride)
    return count_of(shape, stride, tuple(dim % dims for dim in features))


_channels = lru_cache(maxsize=4096)(_channels_in)


@lru_cache(maxsize=4096)
def _bits(bits: int, extra_bits: tuple[float, ...], slot: int, more: int) -> int:
    extra = extra_bits[slot] if slot < len(extra_bits) else 0
    return min(min(math.floor(bits + extra), MAX_BITS) + more, MAX_BITS)


def _seed_of_result(saving, y, number: int, key: tuple):
    """Return the seed of an activation's result y, whether the activation or a layer makes the copy."""
    return saving.seed_of(y, purpose("result", saving.part, number, key))


def _is_same_memory(x, other) -> bool:
    if not (is_eager(x) and is_eager(other)):
        return False
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata


@lru_cache(maxsize=256, typed=True)  # 2.0 is not 2, and True is not 1
def _quantizer_of(bits: int, group_size: int, kind: str | None) -> Quantizer:
    return Quantizer(bits, group_size, kind=kind)


def quantizer_of(bits: int, group_size: int, quantizer: Quantizer | str | None = None) -> Quantizer:
    """Return the Quantizer of functions of `fewbit.functional` with these settings, or `quantizer` if it is one.

    Raises:
        InputError: a setting is not valid.
    """
    if type(quantizer) is Quantizer or isinstance(quantizer, Quantizer):
        return quantizer
    return _quantizer_of(bits, group_size, quantizer)
