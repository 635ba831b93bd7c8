"""The function modes of the two runs of a checkpointed region (docs/guides/checkpointing.md, "Decisions" and "State").

The second run takes the *decisions* that the first run recorded, integers, booleans or Python numbers computed from
floating tensors, and writes the *state*, tensors that existed before the region, to a copy of the earlier values.
"""

from __future__ import annotations

import copy
import sys
import threading
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fewbit.errors import GradientError
from fewbit.runtime.interop.bypass import ReplacingMode, run_outside
from fewbit.runtime.interop.checkpoint import (
    checkpoint_hook,
    outside_dispatch_modes,
    reentrant_region,
)
from fewbit.runtime.interop.module_calls import leave_to_interpreter
from fewbit.runtime.interop.tensor_kinds import has_memory, is_plain
from fewbit.runtime.quantizers import copies, integers
from fewbit.runtime.quantizers.spec import SavedTensors
from fewbit.runtime.regions import function_kinds

_WAY_OUT = "; use torch.utils.checkpoint.checkpoint for this region"
_PACKED = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
_WRAPPERS = frozenset(
    (
        "torch.overrides torch.nn.functional torch.functional torch._tensor torch._ops fewbit.convert.function_mode "
        "fewbit.runtime.regions.runs"
    ).split()
)
"""Modules whose functions call functions of torch for their callers."""


class Decision(NamedTuple):
    """The record of what a function returned in the first run.

    Args:
        value: a Python value; or, if the function drew the tensors that it returned, the state of torch's generator
            afterwards; or None.
        count: the number of recorded tensors.
    """

    name: str
    value: object
    count: int


class _RegionMode(ReplacingMode):
    is_region = True

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return self.call(function, function_kinds.kind_of(function), args, kwargs)

    def choose(self, function, dim, args, kwargs):
        """Call a function of kind CHOOSES. Its values are gathered by `decided` indices, also in the backward pass."""
        x = args[0] if args else kwargs["input"]
        with torch.no_grad():
            found = function(*args, **kwargs)
        values, indices = found
        (indices,) = self.decided(function, (indices,), x.size(dim) if x.dim() else 1)
        if x.requires_grad or indices is not found[1]:
            wide = indices if indices.dim() == x.dim() else indices.unsqueeze(dim)
            # torch's own function, because fewbit's, which a compressed model calls, may be replaced in one run only.
            with (
                nullcontext() if x.requires_grad else outside_dispatch_modes(),
                torch._C.DisableTorchFunction(),
            ):
                values = x.gather(dim, wide).view(indices.shape)
        return type(found)((values, indices))

    def draw_one_hot(self, function, logits, tau=1, hard=False, eps=1e-10, dim=-1):
        """Compute gumbel_softmax, with an index that the second run can use again."""
        soft = function(logits, tau, False, eps, dim)
        if not hard:
            return soft
        index = soft.detach().max(dim, keepdim=True).indices
        (index,) = self.decided(function, (index,), soft.size(dim))
        return torch.zeros_like(soft).scatter_(dim, index, 1.0) - soft.detach() + soft


leave_to_interpreter(_RegionMode.__torch_function__.__code__, with_callees=True)


