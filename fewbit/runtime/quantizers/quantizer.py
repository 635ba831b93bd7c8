"""What a layer keeps of a tensor: `Quantizer.keep` in forward, `QuantizedTensorSpec.restore` in backward."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from fewbit.errors import InputError
from fewbit.runtime import ops
from fewbit.runtime.activations.tables import check_choice
from fewbit.runtime.backends.reference_quantizer import in_dtype
from fewbit.runtime.format import groups, layout
from fewbit.runtime.interop.tensor_kinds import (
    check_not_distributed,
    is_abstract,
    is_eager,
    is_plain,
)
from fewbit.runtime.ops import quantizer_ops as quantizer_ops
from fewbit.runtime.quantizers.codec import CodecSpec, Keeper
from fewbit.runtime.saved import offload
from fewbit.runtime.saved import probe as probes
from fewbit.runtime.saved.assignment import COMPILED, REENTRANT, TensorSlot
from fewbit.runtime.saved.min_dtype import MinDtypeSelector
from fewbit.runtime.saved.session import Session, current, in_backward, in_checkpoint

DEFAULT_BITS = 2


class QuantizedTensorSpec(NamedTuple):
    """How kept tensors become values again: everything but the tensors."""

    bits: int
    group_size: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    samples: int | None = None  # where each has bits of its own
    slot: TensorSlot | None = None  # that this was kept for, if bits are not fixed

    @property
    def count(self) -> int:
        """How many tensors are kept: codes, ranges and, where samples have bits of their own, those."""
        return 2 if self.samples is None else 3

    def restore(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values in the size and strides of what was kept; dtype: its own unless given.

        affine: (scale, shift, inner), either of which may be None, for values * scale + shift before they are
        rounded to dtype: of shapes that broadcast to the values; inner: as for `Quantizer.keep_normalized`.
        """
        *vectors, inner = affine or (None, None)
        if all(each is None for each in vectors):
            return self._restore(tensors, dtype or self.dtype)
        plain = all(each is None or is_plain(each) for each in (*tensors, *vectors))
        fits = plain and inner is not None and self.dtype == torch.float32 and self._maps()
        if fits and not probes.is_changed(self):
            return self._restore(tensors, dtype or self.dtype, (*map(flat, vectors), inner))
        scale, shift = vectors
        values = self.restore(tensors)
        if scale is not None:
            values.mul_(scale)
        if shift is not None:
            values.add_(shift)
        return in_dtype(values, dtype or self.dtype)

    def with_slot(self, slot: TensorSlot) -> QuantizedTensorSpec:
        """Return the spec of a tensor of that slot."""
        return self._replace(slot=slot)

    def used_by(self, name: str) -> QuantizedTensorSpec:
        """For another layer, of that name."""
        slot = self.slot
        if slot is None or slot.rounding is None or slot.name[0] == name:
            return self
        return self._replace(slot=slot._replace(user=name))

    def exactly(self, tensors) -> torch.Tensor:
        """What was kept, whatever a probe tries."""
        return self._values(tensors, self.dtype, None)

    def _restore(self, tensors, dtype, affine=None):
        values = self._values(tensors, dtype, affine)
        return probes.restored(values, self, tensors[0])

    def _values(self, tensors, dtype, affine):
        packed, ranges, *widths = tensors
        place = self.bits, self.group_size, self.size, self.stride
        if not is_plain(packed):
            return quantizer_ops.dequantize_op(packed, ranges, *place, dtype)
        if not widths:
            return quantizer_ops.dequantize(packed, ranges, *place, dtype, affine=affine)
        return quantizer_ops.dequantize_samples(
            packed, ranges, *widths, self.samples, *place[1:], dtype, affine
        )

    def _maps(self) -> bool:
        """Whether the kernels map what they restore."""
        return self.samples is None or prod(self.size) >= self.samples * groups.LEAST_FEATURES


