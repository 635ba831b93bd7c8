"""Conversion of a model in place, and back: module objects stay, their classes change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from fewbit.convert import kinds, transformers_attention, transformers_modules, transformers_norms
from fewbit.convert.conversion_report import ConvertedModule, Report, SkippedModule
from fewbit.convert.function_mode import FunctionMode
from fewbit.convert.module_choices import ORIGINAL, Choice, Joining, choices_for, few_bit_already
from fewbit.convert.module_settings import ResolvedSettings
from fewbit.convert.recurrent import StepwiseLSTM
from fewbit.convert.select import Selected, Selection, settings_by_module
from fewbit.convert.transformers_gated import GatedUnit
from fewbit.convert.undo import whole_or_not_at_all
from fewbit.errors import InputError
from fewbit.nn.activations import TwoValued
from fewbit.nn.base import Quantized
from fewbit.nn.normalization import Norm
from fewbit.nn.softmax import Softmax
from fewbit.runtime.graph.compressor import GraphCompressor
from fewbit.runtime.interop.bypass import ModeHooks
from fewbit.runtime.interop.module_calls import (
    GUARD,
    PATH,
    class_of,
    rebase,
    track,
    tracked_class_for,
    untrack,
    untracked_class,
)
from fewbit.runtime.saved.calls import CallGuard
from fewbit.runtime.saved.context import ForwardContext

_FUNCTIONS = "_fewbit_functions"


@dataclass
class Original:
    """The state of a module before its conversion, which the module keeps: its class, and replaced attributes by name."""

    cls: type
    becomes: type
    attributes: dict
    added: tuple[str, ...]

    def __getstate__(self):
        # pickle cannot find an adapted class by its name, because it is made on first use.
        is_adapted = transformers_modules.is_adapted(self.becomes)
        return vars(self) | {"becomes": None if is_adapted else self.becomes}

    def __setstate__(self, state):
        vars(self).update(state)
        if self.becomes is None:
            self.becomes = transformers_modules.adapted(self.cls)


class Conversion(NamedTuple):
    """The result of `convert`. `selected` are the modules and their settings, selected before their classes changed."""

    report: Report
    context: ForwardContext
    selected: list[Selected]


def convert(
    model: nn.Module,
    settings: ResolvedSettings,
    selection: Selection | None = None,
    before: Callable[[], None] = lambda: None,
) -> Conversion:
    """Convert the modules of a model, and the functions that these modules call, in place: select, choose, apply.

    An earlier conversion is undone first, unless `settings.families` contains only activations, as for `replace_activations_`: then only the
    selected activations get new settings. `settings` are those of modules that no override changes. `before` is called once, after the
    checks and the undoing. Raises InputError if the model or the selection is invalid.
    """
    check_module(model)
    selection = selection or Selection()
    selected = selection.of(model, settings)
    whole = settings.families != (kinds.ACTIVATION,)
    if whole:
        restore_(model)
        selected = selection.of(model, settings)
    before()
    choices = choices_for(model, selected, whole)
    context = ForwardContext()
    rows = [_apply(choice, context) for choice in choices]
    if kinds.LAYER in settings.families:
        rows += _convert_attention(model, selected, context)
    if whole:
        _switch_functions(model, settings, selected, context)
        _attach(model, settings, selected, context)
    converted = tuple(row for row in rows if isinstance(row, ConvertedModule))
    skipped = tuple(row for row in rows if isinstance(row, SkippedModule))
    return Conversion(Report(converted, skipped), context, selected)


@whole_or_not_at_all
def restore_(model: nn.Module) -> None:
    """Undo `compress_`: give each converted module its class back. Modules created from fewbit's classes stay.

    Args:
        model: the model, which changes in place.

    Raises:
        InputError: the model is not a module, or the class of a converted module was changed after the conversion by
            anything else than a parametrization or fully_shard. The model stays unchanged.
    """
    check_module(model)
    classes = {}
    for path, module in model.named_modules():
        original = vars(module).get(ORIGINAL)
        if original is not None:
            classes[module] = _class_before(path or "the model", module, original)
    transformers_attention.remove(model)
    for module in list(model.modules()):
        untrack(module)
        _remove_hooks(module)
        original = vars(module).pop(ORIGINAL, None)
        if original is None and isinstance(module, Quantized):
            quantizer = module.quantizer  # the user made the module from fewbit's class
            if quantizer.context is not None and not quantizer.context.is_private:
                quantizer.context = None
        if original is not None:
            for name in original.added:
                vars(module).pop(name, None)
            vars(module).update(original.attributes)
            module.__class__ = classes[module]
        for name, function in vars(module).pop(_FUNCTIONS, {}).items():
            delattr(module, name)
            setattr(module, name, function)


def check_module(model) -> None:
    """Raise InputError if the model is not a module."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(f"model: expected a torch.nn.Module, got {what}")


