"""RoBERTa and GPT-2 with random weights, built from configurations of transformers. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fewbit.extras import needed_for
from fewbit.models.activation_names import is_activation

# The sizes of Liu et al. (2019) and Radford et al. (2019); all other values are the configuration's defaults.
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
SIZES = {
    "roberta-base": _ROBERTA,
    "roberta-large": _ROBERTA | _LARGE,
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}
LONGEST = {name: 512 if name.startswith("roberta") else 1024 for name in SIZES}


def build(
    name: str,
    activation: Callable | None = None,
    attention: str = "eager",
    has_head: bool = False,
) -> nn.Module:
    """Build a model with random weights. It maps `input_ids` (batch, length) int64 to hidden states.

    Args:
        name: A key of `SIZES`.
        activation: Returns the activation module of a feed-forward layer; None for the model's own.
        attention: The argument `attn_implementation` of transformers.
        has_head: Whether the model computes logits too, and a loss from `labels`.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    with needed_for(f"the model {name}"):
        import transformers
    options = dict(SIZES[name], attn_implementation=attention)
    if name.startswith("roberta"):
        kind = transformers.RobertaForMaskedLM if has_head else transformers.RobertaModel
        model = kind(transformers.RobertaConfig(**options))
    else:
        kind = transformers.GPT2LMHeadModel if has_head else transformers.GPT2Model
        # Only generation uses the cache of keys and values.
        model = kind(transformers.GPT2Config(**options, use_cache=False))
        model.loss_type = "ForCausalLM"  # what transformers uses after a warning
    if activation is not None:
        _replace_activations(model, activation)
    return model


def _replace_activations(model: nn.Module, activation: Callable) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            # The Tanh of RoBERTa's pooler does not belong to a feed-forward layer.
            if is_activation(child) and not isinstance(child, nn.Tanh):
                setattr(module, name, activation())
