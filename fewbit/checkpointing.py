"""Gradient checkpointing whose regions save their inputs quantized.

The recomputation starts from rounded inputs. A region is not linear in these, so gradients differ slightly, and not only by noise.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import copy
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from fewbit.config import (
    GROUP_SIZE,
    ROTATED,
    check_bits,
    check_group_size,
    usual_kind,
)
from fewbit.errors import InputError
from fewbit.printable import shorten
from fewbit.runtime.format.channels import channels_of, usual_features
from fewbit.runtime.format.groups import LEAST_ELEMENTS
from fewbit.runtime.format.tensor_checks import FLOATING
from fewbit.runtime.interop.checkpoint import outside_dispatch_modes
from fewbit.runtime.interop.own_forward import OwnForward
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.ops import library
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.spec import SavedTensors, in_storage_order
from fewbit.runtime.regions.buffers import Buffers
from fewbit.runtime.regions.runs import FirstRun, Rerun, entered
from fewbit.runtime.saved.context import current
from fewbit.runtime.saved.offload import Offload
from fewbit.runtime.saved.seeds import purpose

Result = TypeVar("Result")

__all__ = ["checkpoint", "checkpoint_", "uncheckpoint_"]

_ENABLE = "activation_checkpointing_enable", "gradient_checkpointing_enable"
"""The method of models of transformers, with its new and its old name."""
CHECKPOINTING = "gradient_checkpointing", "_gradient_checkpointing_func"
"""The attributes of a layer of transformers that say whether it is a region, and by which function it is called."""
_HOOKS = "respect_saved_tensors_hooks"
_HAS_HOOKS = _HOOKS in signature(torch_checkpoint).parameters
_OPTIONS = "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", _HOOKS
"""The arguments of torch's function, other than `preserve_rng_state`."""
_CHECKS = "default", "none"
_DICTS = dict, OrderedDict, defaultdict
_CONTAINERS = list, tuple, *_DICTS
BOUNDARIES = Offload(ahead=1)
"""Moves the quantized inputs of regions to the host. `ahead` is 1: a whole region hides the transfer."""


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    bits: int | None = 8,
    group_size: int = GROUP_SIZE,
    offload: bool = False,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Result:
    """Compute function(*args, **kwargs), save the inputs quantized, and compute it again in the backward pass.

    The result is that of torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs). Floating
    tensors among `args` that need a gradient and have at least 1024 elements are quantized; other arguments, tensors in
    containers, `kwargs` and parameters are saved as they are. Outside a converted model, the seed of the rounding is drawn
    from torch's generator first, so dropout draws other masks than with torch's function. In compiled code, torch's own
    function runs, and nothing is quantized. Arguments that are not listed are those of torch's function.

    The second run gets lists and dicts among `args` as they were before the first. It decides as the first run did: integers,
    booleans and Python numbers that the region computes from floating tensors are recorded. It changes no buffers, such as running
    statistics, and reads the values that these had in the first run. Neither holds for code that is compiled within the region.

    Args:
        function: the region, a function or module, called with `args` and `kwargs`.
        bits: the bits per element, 1 to 8. With fewer than 8 bits, look at the error of the gradients first
            (docs/concepts/layers.md). None: torch's own function runs, and the inputs are saved as they are.
        group_size: the number of elements in a group (docs/concepts/quantizer.md), a multiple of 32.
        offload: whether the quantized inputs of a GPU, except those of the last region, are in the host's memory until the backward pass
            needs them. A side stream copies them.
        use_reentrant: False or None. The reentrant variant of torch's function is refused.
        preserve_rng_state: as in torch. It must be False while a CUDA graph is recorded.
        context_fn: as in torch. It may be a selective policy, functools.partial(create_selective_checkpoint_contexts, policy).
        respect_saved_tensors_hooks: as in torch 2.14, whether tensors that a selective policy saves pass through the hooks
            around the region. None stands for True; before 2.14 they do not pass.

    Raises:
        InputError: `function` cannot be called, or an argument is invalid.
        GradientError: a second run from rounded inputs cannot repeat the region's decisions: it calls `rrelu` in training mode, decides
            within vmap or within torch.utils.checkpoint.checkpoint, or, in the backward pass, at other places than in the first run.
    """
    if not callable(function):
        raise InputError(f"function: expected a function or module, got {type(function).__name__}")
    _check(bits, group_size, offload)
    options = _torch_options(
        use_reentrant,
        respect_saved_tensors_hooks,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
    )
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch_checkpoint(function, *args, **options, **kwargs)
    if any(type(x) in _CONTAINERS for x in args):
        function = _AsBefore(function, args)
    if bits is None:
        return torch_checkpoint(function, *args, **options, **kwargs)
    region = _CheckpointedRegion(function, args, bits, group_size, preserve_rng_state, offload)
    # torch restores the random states of the devices of the tensors that it is given, and would save the arguments.
    devices = dict.fromkeys(x.device for x in tree_leaves(args) if isinstance(x, Tensor))
    flags = (torch.empty(0, device=device) for device in devices)
    result = torch_checkpoint(region, *flags, **options, **kwargs)
    region.finish()
    return result