class FirstRun(_RegionMode):
    """The mode of the first run, which records decisions, and the state from before its first change.

    Args:
        decides: whether decisions are recorded. If no input is rounded, the second run decides alike by itself.
        preserves: whether the second run draws the random numbers of the first run.

    Attributes:
        count: the number of tensors of all decisions.
        state: {number of a storage that has changed: the storage}. The references keep the numbers from being reused.
    """

    def __init__(self, decides: bool, preserves: bool):
        super().__init__()
        self.decides, self._preserves = decides, preserves
        self.decisions, self.state, self.count = [], {}, 0
        self._tensors, self._earlier = (
            [],
            [],
        )  # SavedTensors of decisions, and of the memory in `state`
        self._made = set()  # storages of tensors without gradients that the region has made

    def call(self, function, kind, args, kwargs):
        for tensor in function_kinds.written(function, args, kwargs):
            self.keep(tensor)
        if kind == function_kinds.NEUTRAL:
            result = function(*args, **kwargs)
            self._note(result, args, kwargs)
            return result
        if self.decides:
            if kind == function_kinds.CHOOSES:
                dim = function_kinds.chosen_dim(function, args, kwargs)
                if dim is not None and _decides(args, kwargs):
                    return self.choose(function, dim, args, kwargs)
            elif kind == function_kinds.DRAWS_ONE_HOT:
                return self.draw_one_hot(function, *args, **kwargs)
            elif kind == function_kinds.DRAWS_SLOPES and function_kinds.draws_slopes(
                function, args, kwargs
            ):
                raise _drawn(function)
        result = function(*args, **kwargs)
        if kind == function_kinds.READS:
            if self.decides and _decides(args, kwargs):
                self._add(function, copy.deepcopy(result), 0)
            return result
        self._note(result, args, kwargs)
        if self.decides:
            values = _decided_values(function, result, args, kwargs)
            if values and _decides(args, kwargs):
                self.decided(function, values, function_kinds.index_count(function, args, kwargs))
        return result

    def decided(self, function, values, count):
        """Record the tensors that a function returned, whose integers are below `count` if known, and return them."""
        with _recording():
            self._tensors += [_packed(value, count) for value in values]
        self.count += len(values)
        on_cpu = self._preserves and values[0].device.type == "cpu"
        draws = on_cpu and function_kinds.name_of(function) in function_kinds.DRAWS
        self._add(function, torch.get_rng_state() if draws else None, len(values))
        return values

    def _add(self, function, value, count: int) -> None:
        hook, context = _innermost.region
        # Within other hooks on saved tensors, which the region may use, `checkpoint_hook` is None.
        if (checkpoint_hook() or hook, reentrant_region()) != (hook, context):
            raise GradientError(
                "fewbit.checkpoint: a decision within torch.utils.checkpoint.checkpoint cannot be repeated from rounded "
                "inputs; use fewbit.checkpoint for the inner region too, or torch's function for the outer one"
            )
        self.decisions.append(Decision(function_kinds.name_of(function), value, count))

    def keep(self, tensor) -> None:
        """Keep a copy of the memory of a tensor that is about to change, if it is older than the region."""
        with _recording():
            # A tensor with a `grad_fn` was computed in this step, and a parameter gets no copy.
            if not has_memory(tensor) or tensor.grad_fn is not None or tensor.requires_grad:
                return
            storage = tensor.untyped_storage()
            number = storage._cdata
            if number not in self._made and number not in self.state:
                self.state[number] = storage
                self._earlier.append(copies.unquantized(_bytes_of(storage).clone()))

    def kept(self) -> list[SavedTensors]:
        """Return what the second run needs: the tensors of decisions, then the earlier state."""
        return [*self._tensors, *self._earlier]

    def forget(self) -> None:
        self._tensors, self._earlier, self._made = [], [], set()

    def _note(self, result, args, kwargs) -> None:
        if type(result) is not Tensor:
            if type(result) in (tuple, list):
                for item in result:
                    self._note(item, args, kwargs)
            return
        if result.requires_grad:
            return
        with torch._C.DisableTorchFunction():
            if not has_memory(result):
                return
            number = result.untyped_storage()._cdata
            given = function_kinds.tensors_in((*args, *kwargs.values()))
            if all(not has_memory(x) or x.untyped_storage()._cdata != number for x in given):
                self._made.add(number)

    def run_layer(self, function, args, kwargs):
        buffers = getattr(args[0], "_buffers", None) if args else None
        if buffers and args[0].training:
            for tensor in function_kinds.tensors_in(buffers.values()):
                self.keep(tensor)
        return run_outside(function, *args, **kwargs)


