"""Standard architectures to measure and to try: own definitions with torchvision's parameters and keys.

Nothing here imports torch until a model is built.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable

from fewbit.errors import FewbitError

# {family: (module, class or function that builds, names)}
_FAMILIES = {
    "ResNet": (
        "resnet",
        "ResNet",
        ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    ),
    "VGG": ("vgg", "VGG", ("vgg11", "vgg13", "vgg16", "vgg19")),
    "DenseNet": (
        "densenet",
        "DenseNet",
        ("densenet121", "densenet161", "densenet169", "densenet201"),
    ),
    "EfficientNet": (
        "efficientnet",
        "EfficientNet",
        ("efficientnet_b0", "efficientnet_b3", "efficientnet_b7"),
    ),
    "RoBERTa": ("transformer", "build", ("roberta-base", "roberta-large")),
    "GPT-2": ("transformer", "build", ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")),
}
TEXT = ("RoBERTa", "GPT-2")
_SMALLEST_IMAGE, _LARGEST_IMAGE = 64, 8192


def names() -> tuple[str, ...]:
    """Every model, by family and size."""
    return tuple(name for _, _, members in _FAMILIES.values() for name in members)


def family(name: str) -> str:
    """``ResNet``, ``VGG``, ``DenseNet``, ``EfficientNet``, ``RoBERTa`` or ``GPT-2``."""
    return next(each for each, (_, _, members) in _FAMILIES.items() if name in members)


def resolve(name: str) -> str:
    """The name as :func:`names` has it; case, hyphens, underscores and blanks make no difference.

    FewbitError with the closest names if there is none.
    """
    known = {_plain(each): each for each in names()}
    found = known.get(_plain(name))
    if found is None:
        close = difflib.get_close_matches(_plain(name), known, n=3)
        hint = f"did you mean {' or '.join(known[each] for each in close)}?"
        raise FewbitError(
            f"unknown model {name!r}: {hint if close else 'expected ' + ', '.join(names())}"
        )
    return found


def _plain(name):
    return "".join(character for character in name.lower() if character.isalnum())


def check_size(name: str, size: int) -> int:
    """The size, of an image's side or in tokens. FewbitError if the model does not take it."""
    if family(name) in TEXT:
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
    """A torch module with random weights, in training mode. Example: ``build("resnet18", "gelu")``.

    Images ``(batch, 3, height, width)`` or token numbers ``(batch, length)`` go in.
    activation: a name of ``fewbit.models.activations.FACTORIES`` or a callable that makes a module;
    by default the architecture's own.
    """
    name = resolve(name)
    if isinstance(activation, str):
        activation = _factory(activation)
    module, attribute, _ = _FAMILIES[family(name)]
    make = getattr(importlib.import_module(f"fewbit.models.{module}"), attribute)
    model = make(name) if activation is None else make(name, activation)
    return model.train()


def _factory(activation):
    from fewbit.models.activations import FACTORIES

    if activation not in FACTORIES:
        close = difflib.get_close_matches(activation.lower(), FACTORIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(FACTORIES)}"
        raise FewbitError(f"unknown activation {activation!r}: {hint}")
    return FACTORIES[activation]