def checkpoint_(
    model: nn.Module,
    bits: int | None = 8,
    group_size: int = GROUP_SIZE,
    preserve_rng_state: bool = True,
    *,
    include: str | Iterable[str] | None = None,
    offload: bool = False,
    **options: Any,
) -> None:
    """Make modules of a model checkpointed regions, in place, with `checkpoint` in place of torch's function.

    Without `include`, the model is one of transformers, and the layers that ``model.gradient_checkpointing_enable()``
    checkpoints save their inputs quantized; ``model.gradient_checkpointing_disable()`` undoes this. With `include`, any
    model's modules of these names change, so several calls may give modules different bits; `uncheckpoint_` undoes this.
    The model may be compressed before or after. Other arguments are those of `checkpoint`.

    Args:
        include: one or several glob patterns of dotted module paths, such as ``"layers.*"``. Each module that matches
            becomes a region, but not the modules inside it.

    Raises:
        InputError: an argument is invalid, `include` matches no module, or there is no `include` and the model has no method
            `gradient_checkpointing_enable`.
    """
    _check(bits, group_size, offload)
    unknown = ", ".join(options.keys() - set(_OPTIONS))
    if unknown:
        raise InputError(f"expected arguments among {', '.join(_OPTIONS)}, got {unknown}")
    _torch_options(**options)
    options = {
        "group_size": group_size,
        "preserve_rng_state": preserve_rng_state,
        "offload": offload,
        **options,
    }
    function = partial(checkpoint, bits=bits, **options)
    if include is not None:
        for module in _matching(model, include):
            _make_region(module, function)
        return
    enable = _enabling(model)
    if enable is None:
        raise InputError(
            f"expected a model of transformers that supports gradient checkpointing, got {type(model).__name__}; "
            "name the regions of other models, as include='blocks.*', or call fewbit.checkpoint in their forward"
        )
    enable()
    for module in model.modules():
        if hasattr(module, CHECKPOINTING[1]):
            setattr(module, CHECKPOINTING[1], function)


