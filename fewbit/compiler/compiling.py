"""The public functions of the compiler mode: `fewbit.compile` and `fewbit.partition_fn`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fewbit.compiler import self_check
from fewbit.compiler.seed_counters import counter_of
from fewbit.config import BitConfig, FixedBits, LayerSettings, as_config
from fewbit.convert.module_settings import ResolvedSettings, resolve
from fewbit.convert.select import Selection, is_within
from fewbit.convert.swap import check_module
from fewbit.errors import CompileWarning, InputError
from fewbit.runtime.interop.bypass import ModeHooks

if TYPE_CHECKING:
    from fewbit.compiler.partitioner import Partitioner

_BACKENDS = "inductor", "aot_eager"


def compile(
    model: nn.Module,
    bits: int | BitConfig | None = None,
    *,
    layers: LayerSettings | Mapping | None = None,
    overrides: Mapping[str, int | LayerSettings | Mapping | None] | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: Mapping | None = None,
    **settings: Any,
) -> nn.Module:
    """Compile a model with torch.compile so that it saves a few bits per element for the backward pass.

    The results of the forward pass are torch's. For the backward pass, the compiled code saves quantized copies, masks of 1
    bit, and exact tensors only if an op needs them (docs/guides/compile.md). The model itself does not change.

    Args:
        model: the model. If `compress_` has converted it, its layers keep their own copies.
        bits: the bits per element, 1 to 8, or FixedBits. None means 4.
        layers: settings of layers, as in `compress_`. `activation_bits` are the bits of derivatives of nonlinear
            functions (usually `bits`, but at least 3), `attention_bits` those of queries, keys and values (usually
            `bits` + 2).
        overrides: {glob pattern of module paths: settings of the modules that match}, as in `compress_`. None leaves
            the tensors of the modules exact.
        backend: "inductor" or "aot_eager".
        mode: as in torch.compile, for the backend "inductor".
        options: as in torch.compile, for the backend "inductor", perhaps together with a mode.
        **settings: other arguments of torch.compile, such as fullgraph and dynamic.

    Returns:
        The compiled model. Its attribute `partitioner.report` shows, after the first forward and backward pass, which
        tensors the compiled graphs save.

    Raises:
        InputError: an argument cannot be used.

    Warns:
        CompileWarning: the installed torch does not work with fewbit's partitioner, or torch.compile is disabled: exact
            tensors are saved, and there is no `partitioner`. Or, in a call, torch.compile has left a part to Python.
    """
    settings = {"backend": backend, "mode": mode, "options": options, **settings}
    partitioner, arguments = _arguments(model, bits, layers, overrides, **settings)
    compiled = torch.compile(model, **arguments)
    if partitioner is None:
        return compiled
    if compiled is model:
        _warn("torch.compile is disabled: the model saves exact tensors", stacklevel=2)
        return model
    from fewbit.compiler.compiled_call import CompiledModel

    again = partial(compile, bits=bits, layers=layers, overrides=overrides, **settings)
    return CompiledModel.of(compiled, partitioner, arguments, again)


def compile_in_place(model: nn.Module, bits=None, layers=None, overrides=None, **settings) -> None:
    """Compile a model like `compile`, but so that calls of the model itself run the compiled code.

    `Module.compile` has no effect on a model whose class is torch's.
    """
    from fewbit.compiler import compiled_call

    compiled_call.compile_in_place(model, *_arguments(model, bits, layers, overrides, **settings))


def compile_blocks_(
    model: nn.Module,
    bits: int | BitConfig | None = None,
    *,
    layers: LayerSettings | Mapping | None = None,
    overrides: Mapping[str, int | LayerSettings | Mapping | None] | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: Mapping | None = None,
    **settings: Any,
) -> list[Partitioner]:
    """Compile the repeated blocks of a model in place, like `compile`, but each kind of block only once.

    Blocks are the modules in a torch.nn.ModuleList or torch.nn.Sequential that have the class of another module there;
    blocks with hooks have code of their own. The rest of the model runs in eager mode. A copy of the model is not
    compiled. torch.compile around the model compiles only the code between the blocks, and raises an error with
    fullgraph=True. Arguments are those of `compile`, but paths in `overrides` are within a block of any class.

    Returns:
        A `Partitioner` for each class of blocks, whose `report` shows which tensors the graphs save, of one block each.

    Raises:
        InputError: an argument cannot be used, or the model has no repeated blocks.

    Warns:
        CompileWarning: as in `compile`. There is no partitioner then.
    """
    check_module(model)
    settings = {"backend": backend, "mode": mode, "options": options, **settings}
    groups = _repeated_blocks(model)
    if not groups:
        raise InputError(
            "model: expected one with several blocks of one class in a torch.nn.ModuleList or torch.nn.Sequential, got none: call "
            "fewbit.compile"
        )
    from fewbit.compiler import compiled_call

    made = [
        _arguments(blocks[0], bits, layers, own, **settings)
        for blocks, own in zip(groups, _overrides_of(groups, overrides), strict=True)
    ]
    for blocks, (partitioner, arguments) in zip(groups, made, strict=True):
        compiled_call.compile_blocks(blocks, partitioner, arguments)
    return [partitioner for partitioner, _ in made if partitioner is not None]


def _repeated_blocks(model: nn.Module) -> list[list[nn.Module]]:
    groups, inner = {}, set()
    for module in model.modules():
        if module in inner or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        # A list in a list, as of pairs of attention and MLP, is never called, but the modules in it are.
        children, lists = [], [module]
        while lists:
            for child in lists.pop().children():
                is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
                (lists if is_list else children).append(child)
        classes = Counter(map(type, children))
        for child in children:
            if child not in inner and classes[type(child)] > 1 and any(child.children()):
                # torch.compile does not look at hooks when it chooses code that it has compiled.
                hooked = child if any(map(_has_hooks, child.modules())) else None
                groups.setdefault((type(child), hooked), []).append(child)
                inner.update(child.modules())
    return [[*dict.fromkeys(blocks)] for blocks in groups.values()]


def _has_hooks(module: nn.Module) -> bool:
    from fewbit.compiler.compiled_call import is_hook_of_blocks

    hooks = (
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    )
    return not all(
        isinstance(getattr(hook, "__self__", None), ModeHooks) or is_hook_of_blocks(hook)
        for hook in hooks
    )


def _overrides_of(groups: list[list[nn.Module]], overrides) -> list:
    if not isinstance(overrides, Mapping):
        return [overrides] * len(groups)
    paths = [[path for path, _ in blocks[0].named_modules()] for blocks in groups]
    matched = [
        {glob for glob in overrides if any(is_within(path, str(glob)) for path in of_group)}
        for of_group in paths
    ]
    unknown = [glob for glob in overrides if not any(glob in globs for globs in matched)]
    if unknown:
        raise InputError(
            f"overrides: expected a glob that matches a module in a block, got {unknown[0]!r}"
        )
    return [
        {glob: change for glob, change in overrides.items() if glob in globs} for globs in matched
    ]


def undo_compile(model: nn.Module) -> None:
    """Undo `compile_in_place` and `compile_blocks_`."""
    from fewbit.compiler import compiled_call

    for module in model.modules():
        compiled_call.undo(module)


def partition_fn(
    bits: int | BitConfig | None = None, layers: LayerSettings | Mapping | None = None
) -> Callable:
    """Return a partitioner for backends that torch's `aot_autograd` makes, with `bits` and `layers` as in `fewbit.compile`.

    Pass it as ``aot_autograd(partition_fn=fewbit.partition_fn(bits=2), ...)``, with torch's decompositions, for example
    ``decompositions=torch._inductor.decomposition.select_decomp_table()``, because tensors of other ops stay exact.

    Returns:
        The partitioner, a function whose attribute `report` shows what the compiled graphs save.

    Raises:
        InputError: an argument cannot be used.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return _partitioner(_resolved(bits, layers)) or min_cut_rematerialization_partition