class Rerun(_RegionMode):
    """The mode of the second run.

    Args:
        run: the mode of the first run.
        saved: a list of (spec, tensors), in the order of `FirstRun.kept`.
    """

    def __init__(self, run: FirstRun, saved: list):
        super().__init__()
        self._decisions = iter(run.decisions)
        self._tensors = iter(saved[: run.count])
        states = zip(run.state, saved[run.count :], strict=True)
        self._memory = {number: _value(*kept).clone().untyped_storage() for number, kept in states}
        self._decides = run.decides

    def call(self, function, kind, args, kwargs):
        if self._memory:
            args = tuple(map(self._own, args))
            kwargs = {name: self._own(value) for name, value in kwargs.items()}
        if not torch.is_grad_enabled():
            args = self._without_parameters(function, args)
        if kind == function_kinds.NEUTRAL or not self._decides:
            return function(*args, **kwargs)
        if kind == function_kinds.CHOOSES:
            dim = function_kinds.chosen_dim(function, args, kwargs)
            if dim is not None and _decides(args, kwargs):
                return self.choose(function, dim, args, kwargs)
        elif kind == function_kinds.DRAWS_ONE_HOT:
            return self.draw_one_hot(function, *args, **kwargs)
        result = function(*args, **kwargs)
        if kind == function_kinds.READS:
            # A copy, because the region may change it, and the next backward pass needs it too.
            return copy.deepcopy(self._next(function).value) if _decides(args, kwargs) else result
        values = _decided_values(function, result, args, kwargs)
        if not values or not _decides(args, kwargs):
            return result
        decided = self.decided(function, values, None)
        is_changed = any(values[0] is value for value in (*args, *kwargs.values()))
        if is_changed or (values[0].requires_grad and values[0].shape == decided[0].shape):
            with outside_dispatch_modes(), torch._C.DisableTorchFunction():
                values[0].data.copy_(decided[0])
            return result
        if isinstance(result, Tensor):
            return decided[0]
        recorded = {id(value): first for value, first in zip(values, decided, strict=False)}
        return type(result)([recorded.get(id(x), x) for x in result])

    def decided(self, function, values, count):
        decision = self._next(function)
        found = []
        with outside_dispatch_modes(), torch._C.DisableTorchFunction():
            for _, value in zip(range(decision.count), values, strict=False):
                recorded = _value(*next(self._tensors))
                if recorded.shape != value.shape and not function_kinds.may_differ_in_size(
                    function
                ):
                    raise _diverged(function, tuple(recorded.shape), tuple(value.shape))
                found.append(recorded)
            if decision.value is not None:
                torch.set_rng_state(decision.value)
        return found

    def _next(self, function) -> Decision:
        decision = next(self._decisions, None)
        name = function_kinds.name_of(function)
        if decision is None or decision.name != name:
            raise _diverged(function, None if decision is None else decision.name, name)
        return decision

    def _own(self, value):
        if type(value) in (list, tuple):
            return type(value)(map(self._own, value))
        if not isinstance(value, Tensor):
            return value
        with outside_dispatch_modes(), torch._C.DisableTorchFunction():
            if value.requires_grad or not has_memory(value):
                return value
            memory = self._memory.get(value.untyped_storage()._cdata)
            if memory is None:
                return value
            place = value.storage_offset(), value.shape, value.stride()
            return torch.empty(0, dtype=value.dtype, device=value.device).set_(memory, *place)

    def _without_parameters(self, function, args):
        """Return the arguments of a call with a copy of the parameter that the call would change a second time."""
        changed = [
            x for x in function_kinds.written(function, args, {}) if x.requires_grad and x.is_leaf
        ]
        if not changed:
            return args
        with outside_dispatch_modes(), torch._C.DisableTorchFunction():
            return tuple(x.detach().clone() if any(x is y for y in changed) else x for x in args)

    def run_layer(self, function, args, kwargs):
        """Call the forward of a layer with copies of its state."""
        layer = args[0] if args else None
        if self._memory and isinstance(layer, nn.Module) and layer._buffers:
            own = object.__new__(type(layer))
            buffers = {name: self._own(value) for name, value in layer._buffers.items()}
            vars(own).update(vars(layer), _buffers=buffers)
            args = own, *args[1:]
        return run_outside(function, *args, **kwargs)