def uncheckpoint_(model: nn.Module) -> None:
    """Undo all calls of `checkpoint_`, in place."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _RegionForward):
            forward.remove()
        if getattr(vars(module).get(CHECKPOINTING[1]), "func", None) is checkpoint:
            delattr(module, CHECKPOINTING[1])
            # Many models have the attribute from their __init__, and read it in each forward pass.
            setattr(module, CHECKPOINTING[0], False)


def _matching(model: nn.Module, include) -> list[nn.Module]:
    """Return the modules that `include` names, without those inside of others."""
    patterns = (include,) if isinstance(include, str) else include
    patterns = tuple(patterns) if isinstance(patterns, Iterable) else None
    if patterns is None or not all(isinstance(each, str) for each in patterns):
        raise InputError(f"include: expected a glob or several, got {shorten(include)}")
    found, used = {}, set()
    for path, module in model.named_modules():
        matching = [pattern for pattern in patterns if fnmatchcase(path, pattern)]
        used.update(matching)
        is_inside = any(path.startswith(f"{outer}.") for outer in found) or "" in found
        if matching and not is_inside:
            found[path] = module
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused or not found:
        got = shorten(unused[0]) if unused else "none"
        raise InputError(f"include: expected a glob that matches a module, got {got}")
    containers = [path for path, module in found.items() if not _has_forward(module)]
    if containers:
        raise InputError(
            f"include: expected modules with a forward, got {containers[0]!r}, a {type(found[containers[0]]).__name__}; "
            f"name its parts, as {containers[0] + '.*'!r}"
        )
    return list(found.values())


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _make_region(module: nn.Module, function: Callable) -> None:
    if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__):
        # A layer of transformers calls the function itself, and keeps its cache of keys and values out of the region.
        setattr(module, CHECKPOINTING[0], True)
        setattr(module, CHECKPOINTING[1], function)
        return
    _RegionForward(module, function).put()


class _RegionForward(OwnForward):
    """The forward of a module that is a region. As in newer versions of transformers, hooks stay outside of the region."""

    def __init__(self, module: nn.Module, function: Callable):
        super().__init__(module)
        self.function = function

    def __call__(self, *args, **kwargs):
        forward = self.original
        if not (self.module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        count, names = len(args), tuple(kwargs)

        def region(*values):
            return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

        # Only positional arguments are quantized.
        return self.function(region, *args, *kwargs.values())


def _check(bits, group_size, offload) -> None:
    if bits is not None:
        check_bits(bits)
    check_group_size(group_size)
    if not isinstance(offload, bool):
        raise InputError(f"offload: expected True or False, got {shorten(offload)}")
    if offload and bits is None:
        raise InputError("offload: expected bits from 1 to 8 with it, got None")


def _torch_options(
    use_reentrant=False, respect_saved_tensors_hooks=None, determinism_check="default", **options
) -> dict:
    if use_reentrant:
        raise InputError(
            f"use_reentrant: expected False, got {shorten(use_reentrant)}, with which the region would get no gradients; "
            "use torch.utils.checkpoint.checkpoint for a reentrant region"
        )
    if determinism_check not in _CHECKS:
        raise InputError(
            f"determinism_check: expected {' or '.join(map(repr, _CHECKS))}, got {shorten(determinism_check)}"
        )
    options = {"use_reentrant": False, "determinism_check": determinism_check, **options}
    if options.get("context_fn") is noop_context_fn:
        del options["context_fn"]  # which Dynamo would not trace
    if _HAS_HOOKS:
        options[_HOOKS] = respect_saved_tensors_hooks is not False
    elif respect_saved_tensors_hooks:
        raise InputError(
            f"{_HOOKS}: expected None or False with torch {torch.__version__}, got True, which needs torch 2.14"
        )
    return options


def supports_checkpoints(model: nn.Module) -> bool:
    """Return whether `checkpoint_` can be used with a model."""
    return _enabling(model) is not None and getattr(model, "supports_gradient_checkpointing", False)


def _enabling(model: nn.Module) -> Callable | None:
    return next((getattr(model, name) for name in _ENABLE if hasattr(model, name)), None)


class _AsBefore:
    """A region's function, whose second run gets containers among the arguments as they were before the first run."""

    def __init__(self, function, args):
        self._function, self._is_first = function, True
        copied: dict = {}
        self._before = {i: _copied(x, copied) for i, x in enumerate(args) if type(x) in _CONTAINERS}

    def __call__(self, *args, **kwargs):
        if self._is_first:
            self._is_first = False
            return self._function(*args, **kwargs)
        copied, before = {}, self._before
        args = [_copied(before[i], copied) if i in before else x for i, x in enumerate(args)]
        return self._function(*args, **kwargs)


def _copied(value, copied: dict):
    """Copy lists and dicts, also within tuples, but not the tensors in them. `copied` has copies by the ids of what was copied."""
    kind, number = type(value), id(value)
    if kind not in _CONTAINERS:
        return value
    if number in copied:
        return copied[number]
    if kind is tuple:
        found = tuple(_copied(one, copied) for one in value)
        if all(a is b for a, b in zip(found, value, strict=True)):
            found = value
        copied[number] = found
        return found
    found = copied[number] = copy(value)
    for key, one in value.items() if kind in _DICTS else enumerate(value):
        found[key] = _copied(one, copied)
    return found


