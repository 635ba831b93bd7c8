"""The first batch of a data loader, read before the training reads it."""

from __future__ import annotations

import random

import numpy as np
import torch

from fewbit.errors import InputError

_INNER = "base_dataloader", "batch_sampler", "sampler", "dataset"
_GENERATORS = "generator", "synchronized_generator"


def first_batch(batches, devices=()):
    """Return the first batch of a data loader, of torch or accelerate, which then yields the same batches as if nobody had read one.

    `devices` are those other than the CPU whose random state stays.

    Raises:
        InputError: the data can be read only once, or there is no batch.
    """
    parts = _parts(batches)
    if any(hasattr(part, "__next__") for part in parts):
        raise InputError(
            "memory: expected a data loader whose data can be read again, got one whose dataset is an iterator"
        )
    generators = [
        found
        for part in parts
        for found in (getattr(part, name, None) for name in _GENERATORS)
        if isinstance(found, torch.Generator)
    ]
    states = [(generator, generator.get_state()) for generator in generators]
    python, numpy = random.getstate(), np.random.get_state()
    iterator = iter(batches)
    try:
        with torch.random.fork_rng(devices):
            return next(iterator)
    except StopIteration:
        raise InputError("memory: expected a data loader with a batch, got an empty one") from None
    finally:
        if hasattr(iterator, "close"):
            iterator.close()
        if hasattr(batches, "end"):
            batches.end()  # accelerate notes which loader is being read
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in states:
            generator.set_state(state)


def _parts(batches) -> list:
    """Return the loader and the objects inside of it that may have random generators."""
    found, todo = [], [batches]
    while todo:
        one = todo.pop()
        if one is not None and all(one is not other for other in found):
            found.append(one)
            todo += [vars(one).get(name) for name in _INNER if hasattr(one, "__dict__")]
    return found
