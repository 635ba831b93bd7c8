"""A policy of activation checkpointing for torchtitan that compresses what a model saves in place of recomputing it.

torchtitan builds the policy of the field `activation_checkpoint` of the trainer's configuration and calls `apply(model)`
before it compiles and shards the model. With pipeline parallelism, every stage is such a model.
"""

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

    torchtitan may call parts of the model several times in a step (microbatches, chunks of the loss), so bits that are
    chosen by measuring steps are not offered.

    Attributes:
        controller: the `Controller` of the compressed model; None before `apply`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The settings of the policy.

        Attributes:
            bits: the bits per element of quantized tensors, a whole number from 1 to 8.
            layers: settings of layers, as in `fewbit.compress_`.
            exclude: the modules to leave as they are, as paths in the model. The output layer is excluded because
                torchtitan's loss calls it for chunks of the sequence and frees each chunk at once.
            then: the configuration of a policy of torchtitan that is applied to the compressed model, or None.
        """

        bits: int = 4
        layers: dict = field(default_factory=dict)
        exclude: list[str] = field(default_factory=lambda: ["lm_head"])
        then: ActivationCheckpointing.Config | None = None

    controller: Controller | None = None

    def apply(self, model: nn.Module) -> None:
        """Compress a model, or a stage of a pipeline, in place."""
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
    """Return whether this process prints, which is the case for the first of several processes."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
