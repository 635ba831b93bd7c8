"""The function mode in which the cross-entropy of a loss function is fewbit's."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.nn import functional as torch_functional
from torch.overrides import TorchFunctionMode

from fewbit.functional import cross_entropy


class FewBitLoss(TorchFunctionMode):
    """Runs `fewbit.functional.cross_entropy` in place of torch's. torch's random state does not change.

    Args:
        bits: the bits per saved probability, 1 to 8.
        seed: the seed of the random rounding. Each call has a seed of its own.
    """

    def __init__(self, bits: int, seed: int):
        super().__init__()
        self.bits = bits
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not torch_functional.cross_entropy:
            return function(*args, **kwargs)
        device = (args[0] if args else kwargs["input"]).device
        seed = int(torch.randint(2**62, (), generator=self._generator))
        with _seeded(device, seed):
            return cross_entropy(*args, **kwargs, bits=self.bits)


@contextmanager
def _seeded(device: torch.device, seed: int):
    if device.type == "cpu":
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        module = torch.get_device_module(device)
        with torch.random.fork_rng([device], device_type=device.type), module.device(device):
            module.manual_seed(seed)
            yield