def is_converted(module: nn.Module) -> bool:
    """Return whether `convert` changed the class of the module."""
    return ORIGINAL in vars(module)


def name_before(model: nn.Module, path: str) -> str | None:
    """Return the class name of the module at `path` before the conversion, or None if it was not converted.

    If the module was a function, this is the class name of the module that called it.
    """
    parent, _, name = path.rpartition(".")
    if name and name in vars(model.get_submodule(parent)).get(_FUNCTIONS, {}):
        return class_of(model.get_submodule(parent)).__name__
    original = vars(model.get_submodule(path)).get(ORIGINAL)
    return None if original is None else original.cls.__name__


def name_of_attention(path: str) -> str:
    """Return "<path>:attention", which stands in reports for q, k and v of the module at `path`."""
    return f"{path}:attention"


# -- One module ----------------------------------------------------------------------------------------------


def _apply(choice: Choice, context: ForwardContext) -> ConvertedModule | SkippedModule:
    """Do what was chosen for a module, and return its row of the report."""
    if isinstance(choice, SkippedModule):
        return choice
    path, module, attribute, settings = choice.selected
    if isinstance(choice, Joining):
        fuses = settings is not None and settings.fuses_norms
        module.quantizer = module.quantizer.copy_for(path, context=context, fuse=fuses)
        return few_bit_already(choice.selected)
    held = choice.held
    if attribute is not None:
        vars(module).setdefault(_FUNCTIONS, {})[attribute] = getattr(module, attribute)
        # The submodule takes the place and the name of the plain attribute.
        delattr(module, attribute)
        setattr(module, attribute, held.train(module.training))
    if choice.kind is not None:
        _change_class(held, choice.kind)
    return _row(path, choice.name, held, _configure(path, held, settings, context))


def _row(path: str, before: str, module: nn.Module, bits: float | None) -> ConvertedModule:
    own = getattr(module, "attention_quantizer", None)
    attention = None if own is None or own.mean_bits == bits else own.mean_bits
    after = kinds.name_of(type(module))
    frozen = kinds.saves_nothing(module)
    exact = kinds.saved_exactly(module)
    return ConvertedModule(path, before, after, bits, exact, attention=attention, frozen=frozen)


def as_now(report: Report, model: nn.Module) -> Report:
    """Return the report with the modules that are now frozen, or in evaluation mode while others train."""
    modules, rows = dict(model.named_modules()), []
    trains = any(module.training for module in modules.values())
    for row in report.converted:
        module = modules.get(row.path)
        if module is not None:
            is_evaluated = trains and not module.training
            row = row._replace(frozen=kinds.saves_nothing(module), evaluated=is_evaluated)
        rows.append(row)
    return replace(report, converted=tuple(rows))


def _change_class(module: nn.Module, kind) -> None:
    names = (*kind.attributes, *_configured_attributes(kind.becomes))
    replaced = {name: vars(module)[name] for name in names if name in vars(module)}
    for name, method in kinds.methods_of_liger(module).items():
        replaced[name] = method
        del vars(module)[name]  # it would hide the method of the new class
    vars(module)[ORIGINAL] = Original(type(module), kind.becomes, replaced, names)
    vars(module).update(kind.attributes)
    module.__class__ = kind.becomes


def _configured_attributes(cls: type[nn.Module]) -> tuple[str, ...]:
    if issubclass(cls, Quantized):
        return "quantizer", "copies", "attention_quantizer"
    return ("bits", "table", "quantizer") if kinds.is_activation(cls) else ()


