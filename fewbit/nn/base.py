"""What modules that keep quantized tensors have besides torch's."""

from __future__ import annotations

import inspect

from torch import nn

from fewbit.config import GROUP_SIZE
from fewbit.nn.guarded import Guarded
from fewbit.runtime.interop.bypass import bypass
from fewbit.runtime.quantizers.quantizer import DEFAULT_BITS, Quantizer


class Quantized(Guarded):
    """torch's signature plus bits= and group_size=, and `quantizer`, which the forward keeps with.

    In eval mode a module is torch's own and compresses nothing.
    """

    quantizer: Quantizer

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if issubclass(cls, nn.Module):  # not for mixins, which are no modules
            cls.__signature__ = _signature_of(cls)

    def __init__(self, *args, bits: int = DEFAULT_BITS, group_size: int = GROUP_SIZE, **kwargs):
        quantizer = Quantizer(bits, group_size)
        super().__init__(*args, **kwargs)
        self.quantizer = quantizer

    def _exact(self, *args, **kwargs):
        """The forward of the class that is replaced."""
        with bypass():
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [super().extra_repr(), repr(self.quantizer)]))


def _signature_of(cls) -> inspect.Signature:
    """Return the signature of torch's class plus the options of fewbit's mixins.

    `torch.nn.utils.skip_init` looks for `device` in the signature, which `*args, **kwargs` would hide. A subclass with an
    `__init__` of its own keeps that signature, unless it is one of fewbit's and takes `*args, **kwargs`.
    """
    inits = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    ours, parameters = [], {}
    for init in inits:
        parameters = dict(inspect.signature(init).parameters)
        own = [each for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
        passes_on = {each.kind for each in parameters.values()} >= _REST
        if not passes_on or not init.__module__.startswith("fewbit."):
            break
        ours += own
    _, *theirs = parameters.values()
    return inspect.Signature(sorted([*theirs, *ours], key=lambda each: each.kind))


_REST = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
