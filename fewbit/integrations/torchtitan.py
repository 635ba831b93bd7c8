"""A policy of activation checkpointing for torchtitan that compresses what a model saves in place of recomputing it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from fewbit.compress.compress import compress_
from fewbit.compress.controller import Controller
from fewbit.config import FixedBits

__all__ = ["CompressedActivations"]


class CompressedActivations(ActivationCheckpointing):
    """Compresses what a model saves for the backward pass, as `fewbit.compress_` does with fixed bits.

    Policies that measure steps are not offered, because torchtitan may call parts of the model several times in a step.

    Attributes:
        controller: the `Controller` of the compressed model; None before `apply`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The settings of the policy.

        Attributes:
            bits: the bits per element of quantized tensors, a whole number from 1 to 8.
            layers: settings of layers, as in `fewbit.compress_`.
            exclude: paths of modules to leave as they are, by default the output layer, which torchtitan's loss calls for chunks of the
                sequence.
            then: the configuration of a policy of torchtitan that is applied to the compressed model, or None.
        """

        bits: int = 4
        layers: dict = field(default_factory=dict)
        exclude: list[str] = field(default_factory=lambda: ["lm_head"])
        then: ActivationCheckpointing.Config | None = None

    controller: Controller | None = None

    def apply(self, model: nn.Module) -> None:
        config = self.config
        self.controller = compress_(
            model,
            FixedBits(config.bits),
            layers=config.layers or None,
            exclude=self._is_excluded,
            verbose=_is_first_process(),
        )
        if config.then is not None:
            config.then.build(dump_folder=self.dump_folder).apply(model)

    def _is_excluded(self, path: str, module: nn.Module) -> bool:
        # A glob that matches nothing is an error in compress_, but a stage of a pipeline has only some of the modules.
        return any(path == name or path.startswith(f"{name}.") for name in self.config.exclude)


def _is_first_process() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
