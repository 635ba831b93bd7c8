"""Attention in models of transformers, through transformers' interface for implementations of attention.

This file imports transformers only if the process already has.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from fewbit.functional.attention.attention import How, attention
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.saving_function import is_differentiated

__all__ = ["install", "remove"]

NAME = "fewbit"
_ATTACHED = "_fewbit_attention"
_BEFORE = "_fewbit_attention_before"
_OTHERS_DECIDE = re.compile(
    r"""_attn_implementation\s*(?:[!=]=\s*["']sdpa["']|(?:not\s+)?in\b)""",
)


@dataclass
class _Attached:
    """The attribute that `install` gives to attention modules. A process that unpickles it registers "fewbit" too."""

    quantizer: Quantizer

    def __setstate__(self, state):
        self.__dict__.update(state)
        _register()


def install(
    model: nn.Module,
    quantizer: Quantizer | Callable[[str, nn.Module], Quantizer | None],
) -> tuple[list[str], dict[str, str]]:
    """Make the models of transformers inside `model` save q, k and v of their attention quantized.

    If the attention implementation in a model's `config` is "sdpa", it becomes "fewbit", which computes the same result. For other models
    with the same `config`, "fewbit" runs "sdpa". `quantizer` may be a function (path, module) that returns a module's quantizer or None.

    Returns:
        The paths of the attention modules that use "fewbit", and {path: reason} of the models that have attention and cannot
        use it.
    """
    reached, left = [], {}
    configs, reported = {}, set()
    for path, inner in _models(model):
        config = inner.config
        if id(config) not in configs:
            reason = _why_not(type(inner), config)
            configs[id(config)] = config._attn_implementation, reason
        before, reason = configs[id(config)]
        if reason is not None:
            # A model inside another one often has the same config; the reason is then reported once.
            if id(config) not in reported and any(map(_is_attention, inner.modules())):
                left[path] = reason
                reported.add(id(config))
            continue
        _register()
        if before != NAME:
            vars(inner)[_BEFORE] = before
            _set(config, NAME)
    using = {config for config, (_, reason) in configs.items() if reason is None}
    for path, module in model.named_modules():
        if id(getattr(module, "config", None)) not in using or not _is_attention(module):
            continue
        own = quantizer if isinstance(quantizer, Quantizer) else quantizer(path, module)
        vars(module).pop(_ATTACHED, None)
        if own is not None:
            vars(module)[_ATTACHED] = _Attached(own)
            reached.append(path)
    return reached, left


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    for module in model.modules():
        vars(module).pop(_ATTACHED, None)
    for _, inner in _models(model):
        before = vars(inner).pop(_BEFORE, None)
        if before is not None and inner.config._attn_implementation == NAME:
            _set(inner.config, before)


def _models(model):
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return
    for path, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            yield path, module


def _is_attention(module) -> bool:
    return (
        type(module).__module__.startswith("transformers.") and "Attention" in type(module).__name__
    )


def _set(config, name: str) -> None:
    # The public property would also set the configurations of other models inside this one.
    config._attn_implementation_internal = name


def _why_not(cls, config) -> str | None:
    if config._attn_implementation == NAME:
        return None
    if config._attn_implementation == "eager":
        return "it uses eager, which may be asked for attention weights; functions that it calls are compressed"
    if config._attn_implementation != "sdpa":
        return f"it uses {config._attn_implementation}"
    if config.output_attentions:
        return "it returns attention weights"
    if not getattr(cls, "_supports_sdpa", False):
        return "it does not support torch's attention"
    return _why_not_by_source(cls.__module__)


@cache
def _why_not_by_source(name: str) -> str | None:
    try:
        source = inspect.getsource(sys.modules[name])
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: F401
    except (OSError, TypeError, KeyError, ImportError):
        return "transformers' attention interface is not there"
    if "ALL_ATTENTION_FUNCTIONS" not in source:
        return "its attention does not go through transformers' interface"
    if _OTHERS_DECIDE.search(source):
        return "it does otherwise for attention that is not called sdpa"
    return None


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


def _enables_gqa(theirs, *arguments) -> bool:
    """Return whether torch repeats the heads of key and value, and not transformers, as older versions do."""
    try:
        return theirs.use_gqa_in_sdpa(*arguments)
    except (AttributeError, TypeError):
        return False


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Compute transformers' sdpa_attention_forward. Key and value are saved before their heads are repeated."""
    from transformers.integrations import sdpa_attention as theirs

    attached = getattr(module, _ATTACHED, None)
    inputs = query, key, value, attention_mask, position_bias
    unusual = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "cache"))
    unusual = unusual or kwargs.get("output_attentions", False)
    repeats = getattr(module, "num_key_value_groups", 1)
    length = query.shape[2]
    unusual = unusual or (repeats > 1 and length == 1)
    if attached is None or not module.training or unusual or not is_differentiated(*inputs):
        arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        if position_bias is not None:
            arguments["position_bias"] = position_bias
        return theirs.sdpa_attention_forward(module, *inputs[:4], **arguments)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = length > 1 and attention_mask is None and is_causal
    enable_gqa = repeats > 1 and _enables_gqa(theirs, attention_mask, key, value)
    if is_causal and key.shape[2] > length:
        key, value = key[:, :, :length], value[:, :, :length]
        if position_bias is not None:
            position_bias = position_bias[:, :, :, :length]
    how = How(dropout, is_causal, scaling, enable_gqa, 1 if enable_gqa else repeats)
    y = attention(query, key, value, attention_mask, position_bias, how, attached.quantizer)
    return y.transpose(1, 2).contiguous(), None
