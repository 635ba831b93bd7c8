"""What a layer keeps of a tensor: `Quantizer.keep` in forward, `QuantizedTensorSpec.restore` in backward."""

from __future__ import annotations

from copy import copy
from functools import lru_cache

import torch

from fewbit.errors import InputError
from fewbit.runtime.activations.tables import check_choice
from fewbit.runtime.format import groups, layout
from fewbit.runtime.interop.checkpoint import in_backward, in_checkpoint
from fewbit.runtime.interop.compiler_tracing import notify_traced
from fewbit.runtime.interop.tensor_kinds import (
    check_not_distributed,
    is_abstract,
    is_eager,
    is_plain,
)
from fewbit.runtime.ops import library, quantizer_ops
from fewbit.runtime.quantizers.codec import CodecSpec, Keeper
from fewbit.runtime.quantizers.spec import (
    Permuted,
    QuantizedTensorSpec,
    Rounded,
    SavedTensors,
    flat,
)
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.assignment import COMPILED, REENTRANT
from fewbit.runtime.saved.context import ForwardContext, current
from fewbit.runtime.saved.min_dtype import MinDtypeSelector

DEFAULT_BITS = 2


class Quantizer:
    """How a layer quantizes what it keeps; one object a layer, or shared by layers.

    bits: 1 to 8. group_size: a multiple of 32. minimum: "auto" (float32 where a tensor's offset asks for
    it), "bfloat16" or "float32". context: what the layers of a converted model share, or None. name: of the
    layer in there. average: bits where the model's variables share them between samples (bits); is_fixed: whether
    that is not to change. fuse: norms keep fixed-point copies, which the layers after them share. Raises InputError
    for anything else.
    """

    def __init__(
        self,
        bits: int = DEFAULT_BITS,
        group_size: int = groups.GROUP_SIZE,
        minimum: str = "auto",
        context: ForwardContext | None = None,
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
        self.context = context
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
        context = self.offering
        if context is not None and context.cache.has_fixed_point and is_eager(x):
            context.record_save()
            kept = context.cache.get_fixed_point(x)
            if kept is not None:
                return kept
        return self.keep(x)

    @property
    def offering(self) -> ForwardContext | None:
        """Where norms offer what they keep in fixed point, and the layers after them look for it.

        In a pre-activation block its own: of a layer that several blocks share, the quantizer is that of the last.
        """
        running = current()
        return running if running is not None and running.is_private else self.context

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
        if not shared or self.context is None or not is_eager(x):
            return self._keep(x, x.dtype, slot)
        context = self.context
        context.record_save()
        kept = context.cache.get(x, self.key)
        activation = context.cache.record_consumer(x, self)
        if kept is None:
            kept = self._keep(x, x.dtype, slot, activation=activation)
            context.cache.put(x, self.key, kept)
        elif self._variables is not None:
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
        if self._variables is None:
            tensors = quantizer_ops.quantize(x, seed, self.bits, *settings)
            recipe = self._recipe(x, dtype, self.bits)
        else:
            tensors, recipe = self._keep_variable(x, seed, dtype, slot, settings, given or x.dtype)
        offload.mark(*tensors)
        if ask:
            self._offset.ask(tensors[1])
        return SavedTensors(tensors, recipe)

    def _keep_variable(self, x, seed, dtype, slot, settings, given):
        plan = self.context.assignment(x)
        variable = plan.of((self.name, slot), self.average, self.is_fixed)
        samples = plan.samples_of(x, self.name if slot == 0 else "")
        bits, sensitivities = variable.uniform(), None
        recipe = self._recipe(x, dtype, bits, samples, variable)
        keeper = plan.keeper(variable)
        if keeper is not None:
            tensors, recipe = _kept_by(keeper, x, seed, recipe, settings, given)
            if samples is not None and plan.observation is not None:
                sensitivities = quantizer_ops.sensitivities(x, variable, samples, *settings)
        elif samples is None:
            tensors = quantizer_ops.quantize(x, seed, bits, *settings)
        else:
            *tensors, sensitivities = quantizer_ops.quantize_samples(
                x, seed, variable, samples, *settings
            )
        observation = plan.observation
        if x.numel() and (observation is not None or plan.unobserved):
            self._tell_unobserved(plan, variable)
        if observation is not None and x.numel() and not in_backward():
            widening = 0
            if self.minimum == "auto" and keeper is None:
                widening = groups.widening(tensors[1])
            rounded = Rounded(x.detach(), tuple(tensors), recipe, *settings)
            # Nothing here is to be replaced: the mode of functions would be asked often.
            with torch._C.DisableTorchFunction():
                observation.kept(variable, x.numel(), sensitivities, widening)
                found = observation.rounding(variable, rounded)
            recipe = recipe.of(variable._replace(rounding=found))
        return tuple(tensors), recipe

    def _tell_unobserved(self, plan, variable) -> None:
        """Where what is kept now is not what the forward's observation has seen, or there is none."""
        why, seen = plan.unobserved, getattr(plan.observation, "variables", None)
        if seen is not None and in_backward() and variable.name not in seen:
            why = REENTRANT
        if why and not variable.is_fixed:
            self._variables.unobserved(self.name, why)

    @property
    def _variables(self):
        """Those of the model, or None where bits are fixed."""
        return None if self.context is None else self.context.policy

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
        if self._variables is not None:
            return None
        seed = self.context.seed_of_result(y, self.key)
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
        if self._variables is not None:
            bits = self.average if self.is_fixed else None
        return bits, self.group_size, self.minimum

    def _traced(self, x) -> SavedTensors:
        notify_traced(self)
        recipe = self._recipe(x, x.dtype, self.bits)
        packed, ranges, one = quantizer_ops.quantize_op(
            x, recipe.stride, library.new_seed(x), self.bits, self.group_size, bool(self._wide())
        )
        one = None if is_abstract(x) else one
        return SavedTensors((packed, ranges), recipe, one)

    def was_traced(self) -> None:
        """Tell the policy that the layer runs inside torch.compile, which no probe sees."""
        # A quantizer that is made in the traced code has no attributes yet.
        if "context" in vars(self) and self._variables is not None and not self.is_fixed:
            self._variables.unobserved(self.name, COMPILED)

    def _recipe(self, x, dtype, bits, *rest) -> QuantizedTensorSpec:
        stride = layout.by_sample_stride(x)
        return QuantizedTensorSpec(
            bits, self.group_size, tuple(x.shape), tuple(stride), dtype, *rest
        )

    def _seed(self, x, slot, activation):
        if self.context is None:
            return library.new_seed(x)
        if activation is None:
            return self.context.seed(x, self.name, slot)
        return self.context.seed_of_result(x, self.key, activation)

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


def _is_one_memory(x, other) -> bool:
    if not (is_eager(x) and is_eager(other)):
        return False
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata


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
