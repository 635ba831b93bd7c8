"""The arms of alternatives.py: fewbit, and what its users would choose instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
import torch._inductor.config as inductor_config
from networks.compiled_networks import Step, checkpointed, few, plain
from rivals.hooks import int8_hooks
from rivals.tasks import fused_loss
from studies.compiled import FP8
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fewbit

aten = torch.ops.aten
PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
]
"""The ops whose results selective checkpointing saves: matrix products, convolutions and attention."""


class Arm(NamedTuple):
    """A way to train a network.

    Attributes:
        prepare: a function of a `Step` and the name of a compiler's backend. It may change the module, and returns a
            function of a batch, which returns the loss.
        context: returns a context manager in which the arm runs.
        has_error: whether gradients differ from exact ones by more than the order of summation.
        is_random: whether gradients are random.
        is_compiled: whether torch.compile compiles the module.
        adapts: whether the first steps measure gradients, and choose bits.
        only: the networks that have this arm; empty for all.
        trained_in: the networks for which the arm is trained although its gradients are exact.
    """

    prepare: Callable = lambda module, backend: module
    context: Callable = nullcontext
    has_error: bool = False
    is_random: bool = False
    is_compiled: bool = False
    adapts: bool = False
    only: tuple[str, ...] = ()
    trained_in: tuple[str, ...] = ()

    def is_trained(self, network: str) -> bool:
        return self.has_error or network in self.trained_in


def within(context, run):
    """Return a function that calls run(*batch) in a context, which `context` makes for each call."""

    def call(*batch):
        with context():
            return run(*batch)

    return call


# -- Without fewbit ---------------------------------------------------------------------------------


def autocast(run, device):
    return within(partial(torch.autocast, device, torch.bfloat16), run)


def in_bfloat16(module, backend):
    return autocast(module, next(module.parameters()).device.type)


def selective(module, backend):
    contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
    return checkpointed(module, partial(checkpoint, use_reentrant=False, context_fn=contexts))


def hooked(module, backend):
    hooks = int8_hooks(module)
    return within(lambda: torch.autograd.graph.saved_tensors_hooks(*hooks), module)


def offloaded(module, backend):
    if next(module.parameters()).device.type == "cpu":
        raise RuntimeError("not measured: on a CPU, the host's memory is the device's memory")
    return within(partial(torch.autograd.graph.save_on_cpu, pin_memory=True), module)


def budget(fraction):
    return partial(functorch_config.patch, activation_memory_budget=fraction)


@contextmanager
def fp8():
    """Switch on torch's pass, but keep it from attention masks: their infinite values would make gradients NaN."""
    should_quantize = partitioners.should_quantize

    def is_no_mask(node):
        return node.target is not aten.where.self and should_quantize(node)

    with (
        inductor_config.patch(post_grad_fusion_options=FP8),
        mock.patch.object(partitioners, "should_quantize", is_no_mask),
    ):
        yield


def full(module, backend):
    """Remove the adapters, and train all parameters of the base."""
    module.model = module.model.unload()
    return module.requires_grad_(True)


# -- With fewbit ------------------------------------------------------------------------------------


def compressed(bits, **layers):
    def prepare(module, backend):
        fewbit.compress_(module, bits, layers=layers, verbose=False)
        return module

    return prepare


def quantized_checkpoints(bits, **layers):
    """Checkpoint each block, with inputs of 8 bits. Unless `bits` is None, compress its layers too."""

    def prepare(module, backend):
        if bits is not None:
            fewbit.compress_(module, bits, layers=layers, verbose=False)
        if hasattr(module.model, "gradient_checkpointing_enable"):
            fewbit.checkpoint_(module.model, bits=8)
            return module
        return checkpointed(module, partial(fewbit.checkpoint, bits=8))

    return prepare


def fused(prepare):
    """Return an arm's `prepare`, with a loss that computes the logits in chunks."""

    def prepare_fused(module: Step, backend):
        module.loss = fused_loss
        return prepare(module, backend)

    return prepare_fused


# -- The arms ---------------------------------------------------------------------------------------

COMPILED = Arm(plain, is_compiled=True)
RANDOM = {"has_error": True, "is_random": True}
BATCH_NORM = ("ResNet-18",)
"""Checkpointing updates the running statistics of batch norms twice, so it may change the loss on held-out data."""
ARMS = {
    "exact": Arm(trained_in=("GPT-2", "ResNet-18", "LoRA")),
    "full fine-tuning": Arm(full, only=("LoRA",), has_error=True),
    "bfloat16 autocast": Arm(in_bfloat16, has_error=True),
    "checkpointing": Arm(lambda module, backend: checkpointed(module), trained_in=BATCH_NORM),
    "selective checkpointing": Arm(selective, trained_in=BATCH_NORM),
    "torch.compile": COMPILED,
    "torch.compile, budget 0.5": COMPILED._replace(context=budget(0.5)),
    "torch.compile, budget 0.3": COMPILED._replace(context=budget(0.3)),
    "torch.compile, fp8": COMPILED._replace(context=fp8, has_error=True),
    "int8 hooks": Arm(hooked, has_error=True),
    "save_on_cpu": Arm(offloaded),
    "fewbit, 8 bits": Arm(compressed(8), **RANDOM),
    "fewbit, 4 bits": Arm(compressed(4), **RANDOM),
    "fewbit, 2 bits": Arm(compressed(2), **RANDOM),
    "fewbit, AdaptiveBits(2.5)": Arm(compressed(fewbit.AdaptiveBits(2.5)), adapts=True, **RANDOM),
    "fewbit, 2 bits, everything": Arm(compressed(2, everything=True), **RANDOM),
    "fewbit.compile, 2 bits": Arm(
        lambda module, backend: few(module, 2, backend), is_compiled=True, **RANDOM
    ),
    "fewbit.checkpoint": Arm(quantized_checkpoints(None), **RANDOM),
    "fewbit.checkpoint, fewbit, 2 bits": Arm(quantized_checkpoints(2), **RANDOM),
}
LADDER = {
    "+ fused cross-entropy": Arm(fused(ARMS["exact"].prepare), only=("GPT-2",)),
    "+ fewbit, 4 bits": Arm(fused(compressed(4)), only=("GPT-2",), **RANDOM),
    "+ 2 bits instead of 4": Arm(fused(compressed(2)), only=("GPT-2",), **RANDOM),
    "+ everything": Arm(fused(compressed(2, everything=True)), only=("GPT-2",), **RANDOM),
    "+ fewbit.checkpoint": Arm(
        fused(quantized_checkpoints(2, everything=True)), only=("GPT-2",), **RANDOM
    ),
    "fused cross-entropy and checkpointing": Arm(
        fused(ARMS["checkpointing"].prepare), only=("GPT-2",)
    ),
}
"""The arms of the second table: each adds an option to the arm before. The last one does without fewbit."""
ALL = ARMS | LADDER


def arms_of(network: str) -> list[str]:
    return [name for name, arm in ALL.items() if network in (arm.only or (network,))]
