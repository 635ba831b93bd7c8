"""Pipelines of two processes: several microbatches are in flight, so forwards and backwards of a stage interleave."""

import copy

import torch
from language_model import batch, check, compressed, gradients_of, loss_of, model
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import fewbit

MICROBATCHES = 4
CPU = torch.device("cpu")


def _one_stage(schedule, rank):
    def run(module):
        compressed(module.stage(rank, 2))
        stage = PipelineStage(module, rank, 2, CPU)
        _train(schedule(stage, MICROBATCHES, loss_fn=loss_of), rank)
        return gradients_of(module)

    check(run)


def _train(schedule, rank):
    tokens, targets = batch()
    if rank == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=targets, losses=[])


def gpipe(rank):
    """All forwards of the microbatches, then all backwards."""
    _one_stage(ScheduleGPipe, rank)


def one_forward_one_backward(rank):
    """Forwards and backwards of different microbatches take turns."""
    _one_stage(Schedule1F1B, rank)


def _several_stages(schedule, rank):
    def run(module):
        # Stages 0 and 2 run in process 0, stages 1 and 3 in process 1.
        numbers = rank, rank + 2
        parts = [copy.deepcopy(module).stage(number, 4) for number in numbers]
        for part in parts:
            compressed(part)
        stages = [
            PipelineStage(part, number, 4, CPU) for part, number in zip(parts, numbers, strict=True)
        ]
        _train(schedule(stages, MICROBATCHES, loss_fn=loss_of), rank)
        return {name: grad for part in parts for name, grad in gradients_of(part).items()}

    check(run, blocks=4)


def interleaved(rank):
    """Each process has two stages, whose forwards and backwards take turns."""
    _several_stages(ScheduleInterleaved1F1B, rank)


def zero_bubble(rank):
    """The gradients of weights are computed later than those of inputs."""
    _several_stages(ScheduleInterleavedZeroBubble, rank)


def one_context(rank):
    """A controller that compressed the whole model before it was split serves the stages of each process."""

    def run(module):
        compressed(module)
        module.stage(rank, 2)
        stage = PipelineStage(module, rank, 2, CPU)
        _train(Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of), rank)
        return gradients_of(module)

    check(run)


def adaptive(rank):
    """Each stage measures with microbatches in flight, and chooses its own bits within its own budget."""
    module = model(activation=nn.GELU).stage(rank, 2)
    controller = fewbit.compress_(module, fewbit.AdaptiveBits(2.5, interval=4), verbose=False)
    stage = PipelineStage(module, rank, 2, CPU)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    for _ in range(4):
        _train(schedule, rank)
    rows = [row for row in controller.allocation if row.sensitivity > 0]
    assert len(rows) > 4 and len({row.bits for row in rows}) > 1
    assert sum(row.bits * row.elements for row in rows) <= 2.5 * sum(row.elements for row in rows)


CASES = (gpipe, one_forward_one_backward, interleaved, zero_bubble, one_context, adaptive)