class Permuted(NamedTuple):
    """How a tensor with its dimensions in another order is restored."""

    inner: QuantizedTensorSpec
    order: tuple[int, ...]

    def restore(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of `inner` with dimension order[i] as dimension i."""
        return self.inner.restore(tensors, dtype).permute(self.order)


class SavedTensors(NamedTuple):
    """Tensors for `save_for_backward`, and how to restore from them.

    one: where a compiler traces, a 1 that the layer's result is to be multiplied with (docs/decisions/0004).
    """

    tensors: tuple[torch.Tensor, ...]
    recipe: QuantizedTensorSpec
    one: torch.Tensor | None = None

    def mark(self, y: torch.Tensor) -> torch.Tensor:
        """y, as a compiler must see it so that what is kept is made in the forward pass."""
        return y if self.one is None else y * self.one.to(y.dtype)


class Rounded(NamedTuple):
    """A tensor x, what is kept of it or of what `normalize` makes of it, and how: for probes."""

    x: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    recipe: QuantizedTensorSpec
    group_size: int
    wide: bool | None
    normalize: tuple | None

    def variance(self, bits: int, generator) -> torch.Tensor:
        """As `quantizer_ops.rounding_variance`."""
        settings = self.group_size, self.wide, self.normalize
        return quantizer_ops.rounding_variance(
            self.x, self.recipe.samples, *settings, bits, generator
        )

    def squares(self) -> torch.Tensor:
        """0-D float32: the sum over groups of length times range squared."""
        x = self.x if layout.is_by_sample(self.x) else self.x.contiguous()
        if x.numel() < groups.LEAST_FEATURES * len(x):
            x = layout.storage_order(x).view(1, -1)  # as groups run across samples so short
        return quantizer_ops.squares(x, self.group_size, self.normalize).sum()

    def exact(self) -> torch.Tensor:
        """What is kept, without errors; of the size, strides and dtype in which it is restored."""
        recipe = self.recipe
        x = torch.empty_strided(
            recipe.size, recipe.stride, dtype=recipe.dtype, device=self.x.device
        )
        x.copy_(self.x)
        if self.normalize is not None:
            mean, rstd, inner = self.normalize
            rows = layout.storage_order(x).view(-1, len(rstd), inner)
            if mean is not None:
                rows.sub_(mean[:, None])
            rows.mul_(rstd[:, None])
        return x

    def errors(self, exact: torch.Tensor | None = None) -> torch.Tensor:
        """What backward would restore, minus what should be. exact: that of `exact`, if it is there."""
        if exact is None:
            exact = self.x if self.normalize is None else self.exact()
        return self.recipe.exactly(self.tensors).sub_(exact)


class Quantizer:
    """How a layer quantizes what it keeps; one object a layer, or shared by layers.

    bits: 1 to 8. group_size: a multiple of 32. minimum: "auto" (float32 where a tensor's offset asks for
    it), "bfloat16" or "float32". session: what the layers of a converted model share, or None. name: of the
    layer in there. average: bits where the model's policy shares them between samples (bits); is_fixed: whether
    that is not to change. fuse: norms keep fixed-point copies, which the layers after them share. Raises InputError
    for anything else.
    """

    def __init__(
        self,
        bits: int = DEFAULT_BITS,
        group_size: int = groups.GROUP_SIZE,
        minimum: str = "auto",
        session: Session | None = None,
        name: str = "",
        average: float | None = None,
        is_fixed: bool = True,
        fuse: bool = False,
    ):
        check_choice(bits, None)
        groups.check_group_size(group_size)
        if minimum not in ("auto", "bfloat16", "float32"):
            raise InputError(f"expected auto, bfloat16 or float32 for minimum, got {minimum!r}")
        self.bits = bits
        self.group_size = group_size
        self.minimum = minimum
        self.session = session
        self.name = name
        self.average = bits if average is None else average
        self.is_fixed = is_fixed
        self.fuse = fuse
        self._offset = MinDtypeSelector()

    def named(self, name: str) -> Quantizer:
        """One like it for another layer."""
        other = copy(self)
        other.name, other._offset = name, MinDtypeSelector()
        return other

    def keep_factor(self, x: torch.Tensor) -> SavedTensors:
        """`keep` for linear layers and convolutions: what a norm offers of x in fixed point will do."""
        session = self.offering
        if session is not None and session.fuses and is_eager(x):
            kept = session.offered(x)
            if kept is not None:
                return kept
        return self.keep(x)

    @property
    def offering(self) -> Session | None:
        """Where norms offer what they keep in fixed point, and the layers after them look for it.

        In a pre-activation block its own: of a layer that several blocks share, the quantizer is that of the last.
        """
        running = current()
        return running if running is not None and running.is_private else self.session

    def keep(self, x: torch.Tensor, shared: bool = True, slot: int = 0) -> SavedTensors:
        """A quantized copy of x, floating, any shape and strides.

        Of a transposed view, that of the tensor as it lies in memory. shared: one copy serves all who ask for
        x in a forward of the model. slot: a number for each of the layer's inputs.
        """
        order = layout.storage_permutation(x)
        if order is not None:
            kept = self.keep(x.permute(order), shared, slot)
            back = tuple(order.index(dim) for dim in range(x.dim()))
            return kept._replace(recipe=Permuted(kept.recipe, back))
        if not shared or self.session is None or not is_eager(x):
            return self._keep(x, x.dtype, slot)
        kept = self.session.find(x, self.key)
        activation = self.session.follows(x, self)
        if kept is None:
            kept = self._keep(x, x.dtype, slot, activation=activation)
            self.session.add(x, self.key, kept)
        elif self._policy is not None:
            kept = kept._replace(recipe=kept.recipe.used_by(self.name))
        return kept

    def keep_beside(self, x: torch.Tensor, *others: torch.Tensor) -> SavedTensors:
        """`keep`, rounded independently of what is kept of `others`, also where x is one of them.

        For layers that multiply restored values: a product is exact in expectation only of independent ones.
        """
        is_one = any(_is_one_memory(x, other) for other in others)
        return self.keep(x, not is_one, slot=len(others))

    def keep_normalized(self, x, mean, rstd, inner: int | None) -> SavedTensors:
        """A quantized copy, shared with nobody, of (x - mean) rstd, in float32 or better.

        mean (or None), rstd: of shapes that broadcast to x's. inner: if x's element number e in storage order,
        samples outermost, has statistics number (e div inner) mod how many there are; else None.
        """
        fits = inner is not None and layout.is_by_sample(x)
        if fits and is_plain(x) and rstd.dtype == torch.float32 and x.dtype != torch.float64:
            return self._keep(x, torch.float32, normalize=(flat(mean), flat(rstd), inner))
        given = x.dtype
        if mean is not None:
            x = x.to(rstd.dtype) - mean
        x = (x * rstd).to(torch.promote_types(rstd.dtype, torch.float32))
        return self._keep(x, x.dtype, given=given)

    def _keep(self, x, dtype, slot=0, normalize=None, activation=None, given=None) -> SavedTensors:
        """x, or what `normalize` makes of it, to be restored in dtype. activation: number of that which made x.

        given: the dtype of what the layer got, where that is not x.
        """
        if not is_plain(x):
            return self._traced(x)
        wide, ask = self._wide(), False
        if wide is None and x.is_cuda:
            wide, ask = self._on_device()
        settings = self.group_size, wide, normalize
        seed = self._seed(x, slot, activation)
        if self._policy is None:
            tensors = quantizer_ops.quantize(x, seed, self.bits, *settings)
            recipe = self._recipe(x, dtype, self.bits)
        else:
            tensors, recipe = self._keep_slot(x, seed, dtype, slot, settings, given or x.dtype)
        offload.mark(*tensors)
        if ask:
            self._offset.ask(tensors[1])
        return SavedTensors(tensors, recipe)

    def _keep_slot(self, x, seed, dtype, slot, settings, given):
        assignment = self.session.assignment(x)
        tensor_slot = assignment.slot((self.name, slot), self.average, self.is_fixed)
        samples = assignment.samples_of(x, self.name if slot == 0 else "")
        bits, sensitivities = tensor_slot.uniform(), None
        recipe = self._recipe(x, dtype, bits, samples, tensor_slot)
        keeper = assignment.codec(tensor_slot)
        if keeper is not None:
            tensors, recipe = _kept_by(keeper, x, seed, recipe, settings, given)
            if samples is not None and assignment.probe is not None:
                sensitivities = quantizer_ops.sensitivities(x, tensor_slot, samples, *settings)
        elif samples is None:
            tensors = quantizer_ops.quantize(x, seed, bits, *settings)
        else:
            *tensors, sensitivities = quantizer_ops.quantize_samples(
                x, seed, tensor_slot, samples, *settings
            )
        probe = assignment.probe
        if x.numel() and (probe is not None or assignment.unobserved):
            self._report_unobserved(assignment, tensor_slot)
        if probe is not None and x.numel() and not in_backward():
            widening = 0
            if self.minimum == "auto" and keeper is None:
                widening = groups.widening(tensors[1])
            rounded = Rounded(x.detach(), tuple(tensors), recipe, *settings)
            # Nothing here is to be replaced: the mode of functions would be asked often.
            with torch._C.DisableTorchFunction():
                probe.record_saved(tensor_slot, x.numel(), sensitivities, widening)
                found = probe.record_rounding(tensor_slot, rounded)
            recipe = recipe.with_slot(tensor_slot._replace(rounding=found))
        return tuple(tensors), recipe

    def _report_unobserved(self, assignment, slot) -> None:
        """Tell the policy if the forward pass has no probe, or its probe has not seen the tensor that is saved now."""
        reason, probe = assignment.unobserved, assignment.probe
        if probe is not None and in_backward() and not probe.knows(slot.name):
            reason = REENTRANT
        if reason and not slot.is_fixed:
            self._policy.report_unobserved(self.name, reason)

    @property
    def _policy(self):
        """The model's policy, or None if bits are fixed."""
        return None if self.session is None else self.session.policy

    def _on_device(self) -> tuple[bool, bool]:
        """Whether a tensor on a GPU has float32 minimums, and whether to ask on its account for later ones."""
        if in_checkpoint():
            return True, False  # what is made again must be alike, whatever has arrived meanwhile
        return self._offset.poll(), True

    def with_result(self, run, y) -> tuple | None:
        """(codes, Kept of y or None) of an activation that makes its result y and quantizes it in one pass.

        run(seed, bits, group_size, wide): writes y; returns codes and (packed, ranges, spread), or None where
        it cannot. y: a plain tensor, samples outermost. Of a tensor with a large offset nothing is kept here.
        """
        if self._policy is not None:
            return None
        seed = self.session.seed_of_result(y, self.key)
        made = run(seed, self.bits, self.group_size, self.minimum == "float32")
        if made is None:
            return None
        codes, (packed, ranges, spread) = made
        if self.minimum == "auto" and quantizer_ops.is_offset(*spread):
            return codes, None
        offload.mark(packed, ranges)
        return codes, SavedTensors((packed, ranges), self._recipe(y, y.dtype, self.bits))

    @property
    def key(self) -> tuple:
        """Layers with equal keys can share what they keep."""
        bits = self.bits
        if self._policy is not None:
            bits = self.average if self.is_fixed else None
        return bits, self.group_size, self.minimum

    def _traced(self, x) -> SavedTensors:
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_tell_traced)
        recipe = self._recipe(x, x.dtype, self.bits)
        packed, ranges, one = quantizer_ops.quantize_op(
            x, recipe.stride, ops.new_seed(x), self.bits, self.group_size, bool(self._wide())
        )
        one = None if is_abstract(x) else one
        return SavedTensors((packed, ranges), recipe, one)

    def _recipe(self, x, dtype, bits, *rest) -> QuantizedTensorSpec:
        stride = layout.by_sample_stride(x)
        return QuantizedTensorSpec(
            bits, self.group_size, tuple(x.shape), tuple(stride), dtype, *rest
        )

    def _seed(self, x, slot, activation):
        if self.session is None:
            return ops.new_seed(x)
        if activation is None:
            return self.session.seed(x, self.name, slot)
        return self.session.seed_of_result(x, self.key, activation)

    def _wide(self) -> bool | None:
        return None if self.minimum == "auto" else self.minimum == "float32"

    def __repr__(self) -> str:
        parts = [f"bits={self.bits}"]
        if self.group_size != groups.GROUP_SIZE:
            parts.append(f"group_size={self.group_size}")
        if self.minimum != "auto":
            parts.append(f"minimum={self.minimum!r}")
        return ", ".join(parts)


