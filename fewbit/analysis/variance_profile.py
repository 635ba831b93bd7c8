"""The variance that each saved tensor adds to a compressed model's gradients (docs/guides/variance_profile.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fewbit.analysis.deferred import Noise
from fewbit.analysis.gradients import (
    CHUNKS,
    Measured,
    batches_of,
    check_count,
    check_loss,
    check_model,
    copied,
    difference,
    sampling_of,
    tensors_of,
)
from fewbit.analysis.profile import VarianceProfile
from fewbit.analysis.progress import StepsProgress
from fewbit.analysis.recorder import Place, Recorder
from fewbit.analysis.unchanged import unchanged
from fewbit.config import FixedBits, LayerSettings
from fewbit.convert.module_settings import ResolvedSettings, resolve
from fewbit.convert.select import Filter, Selection
from fewbit.convert.swap import convert, restore_
from fewbit.errors import InputError
from fewbit.runtime.quantizers.quantizer import Quantizer


def variance_profile(
    model: nn.Module,
    batch: object,
    loss: Callable[[nn.Module, object], torch.Tensor],
    *,
    bits: int = 2,
    layers: LayerSettings | None = None,
    include: Filter = "*",
    exclude: Filter = (),
    overrides: Mapping[str, int | LayerSettings | Mapping | None] | None = None,
    draws: int = 16,
    chunks: int = CHUNKS,
    seed: int = 0,
    progress: bool = True,
) -> VarianceProfile:
    """Measure how much variance rounding each module's saved tensors adds to the gradients of each module.

    These variances are the terms of ActNN's Theorem 3 (docs/guides/variance_profile.md). The model and torch's random
    state do not change. With C contexts, a profile takes about 2 * draws * (C + 1) backward passes per batch, and the
    memory of two copies of the model.

    Args:
        model: A model in training mode. It may already be compressed.
        batch: A tensor, or a tuple or mapping of tensors, with samples in dimension 0; or an iterable of several
            batches, which a model with batch norm needs.
        loss: A function that is called as ``loss(model, batch)`` with a copy of the model. It returns a scalar tensor,
            a mean over the samples.
        bits: Bits per element of quantized tensors, a whole number from 1 to 8. Modules of fewbit's own classes keep
            their bits.
        layers: Settings of layers, as for `fewbit.compress_`, without `everything`.
        include: As for `fewbit.compress_`.
        exclude: As for `fewbit.compress_`.
        overrides: As for `fewbit.compress_`.
        draws: The number of pairs of backward passes with independent rounding, for each context and batch; at least 2.
        chunks: The number of equal parts of a single batch, even and at least 4, whose gradients give `sampling`.
            Several batches are compared with each other instead.
        seed: The seed of the rounding and of dropout. All passes over a batch have the same dropout.
        progress: Whether to show progress on standard error.

    Returns:
        The variances with standard errors, the variance between minibatches, and the bias.

    Raises:
        InputError: A setting is not valid, the model is in evaluation mode, cannot be copied or rounds nothing, or the
            batch or the loss cannot be used.
    """
    settings = resolve(FixedBits(bits), layers)
    check_count("draws", draws, 2)
    check_count("chunks", chunks, 4, even=True)
    check_count("seed", seed, 0)
    check_model(model)
    check_loss(loss)
    batches = batches_of(batch)
    with unchanged(dict(model.named_modules()), tensors_of(batches)):
        exact = _Measured(copied(model), loss, seed)
        restore_(exact.model)
        exact.defer()
        compressed = _Measured(copied(model), loss, seed)
        own = _Deferring(**vars(settings), noise=compressed.noise)
        made = convert(compressed.model, own, Selection(include, exclude, overrides))
        if made.context.compressor is not None:
            raise InputError(
                "layers: expected everything=False, got True: variance_profile measures what layers and functions save"
            )
        compressed.defer()
        sampling, sampled = sampling_of(exact, batch, batches, chunks)
        with StepsProgress("variance profile", progress).shown() as bar:
            samples = [
                _measured(compressed, exact, one, number, draws, len(batches), bar)
                for number, one in enumerate(batches)
            ]
    terms, direct, bias = zip(*samples, strict=True)
    if len({of_batch.shape for of_batch in terms}) > 1:
        raise InputError("batch: expected batches that go through the same modules, got others")
    arrays = {"sampling": sampling[None], "terms": terms, "direct": direct, "bias": bias}
    numbers, order = {}, compressed.order()
    for name, batches_of_array in arrays.items():
        mean, error = _summed_up(batches_of_array)
        numbers[name], numbers[f"{name}_error"] = mean[..., order], error[..., order]
    return VarianceProfile(
        model=type(model).__name__,
        contexts=tuple(compressed.noise.contexts),
        parameters=tuple(np.array(list(compressed.groups), dtype=object)[order]),
        **numbers,
        bits=settings.bits,
        draws=draws,
        batches=len(batches),
        sampled=sampled,
    )


# -- Measuring -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Deferring(ResolvedSettings):
    """Settings of `compress_` that make deferred quantizers."""

    noise: Noise | None = None

    def _quantizer(self, *args, **kwargs) -> Quantizer:
        return self.noise.defer(super()._quantizer(*args, **kwargs))


class _Recorder(Recorder):
    def __init__(self, noise: Noise):
        super().__init__(Place("", "", False))
        self.noise = noise
        self.called: dict[str, int] = {}

    def enter(self, place) -> None:
        self.called.setdefault(place.path, len(self.noise.contexts))
        super().enter(place)


class _Measured(Measured):
    """A copy of the model, measured with rounding that the caller chooses (`Noise`)."""

    def __init__(self, model: nn.Module, loss, seed: int):
        super().__init__(model, loss, seed)
        self.noise = Noise(seed, lambda: self._recorder.running[-1].path)
        self._recorder = _Recorder(self.noise)

    def order(self) -> list[int]:
        """Return the indices of `groups` in the order of the forward."""
        contexts = {path: place for place, path in enumerate(self.noise.contexts)}
        called = {path: place for place, path in enumerate(self._recorder.called)}

        def place(path):
            if path in contexts:
                return contexts[path], 1, 0
            before = self._recorder.called.get(path, len(contexts))
            return before, 0, called.get(path, len(called))

        paths = list(self.groups)
        return sorted(range(len(paths)), key=lambda i: place(paths[i]))

    def defer(self) -> None:
        for module in self.model.modules():
            for value in vars(module).values():
                if type(value) is Quantizer:
                    self.noise.defer(value)

    @contextmanager
    def drawing(self, batch, number: int):
        """Run a batch's forward and yield a function that runs a backward pass for an argument of `Noise.drawn`."""
        modules = dict(self.model.named_modules())
        with self._recorder.watching(modules), self.forward(batch, number) as value:
            yield lambda draws: self._drawn(value, draws)

    def _drawn(self, value, draws):
        with self.noise.drawn(draws):
            return self.backward(value, again=True)

    def gradient(self, batch, number: int):
        """Return the gradients of one pass without rounding."""
        with self.drawing(batch, number) as gradient:
            return gradient({})