class _CheckpointedRegion:
    """A region: a function, its arguments with quantized tensors, and what the second run needs of the first."""

    def __init__(self, function, args, bits, group_size, preserves, offloads):
        self._function, self._args = function, args
        self._others = [None if isinstance(x, Tensor) else x for x in args]
        tensors = {i: x for i, x in enumerate(args) if isinstance(x, Tensor)}
        self._needs_grad = {i: x.requires_grad for i, x in tensors.items()}
        saved = [_save(x, i, bits, group_size) for i, x in tensors.items()]
        self._arguments, self._record = _hold(saved, offloads), None
        is_rounded = any(not isinstance(copy.spec, copies.UnquantizedSpec) for copy in saved)
        self._run, self._buffers = FirstRun(is_rounded, preserves), Buffers()
        self._has_begun = False

    def finish(self) -> None:
        kept = self._run.kept()
        self._record = _hold(kept) if kept else None
        self._run.forget()
        self._args = None

    def __call__(self, *_, **kwargs):
        if not self._has_begun:
            self._has_begun = True
            with self._buffers.watched(), entered(self._run):
                return self._function(*self._args, **kwargs)
        with outside_dispatch_modes():
            # Torch runs the region again before the first run has ended if the region itself computes gradients.
            args = self._restored() if self._args is None else self._args
            rerun = Rerun(self._run, self._recorded())
        with self._buffers.earlier(), entered(rerun):
            return self._function(*args, **kwargs)

    def _recorded(self) -> list[tuple]:
        """Return the record of the first run as (spec, tensors)."""
        if self._record is None:
            return [(copy.spec, copy.tensors) for copy in self._run.kept()]
        node = self._record.grad_fn
        kept = copies.Kept(node)
        return [kept.copy(name) for name in node.kept]

    def _restored(self) -> list:
        args, node = list(self._others), self._arguments.grad_fn
        kept = copies.Kept(node)
        for (i, needs_grad), name in zip(self._needs_grad.items(), node.kept, strict=True):
            x = kept.values(name).detach()
            args[i] = x.requires_grad_() if needs_grad else x
        return args


def _hold(saved: list[SavedTensors], offloads: bool = False) -> Tensor:
    """Return an empty tensor whose autograd node holds copies, which hooks on saved tensors see."""
    moved = []
    if offloads:
        is_quantized = [not isinstance(copy.spec, copies.UnquantizedSpec) for copy in saved]
        moved = [
            x
            for copy, is_one in zip(saved, is_quantized, strict=True)
            if is_one
            for x in copy.tensors
        ]
    with torch.enable_grad(), BOUNDARIES.one_layer(moved) if moved else nullcontext():
        return _Holder.apply(torch.empty(0, requires_grad=True), saved)


class _Holder(Function):
    @staticmethod
    def forward(ctx, flag, saved):
        return copies.keep(ctx, flag.clone(), **{str(i): copy for i, copy in enumerate(saved)})

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("no gradient reaches this node")


def _save(x: Tensor, number: int, bits: int, group_size: int) -> SavedTensors:
    # Tensors without gradient are masks, positions or data, which exist anyway. A mask may contain -inf.
    is_large = x.dtype in FLOATING and x.layout is torch.strided and x.numel() >= LEAST_ELEMENTS
    if not (is_large and x.requires_grad) or isinstance(x, nn.Parameter) or not is_eager(x):
        return copies.unquantized(x.detach())
    context = current()
    if context is None:
        seed = library.new_seed(x)
    else:
        seed = context.saving(x).seed(x, purpose("checkpoint", number))
    kind = usual_kind(ROTATED, group_size)
    channels = channels_of(x, usual_features(x.dim())) if kind == ROTATED else 0
    settings = seed, bits, group_size, kind, channels
    return in_storage_order(x, lambda x: copies.quantized(x, *settings))
