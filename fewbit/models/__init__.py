"""Standard architectures for measurements. Models for images have the parameter names and shapes of torchvision's."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import NamedTuple

from fewbit.errors import FewbitError


class Family(NamedTuple):
    """An architecture and its models.

    Attributes:
        name: the name of the architecture, as in the help of `fewbit memory`.
        module: the name of the Python file in this folder.
        builder: the class or function in it, called with a model's name, and perhaps a callable that makes the activation.
        has_relu: whether the activation is ReLU, in place of which the paper Few-bit Backward measured GELU.
    """

    name: str
    module: str
    builder: str
    models: tuple[str, ...]
    is_text: bool = False
    has_relu: bool = False


FAMILIES = (
    Family(
        "ResNet",
        "resnet",
        "ResNet",
        ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
        has_relu=True,
    ),
    Family("VGG", "vgg", "VGG", ("vgg11", "vgg13", "vgg16", "vgg19"), has_relu=True),
    Family(
        "DenseNet",
        "densenet",
        "DenseNet",
        ("densenet121", "densenet161", "densenet169", "densenet201"),
        has_relu=True,
    ),
    Family(
        "EfficientNet",
        "efficientnet",
        "EfficientNet",
        ("efficientnet_b0", "efficientnet_b3", "efficientnet_b7"),
    ),
    Family("RoBERTa", "transformer", "build", ("roberta-base", "roberta-large"), is_text=True),
    Family(
        "GPT-2",
        "transformer",
        "build",
        ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
        is_text=True,
    ),
)
_SMALLEST_IMAGE, _LARGEST_IMAGE = 64, 8192


def names() -> tuple[str, ...]:
    """Return the names of all models, by architecture and size."""
    return tuple(name for family in FAMILIES for name in family.models)


def family(name: str) -> Family:
    """Return the `Family` of a model's name."""
    return next(family for family in FAMILIES if name in family.models)


def resolve(name: str) -> str:
    """Return a model's name in the spelling of `names`, whatever its case, hyphens, underscores and spaces. Raise FewbitError for others."""
    known = {_plain(model): model for model in names()}
    found = known.get(_plain(name))
    if found is None:
        close = difflib.get_close_matches(_plain(name), known, n=3)
        hint = f"did you mean {' or '.join(known[key] for key in close)}?"
        raise FewbitError(
            f"unknown model {name!r}: {hint if close else 'expected ' + ', '.join(names())}"
        )
    return found


def _plain(name):
    return "".join(character for character in name.lower() if character.isalnum())


def check_size(name: str, size: int) -> int:
    """Return `size`, the side of images in pixels or the number of tokens. Raise FewbitError if the model does not accept it."""
    if family(name).is_text:
        from fewbit.models.transformer import LONGEST

        if not 1 <= size <= LONGEST[name]:
            raise FewbitError(f"{name}: expected 1 to {LONGEST[name]} tokens, got {size}")
    elif not _SMALLEST_IMAGE <= size <= _LARGEST_IMAGE:
        raise FewbitError(
            f"{name}: expected an image size of {_SMALLEST_IMAGE} to {_LARGEST_IMAGE} pixels, "
            f"got {size}"
        )
    return size


def build(name: str, activation: str | Callable | None = None):
    """Build a torch module with random weights, in training mode. Example: `build("resnet18", "gelu")`.

    The module takes images, (batch, 3, height, width), or token numbers, (batch, length) int64.

    Args:
        name: The name of a model.
        activation: A key of `fewbit.models.activation_names.FACTORIES`, a callable that returns a torch.nn.Module, or None.

    Raises:
        FewbitError: The name of the model or the activation is unknown, or the package transformers is needed and not
            installed.
    """
    name = resolve(name)
    if isinstance(activation, str):
        activation = _factory(activation)
    found = family(name)
    make = getattr(importlib.import_module(f"fewbit.models.{found.module}"), found.builder)
    model = make(name) if activation is None else make(name, activation)
    return model.train()


def _factory(activation):
    from fewbit.models.activation_names import FACTORIES

    if activation not in FACTORIES:
        close = difflib.get_close_matches(activation.lower(), FACTORIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(FACTORIES)}"
        raise FewbitError(f"unknown activation {activation!r}: {hint}")
    return FACTORIES[activation]
