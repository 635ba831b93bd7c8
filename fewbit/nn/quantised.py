"""What modules that keep quantised tensors have besides torch's."""

from __future__ import annotations

from fewbit.nn.guarded import Guarded
from fewbit.runtime.exact import exactly
from fewbit.runtime.groups import GROUP_SIZE
from fewbit.runtime.quantiser import DEFAULT_BITS, Quantiser


class Quantised(Guarded):
    """torch's signature plus bits= and group_size=, and `quantiser`, which the forward keeps with.

    In eval mode a module is torch's own and compresses nothing.
    """

    quantiser: Quantiser

    def __init__(self, *args, bits: int = DEFAULT_BITS, group_size: int = GROUP_SIZE, **kwargs):
        quantiser = Quantiser(bits, group_size)
        super().__init__(*args, **kwargs)
        self.quantiser = quantiser

    def _exact(self, *args, **kwargs):
        """The forward of the class that is replaced."""
        with exactly():
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [super().extra_repr(), repr(self.quantiser)]))