def _arguments(
    model, bits, layers, overrides, *, backend="inductor", mode=None, options=None, **settings
):
    from torch._dynamo import OptimizedModule  # takes seconds

    check_module(model)
    if isinstance(model, OptimizedModule):
        raise InputError(
            "model: expected a model that is not compiled yet, got one of torch.compile"
        )
    if backend not in _BACKENDS:
        raise InputError(
            f'backend: expected "inductor" or "aot_eager", got {backend!r}; '
            "fewbit.partition_fn is for backends that are made by aot_autograd"
        )
    if backend != "inductor" and (mode is not None or options is not None):
        raise InputError(
            f'mode and options are for the backend "inductor", got backend={backend!r}'
        )
    usual = _resolved(bits, layers)
    selected = Selection(overrides=overrides).of(model, usual)
    of_modules = {one.module: one.settings for one in selected if one.attribute is None}
    # torch may use any path of a shared module.
    paths = dict(model.named_modules(remove_duplicate=False))
    own = {
        path: of_modules[module]
        for path, module in paths.items()
        if of_modules.get(module, usual) != usual
    }
    partitioner = _partitioner(usual, own, paths, is_inductor=backend == "inductor", stacklevel=4)
    if partitioner is None:
        if mode is not None and options is not None:
            mode, options = None, {**_of_mode(mode), **options}
        return None, {"backend": backend, "mode": mode, "options": options, **settings}
    # The partitioner makes counters too, but it does not run if torch finds the code in its cache on disk.
    for device in {parameter.device for parameter in model.parameters()}:
        counter_of(device)
    if backend == "inductor":
        options = {**_of_mode(mode), **(options or {}), "custom_partitioner_fn": partitioner}
        return partitioner, {"options": options, **settings}
    return partitioner, {"backend": _aot_eager(partitioner), **settings}


def _resolved(bits, layers) -> ResolvedSettings:
    try:
        config = as_config(bits)
    except InputError:
        config = None
    if not isinstance(config, FixedBits):
        raise InputError(f"bits: expected a whole number from 1 to 8 or FixedBits, got {bits!r}")
    settings = resolve(config, layers)
    if LayerSettings.of(layers or {}).activation_bits is not None:
        return settings
    # A copy of a derivative is rounded at random, so with 3 bits it would cause the largest error of a model with 4 bits.
    return replace(settings, activation_bits=max(settings.activation_bits, config.bits))


def _partitioner(
    settings: ResolvedSettings,
    own: Mapping | None = None,
    paths=(),
    is_inductor: bool = False,
    stacklevel: int = 3,
):
    failure = self_check.failure()
    if failure is None:
        # Another version of torch may lack the private interfaces that this module imports.
        from fewbit.compiler.partitioner import Partitioner

        return Partitioner(settings, own, paths, is_inductor)
    _warn(
        f"fewbit.compile does not work with torch {torch.__version__} ({failure}): the compiled code saves exact tensors",
        stacklevel,
    )
    return None


def _warn(message: str, stacklevel: int) -> None:
    warnings.warn(message, CompileWarning, stacklevel=stacklevel + 1)


def _of_mode(mode: str | None) -> dict:
    """Return the options of a mode, because torch takes a mode or options, not both."""
    return {} if mode is None else torch._inductor.list_mode_options(mode)


def _aot_eager(partitioner):
    import torch._inductor.lowering  # which the decomposition of max pooling looks up  # noqa: F401
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    def run(graph, inputs):
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=run, partition_fn=partitioner, decompositions=select_decomp_table()
    )
