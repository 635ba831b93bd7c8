"""Converting a model in place, and back: module objects stay, their classes change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from numbers import Real

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fewbit.compress import fused, kinds, transformers_attention, transformers_modules
from fewbit.compress.adaptation import INTERVAL, Adaptation
from fewbit.compress.allocator import use_expandable_segments
from fewbit.compress.budget import Sizes, bytes_of
from fewbit.compress.calls import (
    ACTIVATIONS,
    QUANTISED,
    Calls,
    FunctionSettings,
    bits_of_call,
    name_of_call,
)
from fewbit.compress.codecs import DEFAULT as QUANT
from fewbit.compress.codecs import check_codec
from fewbit.compress.controller import Controller
from fewbit.compress.convert_report import Converted, LeftAlone, Report
from fewbit.compress.guarantee.estimates import WINDOWS
from fewbit.compress.guarantee.policy import INTERVAL as BOUND_INTERVAL
from fewbit.compress.guarantee.policy import POLICY, Bound, Guarantee
from fewbit.compress.meter import SavedBytes, alone, saved_bytes
from fewbit.compress.meter_report import amount
from fewbit.compress.observing import check_interval
from fewbit.compress.undo import whole_or_not_at_all
from fewbit.errors import InputError
from fewbit.functional.normalization import check_copies
from fewbit.nn.preactivation import PreActivation
from fewbit.nn.quantised import Quantised
from fewbit.runtime.calling import (
    SESSION,
    class_of,
    class_told,
    rebased,
    tell,
    untell,
    untold,
)
from fewbit.runtime.exact import Switch
from fewbit.runtime.groups import GROUP_SIZE
from fewbit.runtime.offload import Offload
from fewbit.runtime.quantiser import Quantiser
from fewbit.runtime.sharing import PATH, Session, measuring
from fewbit.runtime.tables import check_average, check_bits, plain_number
from fewbit.runtime.variables import MOST, Variables

LEVELS = ("L0", "L1", "L2", "L2.5", "L3", "L4", "L5")
MIXED, ADAPTING, OFFLOADING = LEVELS[3:], LEVELS[4:], LEVELS[5:]
"""Levels at which samples share bits, layers do too, and what is kept goes to the host."""
LEVEL_BITS = 4
"""Of the quantised inputs at levels L1 and L2 (ActNN, Table 2)."""
ACTIVATION_BITS = 3
ATTENTION_BITS = 4
"""At least, of q, k and v: their gradient goes through the exponential of their products, and at 2 bits is
mostly noise (docs/decisions/0008)."""
_ORIGINAL = "_fewbit_original"
_FUNCTIONS = "_fewbit_functions"

Filter = str | Iterable[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Settings:
    """What one module is to keep. families: those of `kinds` that are converted. fuse: see `compress_`.

    is_mixed: samples share bits, which are then averages. adapts: layers too, but for those with bits of their own.
    bounds_activations: bits of activations follow from a bound.
    """

    bits: float = LEVEL_BITS
    activation_bits: int = ACTIVATION_BITS
    attention_bits: float | None = None  # None: as many as bits, and at least ATTENTION_BITS
    group_size: int = GROUP_SIZE
    minimum: str = "auto"
    copies: int = 1
    functional: bool = False
    fuse: str | None = None
    is_mixed: bool = False
    adapts: bool = False
    bounds_activations: bool = False
    families: tuple[str, ...] = (kinds.ACTIVATION, kinds.CONVOLUTION, kinds.LAYER, kinds.EXACT)

    def check(self) -> Settings:
        """InputError for a value that there is not."""
        check = check_average if self.is_mixed else check_bits
        check(self.bits)
        check_bits(self.activation_bits, "activation_bits")
        if self.attention_bits is not None:
            check(self.attention_bits, "attention_bits")
        Quantiser(math.floor(self.bits), self.group_size, self.minimum)
        check_copies(self.copies)
        return self

    def quantiser(self, session: Session, name: str = "") -> Quantiser:
        """For the inputs of layers."""
        return self._quantiser(self.bits, session, name, not self.adapts)

    @property
    def bits_of_attention(self) -> float:
        """Of q, k and v: where nothing adapts enough for a gradient."""
        if self.attention_bits is not None:
            return self.attention_bits
        return self.bits if self.adapts else max(self.bits, ATTENTION_BITS)

    def of_functions(self, session: Session) -> FunctionSettings:
        """For functions that a forward calls."""
        quantisers = self.quantiser(session), self.attention_quantiser(session)
        return FunctionSettings(quantisers[0], self.activation_bits, quantisers[1])

    def attention_quantiser(self, session: Session, name: str = "") -> Quantiser:
        """For q, k and v."""
        is_fixed = not self.adapts or self.attention_bits is not None
        return self._quantiser(self.bits_of_attention, session, name, is_fixed)

    def _quantiser(self, bits, session, name, is_fixed) -> Quantiser:
        # Where samples share bits, what cannot (compiled parts) keeps the whole ones.
        settings = math.floor(bits), self.group_size, self.minimum
        return Quantiser(*settings, session, name, bits, is_fixed, self.fuse is not None)


@dataclass
class Original:
    """What a converted module was: kept on it, so that it travels with copies and pickles."""

    cls: type
    becomes: type
    attributes: dict  # those that the conversion replaced
    added: tuple[str, ...]

    def __getstate__(self):
        # The class that a module of transformers becomes is made when it is asked for; pickle does not find it by name.
        is_adapted = transformers_modules.is_adapted(self.becomes)
        return vars(self) | {"becomes": None if is_adapted else self.becomes}

    def __setstate__(self, state):
        vars(self).update(state)
        if self.becomes is None:
            self.becomes = transformers_modules.adapted(self.cls)


@whole_or_not_at_all
def compress_(
    model: nn.Module,
    bits: float | None = None,
    *,
    level: str | None = None,
    budget: int | str | None = None,
    interval: int | None = None,
    activation_bits: int | None = None,
    attention_bits: float | None = None,
    policy: str | None = None,
    e2: float | None = None,
    window: str | None = None,
    codec: str | None = None,
    by_channel: bool = False,
    group_size: int = GROUP_SIZE,
    minimum: str = "auto",
    copies: int = 1,
    functional: bool = True,
    fuse: str | None = None,
    include: Filter = "*",
    exclude: Filter = (),
    overrides: Mapping[str, int | Mapping | None] | None = None,
    sample=None,
    verbose: bool = True,
) -> Controller:
    """Make a model keep a few bits an element for the backward pass, in place, and report what was done.

    Layers of torch.nn and transformers keep quantised inputs, activations keep few-bit codes, dropout and
    pooling keep packed masks and positions (exact). Module objects stay, only their classes change, each to
    a subclass of torch's: parameters, buffers, hooks, tied modules, `state_dict` keys, device, dtype and
    training flags are as before, and so is the training loop. In eval mode and under no_grad nothing is
    compressed. A second call undoes the first, so that its settings are all there is.

    level, of ActNN's Table 2: "L0" (nothing; undoes a conversion), "L1" (convolutions only), "L2" (all layers),
    "L2.5" (bits are shared out between samples), "L3" (between samples and layers, as training shows where they
    are needed; docs/controller.md), "L4" (what is kept on a GPU goes to the host until it is needed) or "L5" (and
    the GPU's memory is reserved in expandable segments; both docs/offload.md); L2 unless bits is not whole or a
    budget is given, then L3. bits: 1 to 8, of quantised inputs (4); an average, as 1.75, from L2.5 on. budget: in
    place of bits, all that a forward of `sample` may keep: bytes, or "6 GiB". interval: steps from one adaptation
    to the next (200; the first are after steps 1, 2, 4, 8 ...). activation_bits: of few-bit activations (3; those
    with a derivative of two values keep 1, which is exact). attention_bits: of q, k and v (as bits, but 4 at
    least; at L3 part of the average). policy: "fixed" (as None), or "error-bound": bits of each tensor follow from a bound on the
    error of the gradients that it goes into, e2 (0.5) times their squared norm (docs/error_bound.md), found out every
    interval (100) steps; window: by the "mean" (default) or "max" of the last ten; codec: how they are kept ("quant",
    "quant+zvc", "error-bounded", "jpeg"; docs/codecs.md); by_channel: channels of samples have bits of their own. It takes no
    level, bits, budget or fuse; activation_bits and attention_bits, where given, stay. group_size: features that share a range (256). minimum:
    "auto", "bfloat16" or "float32", see docs/quantiser.md. copies: 2 for norms that keep two independent copies.
    functional: also compress functions of torch and torch.nn.functional that a forward calls (F.gelu,
    F.scaled_dot_product_attention, a product of two activations ...) while the model trains in eager mode.
    fuse: "preactivation": batch and layer norms keep their normalised input in fixed point, from which a ReLU or LeakyReLU
    after them has its gradient, exactly, and the linear layers and convolutions after either restore their inputs, whatever
    their own bits are: one tensor a block in place of three (docs/preactivation.md). At level L2, with copies=1.
    include, exclude: globs over dotted module paths ("" is the model itself; any path of a shared module
    counts; a glob that matches a module matches what is inside), or a function (path, module) -> bool;
    exclude wins. overrides: {glob: bits, or a mapping of bits, activation_bits, attention_bits,
    group_size, minimum, copies, or None to leave as it is}; the last glob that matches wins, and what it says
    of bits is not adapted. sample: a tensor, a tuple of inputs or a mapping of keyword inputs, for which the report
    counts the bytes that the exact model keeps and this one. verbose: print the report.

    Raises InputError for invalid settings, a model that is not a module, a glob that no module matches, and a budget
    that 1 bit per element exceeds. If the conversion does not complete, also by Ctrl-C, the model stays unchanged.
    """
    bits, activation_bits, attention_bits = map(
        plain_number, (bits, activation_bits, attention_bits)
    )
    bound = _checked_bound(policy, e2, window, codec, by_channel)
    if bound is not None:
        _check_alone(bits=bits, budget=budget, level=level, fuse=fuse)
    else:
        level = _level(level, bits, budget)
        _check_fraction(level, bits, attention_bits)
    usual = (MOST, MOST) if bound is not None else (LEVEL_BITS, ACTIVATION_BITS)
    settings = Settings(
        usual[0] if bits is None else bits,
        usual[1] if activation_bits is None else activation_bits,
        attention_bits,
        group_size,
        minimum,
        copies,
        functional,
        fuse,
        is_mixed=bound is not None or level in MIXED,
        adapts=bound is not None or level in ADAPTING,
        bounds_activations=bound is not None and activation_bits is None,
    ).check()
    settings = _at_level(settings, level, bits, activation_bits, attention_bits)
    _check_sample(sample)
    budget = _checked_budget(budget, level, bits, sample, model)
    if interval is None:
        interval = INTERVAL if bound is None else BOUND_INTERVAL
    check_interval(interval)
    _check_fuse(fuse, level, settings)
    if settings is None:
        restore_(model)
        return _reported(model, Report((), ()), Session(), level, verbose)
    before = {}
    if sample is not None:
        _by_op(model, sample)  # what the model cannot take is found while nothing is changed

    def measure():
        if sample is not None:
            before.update(_by_op(model, sample))

    selection = include, exclude, overrides or {}
    controller = convert(model, settings, *selection, measure)
    elements = None
    if budget is not None:
        bits, elements = _bits_for(model, sample, budget)
        settings = replace(settings, bits=bits)
        controller = convert(model, settings, *selection)
    if bound is not None:
        taking_part = _bounded_activations(model, settings, selection)
        own = bound, _names(model), interval, _channels(model), *taking_part
        controller.session.variables = Guarantee(*own)
    elif settings.adapts:
        adaptation = Adaptation(settings.bits, _names(model), interval, elements, budget)
        controller.session.variables = adaptation
    how = _of_level(level, settings, interval) if bound is None else _of_bound(bound, interval)
    notes, allocator = [how], None
    if settings.fuse is not None:
        notes.append(fused.note(model))
    if budget is not None:
        notes.append(f"budget: {amount(budget)} for the sample")
        if settings.bits == MOST:
            notes[-1] += f", more than {MOST} bits an element, the most that there are, need"
    if level in OFFLOADING:
        controller.session.contexts += (Offload(),)
    if level == "L5":
        allocator = use_expandable_segments()
        notes.append(str(allocator))
    changes = {"notes": tuple(notes)}
    if settings.functional:
        row = settings.bits, settings.bits_of_attention, settings.activation_bits
        changes["functions"] = row
    saved = None
    if sample is not None:
        saved = _saved(model, sample)
        changes |= {"kept": (before, _sums(saved)), "is_training": model.training}
    if settings.fuse is not None:
        seen = saved if model.training else None
        changes["converted"] = fused.shared(model, controller.report.converted, seen)
    report = replace(controller.report, **changes)
    policy = None if bound is None else POLICY
    return _reported(model, report, controller.session, level, verbose, allocator, policy)


@whole_or_not_at_all
def restore_(model: nn.Module) -> None:
    """Undo `compress_`: every converted module has its class back. Modules made as fewbit's own stay.

    If a parametrization or fully_shard has subclassed the class of a converted module, that subclass is rebuilt on
    the module's original class. Raises InputError, without changing the model, if the model is not a module, or if
    the class of a converted module was changed in another way after the conversion.
    """
    _check_model(model)
    classes = {}
    for path, module in model.named_modules():
        original = vars(module).get(_ORIGINAL)
        if original is not None:
            classes[module] = _class_before(path or "the model", module, original)
    transformers_attention.remove(model)
    for module in list(model.modules()):
        untell(module)
        _remove_hooks(module)
        original = vars(module).pop(_ORIGINAL, None)
        if original is None and isinstance(module, Quantised) and not _is_private(module.quantiser):
            module.quantiser.session = None  # made as fewbit's own
        if original is not None:
            for name in original.added:
                vars(module).pop(name, None)
            vars(module).update(original.attributes)
            module.__class__ = classes[module]
        for name, function in vars(module).pop(_FUNCTIONS, {}).items():
            delattr(module, name)
            setattr(module, name, function)


def _class_before(path: str, module: nn.Module, original: Original) -> type[nn.Module]:
    """Return the class that `restore_` gives a converted module. Raises InputError if it cannot be determined."""
    cls = untold(module)
    before = (
        rebased(cls, original.becomes, original.cls) if issubclass(cls, original.becomes) else None
    )
    if before is None:
        raise InputError(
            f"{path}: expected the class that compress_ gave it, got {type(module).__name__}, which was put in its "
            "place since; undo that first"
        )
    return before


def convert(
    model, settings: Settings, include="*", exclude=(), overrides=None, between=lambda: None
) -> Controller:
    """`compress_` without levels, samples and printing; of activations alone if settings say so.

    With other families too an earlier conversion is undone first, so that the new settings are all there is.
    between: called when everything is checked and undone, before anything is converted.
    """
    settings.check()
    _check_model(model)
    selection = include, exclude, overrides or {}
    found, chosen, each = _selected(model, settings, *selection)
    whole = settings.families != (kinds.ACTIVATION,)
    if whole:
        restore_(model)
        found, chosen, each = _selected(model, settings, *selection)
    between()
    session = Session(variables=Variables() if settings.is_mixed else None)
    rows = []
    inside = {
        id(child)
        for module in model.modules()
        if isinstance(module, PreActivation)
        for child in module.children()
    }
    for (paths, module, attribute), is_chosen, own in zip(found, chosen, each, strict=True):
        if id(module) in inside:
            continue
        rows.append(_convert(paths[0], module, attribute, is_chosen, own, session, whole))
    if kinds.LAYER in settings.families:
        rows += _convert_attention(model, found, chosen, each, session)
    if whole:
        _tell_apart(model, settings, found, chosen, each, session)
        _attach(model, settings, session)
    converted = tuple(row for row in rows if isinstance(row, Converted))
    left_alone = tuple(row for row in rows if isinstance(row, LeftAlone))
    return Controller(model, Report(converted, left_alone), session)


def name_of_attention(path: str) -> str:
    """The name of what the module at that path keeps of q, k and v."""
    return f"{path}:attention"


def _names(model) -> list[str]:
    """Of all quantisers that the model's layers, and the functions that its modules call, may have."""
    names = []
    for path, _ in model.named_modules():
        names += [path, name_of_attention(path)]
        names += [name_of_call(path, each) for each in QUANTISED]
    return names


def _channels(model) -> dict[str, int]:
    """{path: how many} of layers whose input has channels in dimension 1."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, Quantised):
            for name in ("in_channels", "num_features", "num_channels"):
                count = getattr(module, name, None)
                if isinstance(count, int):
                    found[path] = count
    return found


def _bounded_activations(model, settings, selection) -> tuple[list[str], dict[str, int]]:
    """Activations of modules, and of functions that modules call: names of those whose bits follow from a bound, and
    {name: bits} of those whose bits were given.
    """
    found, chosen, each = _selected(model, settings, *selection)
    names, given = [], {}
    for (paths, module, attribute), is_chosen, own in zip(found, chosen, each, strict=True):
        if not is_chosen or own is None or attribute is not None:
            continue
        of_module = {}
        if kinds.is_activation(type(module)):
            if _ORIGINAL in vars(module):  # else it was few-bit before, with bits of its own
                of_module = {paths[0]: module.bits}
        elif own.functional and _may_call(module):
            of_module = {
                name_of_call(paths[0], function): bits_of_call(function, own.activation_bits)
                for function in ACTIVATIONS
            }
        if own.bounds_activations:
            names += of_module
        else:
            given |= of_module
    return names, given


def _attach(model, settings: Settings, session: Session) -> None:
    """Tells the session of the model's forwards."""
    if settings.functional:
        session.contexts = (Calls(settings.of_functions(session)),)
    elif not any(isinstance(each, Quantised) for each in model.modules()):
        return
    told = {}
    for path, module in model.named_modules():
        # Of those without a forward, like ModuleList, they are never called.
        if (module is model or _may_call(module)) and not _is_scripted(module):
            told[module] = path, class_told(module)
        elif settings.is_mixed and kinds.is_activation(type(module)):
            vars(module).update({PATH: path, SESSION: session})
    for module, (path, cls) in told.items():
        vars(module)[PATH] = path
        tell(module, session, cls)


def _tell_apart(model, settings, found, chosen, each, session) -> None:
    """Keeps functions exact that excluded modules call, and gives those of others their own settings."""
    own = {
        id(module): settings if is_chosen else None
        for (_, module, attribute), is_chosen, settings in zip(found, chosen, each, strict=True)
        if attribute is None
    }
    if all(each is settings for each in own.values()):
        return
    made = {}
    for module in model.modules():
        if id(module) not in own or _is_scripted(module):
            continue  # made from a function by the conversion: a layer of ours
        mine = own[id(module)]
        if mine is None:
            says = True
        elif not _may_call(module):
            continue
        elif mine is settings:
            says = False
        else:
            says = made.setdefault(mine, mine.of_functions(session))
        switch = Switch(says)
        module.register_forward_pre_hook(switch.enter, prepend=True)
        module.register_forward_hook(switch.leave, always_call=True)


def _is_scripted(module) -> bool:
    """Whether torch lets it have no hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def _may_call(module) -> bool:
    """Whether its forward may call modules, or functions that are not torch's or ours."""
    if next(module.children(), None) is not None:
        return True
    return not (kinds.is_fewbit(module) or type(module).__module__.startswith("torch.nn."))


def _level(level, bits, budget) -> str:
    """The level asked for, or that which what is asked for needs."""
    if level is not None:
        if level not in LEVELS:
            raise InputError(f"expected one of {', '.join(LEVELS)} for level, got {level!r}")
        return level
    if bits is not None:
        check_average(bits)
    is_average = isinstance(bits, float)
    return "L3" if is_average or budget is not None else "L2"


def _check_fraction(level, *bits) -> None:
    for each in bits:
        if level not in MIXED and isinstance(each, float) and 1 <= each <= 8:
            raise InputError(
                f"expected whole bits at level {level}, got {each!r}: averages are for level L2.5 and above"
            )


def _checked_budget(budget, level, bits, sample, model) -> int | None:
    """In bytes."""
    if budget is None:
        return None
    if isinstance(model, nn.Module) and not model.training:
        raise InputError("budget: expected a model in training mode, got one in evaluation mode")
    if level not in ADAPTING:
        raise InputError(f"budget: expected level L3 or above, got {level}")
    if bits is not None:
        raise InputError(f"expected bits or a budget, got bits={bits!r} and budget={budget!r}")
    if sample is None:
        raise InputError("budget: expected a sample too, as what is kept depends on the inputs")
    return bytes_of(budget)


def _bits_for(model, sample, budget: int) -> tuple[float, dict]:
    """Return the average number of bits with which the model fits the budget, and the number of elements of each variable."""
    sizes = Sizes()
    with measuring(sizes):
        kept = sum(_by_op(model, sample).values())
    return sizes.bits(budget, kept), sizes.elements


def _checked_bound(policy, e2, window, codec, by_channel) -> Bound | None:
    """What policy="error-bound" is asked for; None with another."""
    if policy not in (None, "fixed", POLICY):
        raise InputError(f"expected 'fixed' or {POLICY!r} for policy, got {policy!r}")
    given = {"e2": e2, "window": window, "codec": codec, "by_channel": by_channel or None}
    given = {name: value for name, value in given.items() if value is not None}
    if policy != POLICY:
        for name, value in given.items():
            raise InputError(
                f"{name}: expected policy={POLICY!r} with it, got policy={policy!r} and {name}={value!r}"
            )
        return None
    bound = Bound(**given)
    is_number = isinstance(bound.e2, Real) and not isinstance(bound.e2, bool)
    if not is_number or not 0 < bound.e2 < math.inf:
        raise InputError(f"expected a finite number above 0 for e2, got {bound.e2!r}")
    if bound.window not in WINDOWS:
        raise InputError(f"expected {' or '.join(WINDOWS)} for window, got {bound.window!r}")
    if not isinstance(bound.by_channel, bool):
        raise InputError(f"expected True or False for by_channel, got {bound.by_channel!r}")
    check_codec(bound.codec)
    return replace(bound, e2=float(bound.e2))


def _check_alone(**given) -> None:
    """Refuses what the bound is there to find, or is a matter of ActNN's levels."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"expected no {name} with policy={POLICY!r}, got {name}={value!r}")


def _of_bound(bound: Bound, interval: int) -> str:
    """What the report says of it."""
    unit = "channels of samples" if bound.by_channel else "samples"
    how = f"bits by layers and {unit}" if bound.codec == QUANT else f"codec {bound.codec}"
    return (
        f"policy {POLICY}: e2 = {bound.e2:.4g}, {how}, {bound.window} of the last ten, found out {_every(interval)}; "
        f"{MOST} bits before the first: what this report says holds for the first steps, later bits follow from the bound "
        "(controller.bounds)"
    )


def _at_level(settings, level, *bits) -> Settings | None:
    """The settings at that level; None for L0. bits: those that were asked for."""
    if level == "L0":
        if bits != (None,) * len(bits):
            raise InputError("expected no bits at level L0, which compresses nothing")
        return None
    if level == "L1":
        return replace(settings, functional=False, families=(kinds.CONVOLUTION,))
    return settings


def _of_level(level, settings, interval) -> str:
    """What the report says of it."""
    if not settings.is_mixed:
        return f"level {level}"
    text = f"{settings.bits:.4g} bits on average, shared between samples"
    if settings.adapts:
        text += f" and layers, adapted {_every(interval)}"
    if level in OFFLOADING:
        text += "; what is kept on a GPU goes to the host until the backward pass"
    return f"level {level}: {text}"


def _every(interval: int) -> str:
    return "every step" if interval == 1 else f"every {interval} steps"


def _check_fuse(fuse, level, settings) -> None:
    if fuse is None:
        return
    if fuse != "preactivation":
        raise InputError(f"expected 'preactivation' or None for fuse, got {fuse!r}")
    if level != "L2":
        raise InputError(
            f"fuse: expected level L2, got {level}: of fixed-point copies neither samples nor layers share bits"
        )
    if settings.copies != 1:
        raise InputError(
            f"fuse: expected copies=1, got {settings.copies}: two fixed-point copies would be alike"
        )


def _reported(model, report, session, level, verbose, allocator=None, policy=None) -> Controller:
    if verbose:
        from rich.console import Console

        Console().print(report)
    return Controller(model, report, session, allocator, level, policy)


def _check_sample(sample) -> None:
    if sample is not None and not isinstance(sample, tuple | Mapping | torch.Tensor):
        raise InputError(
            "sample: expected a tensor, a tuple of positional inputs or a mapping of keyword inputs, "
            f"got {type(sample).__name__}"
        )


def _saved(model, sample) -> SavedBytes:
    """What a forward of the sample keeps."""
    # Of a part of a larger tensor the meter would count all that it holds on to.
    sample = tree_map(alone, sample)
    inputs = (sample,) if isinstance(sample, torch.Tensor) else sample
    named = inputs if isinstance(inputs, Mapping) else {}
    inputs = () if named else inputs
    return saved_bytes(model, *inputs, **named)


def _by_op(model, sample) -> dict[str, int]:
    return _sums(_saved(model, sample))


def _sums(saved: SavedBytes) -> dict[str, int]:
    """Bytes by op."""
    sums = {}
    for entry in saved.kept:
        name = entry.node or "unknown"
        sums[name] = sums.get(name, 0) + entry.bytes
    return sums


def _check_model(model) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")


# -- Which modules -------------------------------------------------------------------------------------------


def _selected(model, settings, include, exclude, overrides):
    """(modules, whether each is to be converted, its settings or None). Raises for what there is not."""
    found = _found(model)
    return found, _chosen(found, include, exclude), _overridden(found, settings, overrides)


def _found(model: nn.Module) -> list[tuple[list[str], nn.Module, str | None]]:
    """(paths, module, None) of every module, (paths, owner, attribute) of activations held as functions."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault((id(module), None), ([], module, None))[0].append(path)
        attribute = kinds.FUNCTION_ATTRIBUTES.get(class_of(module))
        if attribute is not None and getattr(module, attribute, None) in kinds.FUNCTIONS:
            of_owner = found.setdefault((id(module), attribute), ([], module, attribute))
            of_owner[0].append(f"{path}.{attribute}".lstrip("."))
    return list(found.values())


def _chosen(found, include: Filter, exclude: Filter) -> list[bool]:
    included = _matches(found, include, "include")
    excluded = _matches(found, exclude, "exclude")
    return [a and not b for a, b in zip(included, excluded, strict=True)]


def _matches(found, which: Filter, name: str) -> list[bool]:
    if callable(which) and not isinstance(which, type):
        return [any(which(path, module) for path in paths) for paths, module, _ in found]
    globs = (which,) if isinstance(which, str) else which
    if not isinstance(globs, Iterable) or isinstance(globs, type):
        raise InputError(
            f"{name}: expected a glob, a list of globs or a function (path, module) -> bool, "
            f"got {which!r}"
        )
    result = [False] * len(found)
    for glob in tuple(globs):
        if not isinstance(glob, str):
            raise InputError(f"{name}: expected a glob over dotted module paths, got {glob!r}")
        of_glob = [any(_is_within(path, glob) for path in paths) for paths, _, _ in found]
        if not any(of_glob):
            raise InputError(f"{name}: expected a glob that matches a module, got {glob!r}")
        result = [a or b for a, b in zip(result, of_glob, strict=True)]
    return result


def _is_within(path: str, glob: str) -> bool:
    """Whether the glob matches the path, or that of a module around it."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:n]), glob) for n in range(len(parts) + 1))


_OVERRIDES = ("bits", "activation_bits", "attention_bits", "group_size", "minimum", "copies")


def _overridden(found, settings: Settings, overrides: Mapping) -> list[Settings | None]:
    if not isinstance(overrides, Mapping):
        raise InputError(f"overrides: expected a mapping of globs to settings, got {overrides!r}")
    result = [settings] * len(found)
    for glob, change in overrides.items():
        if not isinstance(glob, str):
            raise InputError(f"overrides: expected a glob over dotted module paths, got {glob!r}")
        change = plain_number(change)
        if isinstance(change, int | float) and not isinstance(change, bool):
            of_activations = {"activation_bits": change} if isinstance(change, int) else {}
            change = {"bits": change, "attention_bits": change, **of_activations}
        if change is not None and not (
            isinstance(change, Mapping) and set(change) <= set(_OVERRIDES)
        ):
            expected = f"bits, a mapping of {', '.join(_OVERRIDES)}, or None"
            raise InputError(f"overrides[{glob!r}]: expected {expected}, got {change!r}")
        try:
            own = None if change is None else _changed(settings, change).check()
        except InputError as error:
            raise InputError(f"overrides[{glob!r}]: {error}") from None
        for i, matches in enumerate(_matches(found, glob, "overrides")):
            if matches:
                result[i] = own
    return result


def _changed(settings, change) -> Settings:
    """With what an override says; bits that it says stay."""
    own = {
        "adapts": settings.adapts and "bits" not in change,
        "bounds_activations": settings.bounds_activations and "activation_bits" not in change,
    }
    return replace(settings, **change, **own)


# -- One module ----------------------------------------------------------------------------------------------


def _convert(
    path, module, attribute, chosen, settings, session, whole
) -> Converted | LeftAlone | None:
    """Converts a module, or says why not; None for modules that there is nothing to say of."""
    name = type(module).__name__ if attribute is None else getattr(module, attribute).__name__
    if attribute is None and kinds.is_fewbit(module):
        return _again(path, module, chosen, settings, session, whole)
    held = kinds.FUNCTIONS[getattr(module, attribute)]() if attribute else module
    kind = kinds.kind_of(held)
    if kind is None:
        reason = kinds.why_not(module) if whole or kinds.is_like_an_activation(module) else None
        if reason and settings is not None and settings.functional and "subclass" in reason:
            reason += "; functions that it calls are compressed"
        return LeftAlone(path, name, reason) if reason else None
    if not chosen or settings is None:
        return LeftAlone(path, name, "excluded")
    if kind.family not in settings.families:
        return None
    reason = kinds.replaced(held)
    if reason is not None:
        return LeftAlone(path, name, reason)
    if attribute is not None:
        vars(module).setdefault(_FUNCTIONS, {})[attribute] = getattr(module, attribute)
        # A function attribute is no submodule: it has to go before a module of its name can come.
        delattr(module, attribute)
        setattr(module, attribute, held.train(module.training))
        name = f"{name} (function)"
    attributes = kind.attributes(held)
    names = (*attributes, *_settings_of(kind.becomes))
    replaced = {each: vars(held)[each] for each in names if each in vars(held)}
    vars(held)[_ORIGINAL] = Original(type(held), kind.becomes, replaced, names)
    vars(held).update(attributes)
    held.__class__ = kind.becomes
    bits = _configure(path, held, kind.one_bit, settings, session)
    return Converted(path, name, kinds.name_of(kind.becomes), bits)


def _convert_attention(model, found, chosen, each, session) -> list[Converted | LeftAlone]:
    """Attention of transformers' models, which no module of its own computes."""
    own = {
        id(module): settings
        for (_, module, attribute), is_chosen, settings in zip(found, chosen, each, strict=True)
        if attribute is None and is_chosen and settings is not None
    }

    def quantiser(path, module):
        settings = own.get(id(module))
        if settings is None:
            return None
        return settings.attention_quantiser(session, name_of_attention(path))

    reached, left = transformers_attention.install(model, quantiser)
    rows = []
    for path in reached:
        module = model.get_submodule(path)
        bits = quantiser(path, module).average
        rows.append(Converted(path, type(module).__name__, "fewbit attention", bits))
    for path, reason in left.items():
        rows.append(LeftAlone(path, "attention", reason))
    return rows


def _again(path, module, chosen, settings, session, whole) -> Converted | LeftAlone | None:
    """A module that is few-bit already: made so by hand, or an activation converted earlier."""
    if isinstance(module, Quantised):
        if not whole:
            return None
        own = module.quantiser
        rest = {"fuse": settings is not None and settings.fuse is not None}
        module.quantiser = Quantiser(own.bits, own.group_size, own.minimum, session, path, **rest)
    if isinstance(module, PreActivation):
        reason = f"few-bit already: one tensor of {module.bits} bits an element"
        return LeftAlone(path, type(module).__name__, reason)
    name, original = type(module).__name__, vars(module).get(_ORIGINAL)
    if original is None or not chosen or settings is None:
        return LeftAlone(path, name, f"few-bit already: {module!r}")
    kind = kinds.of_class(original.cls)
    bits = _configure(path, module, kind.one_bit, settings, session)
    return Converted(path, original.cls.__name__, kinds.name_of(type(module)), bits)


def _is_private(quantiser: Quantiser) -> bool:
    """Whether it is that of a block which stays as it was made, whatever is around it."""
    return quantiser.session is not None and quantiser.session.is_private


def _settings_of(cls) -> tuple[str, ...]:
    """The attributes by which a class of ours knows what to keep."""
    if issubclass(cls, Quantised):
        return "quantiser", "copies", "attention_quantiser"
    return ("bits", "table") if kinds.is_activation(cls) else ()


def _configure(path, module, one_bit, settings, session) -> float | None:
    if isinstance(module, Quantised):
        module.quantiser = settings.quantiser(session, path)
        if hasattr(type(module), "copies"):
            module.copies = settings.copies
        if hasattr(type(module), "attention_quantiser"):
            module.attention_quantiser = settings.attention_quantiser(
                session, name_of_attention(path)
            )
        return settings.bits
    if kinds.is_activation(type(module)):
        module.bits, module.table = 1 if one_bit else settings.activation_bits, None
        return module.bits
    return None


def _remove_hooks(module) -> None:
    vars(module).pop(PATH, None), vars(module).pop(SESSION, None)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Switch):
                del hooks[number]
                module._forward_hooks_always_called.pop(number, None)