def _kept_by(keeper: Keeper, x, seed, recipe: QuantizedTensorSpec, settings, given):
    """(tensors, recipe). What is normalized is kept in the dtype of what it was made from, which is as fine."""
    _, _, normalize = settings
    values = x.detach()
    if normalize is not None:
        values = Rounded(values, (), recipe, *settings).exact()
    tensors, inner = keeper.keep(values.to(given), seed)
    return tuple(tensors), CodecSpec(inner, recipe)


def _tell_traced(context) -> None:
    """Runs while torch.compile traces `Quantizer._traced`, and leaves nothing in what it makes.

    context: a ComptimeContext. Where there are other compilers, or later ones keep locals otherwise, nothing is told.
    """
    own = context.get_local("self")
    tracked = getattr(own, "_i_will_not_complain_if_bc_breaks_VariableTracker", lambda: None)()
    quantizer = getattr(tracked, "value", None)
    if not isinstance(quantizer, Quantizer) or "session" not in vars(quantizer):
        return  # one that is made in what is traced is not there yet
    if quantizer._policy is not None and not quantizer.is_fixed:
        quantizer._policy.report_unobserved(quantizer.name, COMPILED)


def _is_one_memory(x, other) -> bool:
    if not (is_eager(x) and is_eager(other)):
        return False
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata


def flat(vector):
    """Its entries as the kernels take them."""
    return None if vector is None else vector.detach().reshape(-1).to(torch.float32).contiguous()


def _is_ordinary(x) -> bool:
    return not (x.is_complex() or x.is_nested) and x.layout is torch.strided


@lru_cache(maxsize=256, typed=True)  # 2.0 is not 2, and True is not 1
def quantizer_of(bits: int, group_size: int) -> Quantizer:
    """The Quantizer of a functional call. Raises InputError for bad bits or group_size."""
    return Quantizer(bits, group_size)


def is_differentiated(*tensors) -> bool:
    """Whether a layer of those inputs has anything to keep, in a mode in which ours can run.

    torch.func's transforms and torch.jit.trace see torch's own layer.
    """
    if not torch.is_grad_enabled():
        return False
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return False
    if not all(tensor is None or _is_ordinary(tensor) for tensor in tensors):
        return False
    if torch.compiler.is_compiling():
        return True
    check_not_distributed(*tensors)
    return torch._C._functorch.maybe_current_level() is None and not torch.jit.is_tracing()