class _Innermost(threading.local):
    """The hook and context of the innermost region of fewbit that this thread runs."""

    region = None


_innermost = _Innermost()


@contextmanager
def entered(mode: _RegionMode):
    """Run the block with a mode of this file on torch's stack."""
    depth, outer = torch._C._len_torch_function_stack(), _innermost.region
    _innermost.region = checkpoint_hook(), reentrant_region()
    torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        _innermost.region = outer
        while torch._C._len_torch_function_stack() > depth:
            torch._C._pop_torch_function_stack()


@contextmanager
def _recording():
    with (
        outside_dispatch_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


def _decides(args, kwargs) -> bool:
    """Return whether a call, not by fewbit's own code, gets a floating tensor and returns none."""
    given = function_kinds.tensors_in((*args, *kwargs.values()))
    if not any(x.is_floating_point() or x.is_complex() for x in given):
        return False
    frame = sys._getframe(3)
    while frame.f_globals.get("__name__") in _WRAPPERS:
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith("fewbit.")


def _decided_values(function, result, args, kwargs) -> tuple[Tensor, ...]:
    """Return the decisions among the tensors that a call has returned, or to which it has assigned elements."""
    result = function_kinds.assigned(function, args) if result is None else result
    results = (result,) if isinstance(result, Tensor) else result
    if not isinstance(results, list | tuple) or not all(isinstance(x, Tensor) for x in results):
        return ()
    if function_kinds.is_all_decided(function, args, kwargs):
        return tuple(results)
    return tuple(x for x in results if not (x.is_floating_point() or x.is_complex()))


def _packed(values: Tensor, count: int | None) -> SavedTensors:
    """Return a copy of integers or booleans, in few bits per element if that can be told at once."""
    if torch._C._functorch.is_functorch_wrapped_tensor(values):
        raise GradientError(
            "fewbit.checkpoint: a decision within torch.func.vmap cannot be repeated from rounded inputs"
            + _WAY_OUT
        )
    values, dtype = values.detach(), values.dtype
    if values.is_floating_point() and count == 2:
        values = values.bool()
    is_small = values.numel() * values.element_size() <= 4
    if not is_plain(values) or is_small or values.dtype not in _PACKED:
        return copies.unquantized(values.to(dtype, copy=True))
    if values.dtype is torch.bool:
        count = 2
    elif count is None and values.device.type == "cpu":  # a GPU would have to wait
        low, high = values.aminmax()
        count = int(high) + 1 if low >= 0 else None
    if count is None:
        return copies.unquantized(values.clone())
    saved = integers.pack(values, max(count, 2))
    return SavedTensors(saved.tensors, integers.CastSpec(saved.spec, dtype))


def _value(spec, tensors) -> Tensor:
    value = spec.dequantize(tensors)
    return value.clone() if value is tensors[0] else value


def _diverged(function, first, second) -> GradientError:
    return GradientError(
        f"fewbit.checkpoint: expected the region to decide in both runs alike, got {first} in the first run and {second} "
        f"in the second, at torch's function {function_kinds.name_of(function)}" + _WAY_OUT
    )


def _drawn(function) -> GradientError:
    return GradientError(
        f"fewbit.checkpoint: torch's function {function_kinds.name_of(function)} draws a random number for each negative element of "
        "its input, so the second run would draw others from rounded inputs" + _WAY_OUT
    )


def _bytes_of(storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
