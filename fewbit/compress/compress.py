"""`compress_`: it checks the configuration, converts the model, gives it a policy and reports the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Never

from torch import nn

from fewbit.compress import fused
from fewbit.compress.allocator import AllocatorReport, use_expandable_segments
from fewbit.compress.controller import Controller
from fewbit.compress.sample import bytes_by_class, check_sample, fit_of, saved_for, try_sample
from fewbit.config import (
    CODECS,
    LARGEST_ROTATED_GROUP,
    MAX_BITS,
    MIN_BITS,
    ROTATED,
    AdaptiveBits,
    BitConfig,
    Budget,
    ErrorBound,
    FixedBits,
    HostOffload,
    LayerSettings,
    Level,
    as_config,
    check_verbose,
    usual_kind,
)
from fewbit.convert import kinds
from fewbit.convert.conversion_report import Report
from fewbit.convert.model_facts import facts_of
from fewbit.convert.module_settings import ResolvedSettings, resolve
from fewbit.convert.select import Filter, Selection
from fewbit.convert.swap import Conversion, check_module, convert, restore_
from fewbit.convert.undo import whole_or_not_at_all
from fewbit.errors import InputError
from fewbit.policies.make import checked_policy
from fewbit.printable import shorten
from fewbit.render import terminal
from fewbit.render.formats import amount
from fewbit.runtime.codecs import check_codec
from fewbit.runtime.saved.bit_policy import BitPolicy
from fewbit.runtime.saved.context import ForwardContext, contexts_of
from fewbit.runtime.saved.offload import Offload


@whole_or_not_at_all
def compress_(
    model: nn.Module,
    bits: float | BitConfig | Mapping | None = None,
    *,
    layers: LayerSettings | Mapping | None = None,
    include: Filter = "*",
    exclude: Filter = (),
    overrides: Mapping[str, float | LayerSettings | Mapping | None] | None = None,
    offload: HostOffload | Mapping | None = None,
    sample: object = None,
    verbose: bool = True,
    **unknown: Never,
) -> Controller:
    """Make a model save only a few bits per element for the backward pass, in place, and report what was changed.

    Modules stay the same objects; only their classes change, each to a subclass of torch's class. Functions that the
    forward calls, such as F.gelu, are compressed too. Parameters, `state_dict` keys and the training loop do not change. In
    evaluation mode and under no_grad nothing is compressed. A second call undoes the earlier one.

    Args:
        model: the model, which changes in place.
        bits: says who chooses the bits per element of quantized inputs: a BitConfig, such as FixedBits, AdaptiveBits or
            ErrorBound, a Level of ActNN, or a mapping such as {"kind": "adaptive", "average": 2.5}. A whole number from
            1 to 8 stands for FixedBits, another number for AdaptiveBits with that average, None for FixedBits(4).
        layers: settings of layers: LayerSettings, or a mapping of its fields except `bits`.
        include: the modules to convert: one or several glob patterns of dotted module paths, or a function (path, module)
            -> bool. The path "" is the model itself. A pattern that matches a module also matches the modules inside it,
            and one of several paths of a module is enough.
        exclude: the modules to leave as they are, in the same form, even if `include` matches them.
        overrides: {glob pattern: settings of the modules that match}. Settings are LayerSettings, a mapping of its
            fields, None to leave the modules as they are, or a number for `bits`, `attention_bits` and `gate_bits`. If
            several patterns match a module, the last one holds.
        offload: HostOffload(), or a mapping of its fields, moves a GPU's saved tensors to the host until the backward pass
            needs them.
        sample: an example batch: a tensor, a tuple of inputs or a mapping of keyword inputs. The report then compares the
            bytes that the exact and the compressed model save. Budget needs a sample.
        verbose: whether to print the report.
        unknown: must be empty.

    Returns:
        The controller, an object with the report, the chosen bits, the state for a checkpoint, and methods that
        measure.

    Raises:
        TypeError: there is an unknown argument, which is not a setting of layers.
        InputError: a setting cannot be used or belongs in `layers`, the model is not a module, a pattern matches no
            module, or a budget is too small for 1 bit per element. The model is unchanged after any exception.
    """
    _refuse(unknown)
    check_verbose(verbose)
    given = as_config(bits)
    config, offload = _without_level(given, offload)
    selection = Selection(include, exclude, overrides)
    settings = None if config is None else _settings(given, config, layers)
    check_sample(sample)
    if config is None:
        resolve(FixedBits(), layers)  # raises for settings that no level takes
        restore_(model)
        report = Report((), (), notes=(f"{given!r}",))
        return _reported(Controller(model, report, ForwardContext(), None, given), verbose)
    _check(config, model, sample)
    is_second = isinstance(model, nn.Module) and any(
        not context.is_private for context in contexts_of(model)
    )
    conversion, before = _converted(model, settings, selection, sample)
    budget = elements = None
    if isinstance(config, Budget):
        budget = config.bytes
        settings, elements = _settings_within(budget, model, sample, layers, selection)
        conversion = convert(model, settings, selection)
        config = AdaptiveBits(settings.bits, config.interval)
    facts = facts_of(model, conversion.selected, settings.bits, budget, elements)
    conversion.context.policy = checked_policy(config, facts)
    allocator = _offloaded(conversion.context, offload)
    notes = _notes(given, config, offload, model, settings, allocator)
    if is_second:
        notes += ("an earlier call of compress_ was undone: only the settings of this call hold",)
    report = _report(conversion, notes, model, settings, sample, before)
    return _reported(
        Controller(model, report, conversion.context, allocator, given, bool(overrides)), verbose
    )


def _refuse(unknown: Mapping) -> None:
    if not unknown:
        return
    settings = {field.name for field in fields(LayerSettings)}
    misplaced = {name: value for name, value in unknown.items() if name in settings}
    if not misplaced:
        raise TypeError(f"compress_() got an unexpected keyword argument {next(iter(unknown))!r}")
    raise InputError(
        f"expected settings of layers in the argument layers, as layers={shorten(misplaced)}, "
        f"got {next(iter(misplaced))}= as an argument of its own"
    )


def _without_level(
    config: BitConfig, offload: HostOffload | Mapping | None
) -> tuple[BitConfig | None, HostOffload | None]:
    if isinstance(offload, Mapping):
        offload = HostOffload.from_dict(offload)
    if offload is not None and not isinstance(offload, HostOffload):
        raise InputError(f"offload: expected fewbit.HostOffload, got {offload!r}")
    if not isinstance(config, Level):
        return config, offload
    if offload is not None and (config.offload is not None or config.config is None):
        why = "which compresses nothing" if config.config is None else "which has its own"
        raise InputError(f"offload: expected none with {config!r}, {why}, got {offload!r}")
    return config.config, offload or config.offload


def _settings(given: BitConfig, config: BitConfig, layers) -> ResolvedSettings:
    settings = resolve(config, layers)
    if isinstance(given, Level) and given.convolutions_only:
        return replace(settings, functional=False, families=(kinds.CONVOLUTION,))
    return settings


def _check(config: BitConfig, model, sample) -> None:
    if isinstance(config, ErrorBound):
        check_codec(config.codec)
    if isinstance(config, Budget):
        if isinstance(model, nn.Module) and not model.training:
            raise InputError(
                "budget: expected a model in training mode, got one in evaluation mode"
            )
        if sample is None:
            raise InputError(
                "budget: expected sample= too, an example input, as the saved bytes depend on it"
            )


def _converted(model, settings, selection, sample) -> tuple[Conversion, dict[str, int]]:
    """Convert the model. Return also {class of modules: bytes that the exact model saves for the sample}."""
    before = {}
    if sample is None:
        return convert(model, settings, selection), before
    check_module(model)
    try_sample(model, sample)

    def measure():
        before.update(bytes_by_class(model, saved_for(model, sample)))

    return convert(model, settings, selection, measure), before


def _settings_within(
    budget: int, model, sample, layers, selection
) -> tuple[ResolvedSettings, dict]:
    """Find the settings with the largest average bits per element with which a forward pass fits a budget.

    Whole numbers are tried in turn, because the bits of tensors that the policy does not choose follow from the average, rounded down.
    Returns also the sizes of the tensors whose bits the policy chooses. Raises InputError if none has, or if the budget is too small for
    1 bit.
    """

    def tried(whole):
        settings = resolve(AdaptiveBits(whole), layers)
        conversion = convert(model, settings, selection)
        conversion.context.policy = BitPolicy()
        return settings, fit_of(model, sample, budget)

    settings, fit = first = tried(MIN_BITS)
    if fit.average < MIN_BITS:
        raise InputError(
            f"budget: expected at least {fit.least_bytes:,} bytes ({amount(fit.least_bytes)}), which this sample needs "
            f"with 1 bit an element, got {budget:,}"
        )
    # More bits of the other tensors leave less of the budget, so the first average is the greatest that is possible.
    whole = min(math.floor(fit.average), MAX_BITS)
    while whole > MIN_BITS:
        settings, fit = tried(whole)
        if fit.average >= whole:
            break
        whole -= 1
    else:
        settings, fit = first
    below_next = whole + 1 - 1 / 128
    return replace(settings, bits=float(min(fit.average, MAX_BITS, below_next))), fit.elements


def _offloaded(context: ForwardContext, offload: HostOffload | None) -> AllocatorReport | None:
    if offload is None:
        return None
    context.contexts += (Offload(),)
    return use_expandable_segments() if offload.expandable_segments else None


def _notes(given, config, offload, model, settings, allocator) -> tuple[str, ...]:
    how = config.describe()
    notes = [f"{given!r}: {how}" if how else f"{given!r}"]
    if settings.fuses_norms:
        notes.append(fused.note(model))
    if isinstance(given, Budget):
        notes.append(f"budget: {amount(given.bytes)} for the sample")
        if settings.bits == MAX_BITS:
            notes[-1] += f"; {MAX_BITS} bits an element, the most, need less"
    if settings.quantizer is not None:
        notes.append(f"quantized copies: {settings.quantizer}")
        if isinstance(config, ErrorBound) and config.codec != CODECS[0]:
            notes[-1] += f"; no effect on tensors that the codec {config.codec} saves"
    elif usual_kind(ROTATED, settings.group_size) != ROTATED:
        notes.append(
            f"quantized copies: uniform, as groups have more than {LARGEST_ROTATED_GROUP} elements"
        )
    if settings.recompute_linear:
        is_used = not isinstance(config, ErrorBound)
        notes.append(
            "results of linear layers are computed again where layers would save them"
            if is_used
            else "recompute_linear has no effect with ErrorBound"
        )
    if not model.training:
        notes.append(
            "the model is in evaluation mode, in which nothing is compressed: call train() before training"
        )
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        notes.append(
            "no parameter of the model requires a gradient, so nothing is saved unless an input requires one"
        )
    if offload is not None:
        notes.append("saved tensors of a GPU are in the host's memory until the backward pass")
    if allocator is not None:
        notes.append(str(allocator))
    return tuple(notes)


def _report(conversion: Conversion, notes, model, settings, sample, before) -> Report:
    changes, saved = {"notes": notes}, None
    if sample is not None:
        saved = saved_for(model, sample)
        changes["saved"] = before, bytes_by_class(model, saved)
    is_seen = sample is not None and model.training
    if settings.functional:
        own = settings.make_activation_quantizer(None)  # None if activations save codes
        activations = settings.activation_bits if own is None else own.mean_bits
        called = conversion.context.contexts[0].settings
        has_attention = called.has_attention if is_seen else kinds.may_call_attention(model)
        attention = settings.bits_of_attention if has_attention else None
        changes["functions"] = settings.bits, attention, activations
    report = conversion.report
    if settings.fuses_norms:
        seen = saved if is_seen else None
        changes["converted"] = fused.shared(model, report.converted, seen)
    return replace(report, **changes)


def _reported(controller: Controller, verbose: bool) -> Controller:
    if verbose:
        terminal.show(controller.report)
    return controller