def _measured(compressed: _Measured, exact: _Measured, batch, number, draws, batches, bar):
    """Return `terms` (draws, C, P), `direct` (draws, P) and `bias` (draws, P) of one batch."""
    true = exact.gradient(batch, number)
    terms, direct, bias = [], [], []
    with compressed.drawing(batch, number) as gradient:
        contexts = list(compressed.noise.contexts)
        if not contexts:
            raise InputError(
                "model: expected layers that quantize tensors for parameters that require grad, got none: "
                "the report of fewbit.compress_ shows the layers that it converts"
            )
        steps = batches * draws * (len(contexts) + 1)
        for draw in range(draws):
            pairs = []
            for place, context in enumerate(contexts):
                name = number, context, draw
                later = dict.fromkeys(contexts[place + 1 :], (*name, "later"))
                pair = [gradient({**later, context: (*name, side)}) for side in (0, 1)]
                pairs.append(compressed.halved(*pair))
                bar.step(steps)
            terms.append(pairs)
            pair = [gradient(dict.fromkeys(contexts, (number, draw, side))) for side in (0, 1)]
            direct.append(compressed.halved(*pair))
            bias.append(compressed.inner(*(difference(drawn, true) for drawn in pair)))
            bar.step(steps)
    return np.array(terms), np.array(direct), np.array(bias)


def _summed_up(batches) -> tuple[np.ndarray, np.ndarray]:
    draws = [np.asarray(batch) for batch in batches]
    mean = np.mean([batch.mean(0) for batch in draws], axis=0)
    if min(map(len, draws)) < 2:
        return mean, np.full_like(mean, np.nan)
    squares = [batch.var(0, ddof=1) / len(batch) for batch in draws]
    return mean, np.sqrt(np.sum(squares, axis=0)) / len(draws)