def _configure(path, module, settings, context) -> float | None:
    if isinstance(module, Quantized):
        make = settings.make_quantizer
        if isinstance(module, GatedUnit):
            make = settings.make_gate_quantizer
        elif isinstance(module, Softmax):
            # Attention calls the module or the function, so both have its bits.
            make = settings.make_attention_quantizer
        elif isinstance(module, Norm | transformers_norms.TransformersRMSNorm):
            of_features = nn.LayerNorm | nn.RMSNorm | transformers_norms.TransformersRMSNorm
            make = partial(
                settings.make_norm_quantizer, is_before_linear=isinstance(module, of_features)
            )
        module.quantizer = make(context, path)
        if hasattr(type(module), "copies"):
            module.copies = settings.copies
        if hasattr(type(module), "attention_quantizer"):
            name = name_of_attention(path)
            module.attention_quantizer = settings.make_attention_quantizer(context, name)
        return module.quantizer.mean_bits
    if kinds.is_activation(type(module)):
        is_exact = isinstance(module, TwoValued)
        module.bits, module.table = 1 if is_exact else settings.activation_bits, None
        module.quantizer = settings.make_activation_quantizer(context, path)
        if is_exact or module.quantizer is None:
            return module.bits
        return module.quantizer.mean_bits
    if isinstance(module, StepwiseLSTM):
        device = next(module.parameters()).device
        return settings.bits if module.runs_stepwise_on(device) else None
    return None


def _class_before(path: str, module: nn.Module, original: Original) -> type[nn.Module]:
    """Return the class that `restore_` gives a converted module. Raise InputError if it is not known."""
    cls = untracked_class(module)
    is_known = issubclass(cls, original.becomes)
    before = rebase(cls, original.becomes, original.cls) if is_known else None
    if before is None:
        raise InputError(
            f"{path}: expected the class that compress_ gave it, got {type(module).__name__}, which was put in its "
            "place since; undo that first"
        )
    return before


# -- The whole model -----------------------------------------------------------------------------------------


def _convert_attention(
    model: nn.Module, selected: Iterable[Selected], context: ForwardContext
) -> list[ConvertedModule | SkippedModule]:
    own = settings_by_module(selected)

    def quantizer(path, module):
        settings = own.get(id(module))
        if settings is None:
            return None
        return settings.make_attention_quantizer(context, name_of_attention(path))

    reached, left = transformers_attention.install(model, quantizer)
    rows = []
    for path in reached:
        module = model.get_submodule(path)
        bits = quantizer(path, module).mean_bits
        rows.append(ConvertedModule(path, type(module).__name__, "fewbit attention", bits))
    rows += [SkippedModule(path, "attention", reason) for path, reason in left.items()]
    return rows


def _attach(
    model, settings: ResolvedSettings, selected: list[Selected], context: ForwardContext
) -> None:
    """Make the model's forward passes run within the context."""
    own = [one.settings for one in selected if one.settings is not None]
    if settings.functional or any(module_settings.functional for module_settings in own):
        context.contexts = (FunctionMode(settings.make_function_quantizers(context)),)
    context.compressor = _graph_compressor(settings, selected)
    is_needed = context.contexts or context.compressor is not None
    if not (is_needed or any(isinstance(module, Quantized) for module in model.modules())):
        return
    guard, tracked = CallGuard(context), {}
    for path, module in model.named_modules():
        has_own = context.compressor is not None and path in context.compressor.own
        # Modules without a forward, like ModuleList, are never called.
        if (module is model or kinds.may_call(module) or has_own) and not _is_scripted(module):
            tracked[module] = path, tracked_class_for(module)
        elif settings.has_policy and kinds.is_activation(type(module)):
            vars(module).update({PATH: path, GUARD: guard})
    for module, (path, cls) in tracked.items():
        vars(module)[PATH] = path
        track(module, guard, cls)


def _graph_compressor(settings: ResolvedSettings, selected) -> GraphCompressor | None:
    usual, own = settings.make_graph_settings(), {}
    for path, module, _, chosen in selected:
        is_cell = kinds.is_cell(module)
        if chosen is not settings or is_cell:
            own[path] = None if chosen is None else chosen.make_graph_settings(is_cell)
    if usual is None and not any(own.values()):
        return None
    return GraphCompressor(usual, own)


def _switch_functions(model, settings, selected: list[Selected], context: ForwardContext) -> None:
    """Add hooks to modules whose functions have settings other than the model's."""
    own = settings_by_module(selected)
    if all(module_settings is settings for module_settings in own.values()):
        return
    made = {}
    for module in model.modules():
        if id(module) not in own or _is_scripted(module):
            continue  # the conversion made the module from a function
        mine = own[id(module)]
        if mine is None or (kinds.may_call(module) and not mine.functional):
            mode = True
        elif not kinds.may_call(module):
            continue
        elif mine is settings:
            mode = False
        else:
            mode = made.setdefault(mine, mine.make_function_quantizers(context))
        ModeHooks(mode).register(module)


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _remove_hooks(module: nn.Module) -> None:
    vars(module).pop(PATH, None)
    vars(module).pop(GUARD, None)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), ModeHooks):
                del hooks[number]
                module._forward_hooks_always_called.pop(number, None)
