"""The function mode in which the cross-entropy of a loss function is fewbit's."""

from __future__ import annotations

import torch
from torch.nn import functional as torch_functional
from torch.overrides import TorchFunctionMode

from fewbit.functional import cross_entropy


class FewBitLoss(TorchFunctionMode):
    """Runs `fewbit.functional.cross_entropy` in place of torch's.

    torch's random state does not change, so that dropout is the same as with torch's function.

    Args:
        bits: the bits per saved probability, 1 to 8.
        seed: the seed of the random rounding.
    """

    def __init__(self, bits: int, seed: int):
        super().__init__()
        self.bits = bits
        self.seed = seed

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not torch_functional.cross_entropy:
            return function(*args, **kwargs)
        device = args[0].device if args else kwargs["input"].device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type):
            torch.manual_seed(self.seed)
            return cross_entropy(*args, **kwargs, bits=self.bits)
