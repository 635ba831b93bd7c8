"""The four tasks of `error_bound.py`: small networks on real data that needs no download, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from networks import digits_resnet, short_training, super_resolution, text_classifier
from torch import Tensor, nn

from fewbit.demo import text, training


class Task(NamedTuple):
    """One network, its data and its training.

    Attributes:
        title: The name of the task in tables and pictures.
        score: The key of the result of `train` by which training runs are compared.
        unit: The unit in which the score is shown, after multiplication by `factor`.
        factor: See `unit`.
        sign: 1 if a larger score is better, else -1.
        steps: The number of training steps.
        build: A function that builds the model. The initial parameters depend on the seed alone.
        batches: A function that yields training batches without end, drawn with the given generator.
        loss: A function of the model and a batch.
        train: `train(model, seed, progress)` trains the model in place and returns held-out results. The batches
            depend on the seed alone.
    """

    title: str
    score: str
    unit: str
    factor: float
    sign: int
    steps: int
    build: Callable[[int], nn.Module]
    batches: Callable[[torch.Generator], Iterator]
    loss: Callable[[nn.Module, object], Tensor]
    train: Callable[..., dict[str, float]]


def tasks(quick: bool = False) -> dict[str, Task]:
    """Return the tasks by name. If `quick` is true, each has a few steps, to check that all works."""
    return {
        "digits": digits(quick),
        "transformer": transformer(quick),
        "text": short(text_classifier, quick, "Text classifier", "accuracy", "%", 100),
        "photographs": short(super_resolution, quick, "Super-resolution", "psnr", "dB", 1),
    }


def short(module, quick: bool, title: str, score: str, unit: str, factor: float) -> Task:
    """Make the task of a module that has `build`, `batches`, `loss`, `test`, STEPS and LEARNING_RATE.

    The other arguments are as in `Task`. A larger score is better.
    """
    steps = 20 if quick else module.STEPS

    def train(model, seed, progress):
        own = module.batches, module.loss, module.test, steps, module.LEARNING_RATE
        return short_training.train_and_test(model, *own, seed, progress)

    return Task(
        title, score, unit, factor, 1, steps, module.build, module.batches, module.loss, train
    )


EPOCHS = 30
"""The epochs of the digits task: so many that bounds are found more than three times after the first steps."""


def digits(quick: bool) -> Task:
    """Make the task of the ResNet for digits, with ReLU."""
    digits_resnet.EPOCHS = 1 if quick else EPOCHS
    of_epoch = len(digits_resnet.digits()[1]) // digits_resnet.BATCH
    return Task(
        "ResNet, digits",
        "accuracy",
        "%",
        100,
        1,
        digits_resnet.EPOCHS * of_epoch,
        lambda seed: digits_resnet.build(nn.ReLU, seed),
        digits_resnet.endless_batches,
        digits_resnet.loss,
        digits_resnet.train,
    )


def transformer(quick: bool) -> Task:
    """Make the task of the demo's transformer, which predicts characters of Python's help texts."""
    settings = training.TrainingSettings(steps=20) if quick else training.TrainingSettings()
    corpus = text.python_topics()

    def train(model, seed, progress):
        run = training.train(model, corpus, settings, seed, progress)
        last = run.train[-max(settings.steps // 10, 1) :]
        return {"final": run.final, "train": sum(last) / len(last)}

    def batches(generator):
        while True:
            yield corpus.batch(settings.batch, settings.context, generator)

    return Task(
        "Transformer, characters",
        "final",
        "nats",
        1,
        -1,
        settings.steps,
        lambda seed: training.build(corpus, settings, nn.GELU, seed),
        batches,
        lambda model, batch: training.loss(model, *batch),
        train,
    )
