"""Small models that are compressed with a configuration, and steps of their training."""

import dataclasses
import re

import pytest
import torch
from probed_models import MODELS, loss_of
from samples import normal

import fewbit

_OF_BOUND = {field.name for field in dataclasses.fields(fewbit.ErrorBound)}


def build(name="convnet", bits=4, **options):
    """Return a model, its controller and a batch.

    Args:
        name: of the model.
        bits: a configuration; a number is the average of AdaptiveBits.
        options: keywords of `compress_`.
    """
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    config = bits if isinstance(bits, fewbit.BitConfig) else fewbit.AdaptiveBits(bits)
    controller = fewbit.compress_(model, config, **{"verbose": False, **options})
    return model, controller, normal(shape, scale=1.0)


def bounded(model, **options):
    """Compress a model with an error bound. options: fields of ErrorBound, and keywords of `compress_`."""
    bound = fewbit.ErrorBound(**{name: options.pop(name) for name in _OF_BOUND & options.keys()})
    return fewbit.compress_(model, bound, **{"verbose": False, **options})


def saved_rows(controller):
    """Return the rows of an error bound that are of tensors which layers save."""
    return [row for row in controller.bounds if row.input is not None]


def step(model, x, scale=1.0):
    """Compute the gradients of a step."""
    model.zero_grad()
    (scale * loss_of(model(x))).backward()


def least_budget(model, sample, **options):
    """Return the bytes that no budget may be below, as the error says."""
    with pytest.raises(fewbit.errors.InputError) as caught:
        fewbit.compress_(model, fewbit.Budget(1), sample=sample, verbose=False, **options)
    return int(
        re.search(r"expected at least ([\d,]+) bytes", str(caught.value))[1].replace(",", "")
    )
