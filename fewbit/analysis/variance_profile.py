"""The variance profile: where the variance of a compressed model's gradient comes from.

ActNN, long version, Theorem 3: with the gradient arriving at layer m as it is, noise of the later contexts and
all, what rounding m's context alone adds to the gradient of a parameter theta, the earlier contexts exact, are
the terms of

    Var[grad^ theta] = Var[grad theta] + sum over m of E[ Var[ G^(theta ~ m)(grad^ H(m), C^(m)) | grad^ H(m) ] ]

Each is measured: half the squared difference of two gradients that differ in m's draws alone has that mean. So
have, with all contexts drawn anew, the variance that the sum has to agree with, and, with two minibatches in
place of two draws, the first term. Appendix C.2 and figure 8 of the paper show the profile of a ResNet-50.

One forward serves all passes over a batch (`deferred`). Rounding is unbiased in layers that are linear in what
they keep; where it is not (docs/layers.md), the sum agrees up to terms of the order of that bias.
"""

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
from fewbit.analysis.progress import Progress
from fewbit.analysis.recorder import Place, Recorder
from fewbit.analysis.unchanged import unchanged
from fewbit.config import FixedBits, LayerSettings
from fewbit.convert.select import Filter, Selection
from fewbit.convert.settings import ResolvedSettings, resolve
from fewbit.convert.swap import convert, restore_
from fewbit.errors import InputError
from fewbit.runtime.interop.interrupts import leaves_nothing
from fewbit.runtime.quantizers.quantizer import Quantizer


@leaves_nothing
def variance_profile(
    model: nn.Module,
    batch,
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
    """Measures the terms of ActNN's Theorem 3 (long version, section 3.4) for a model and a minibatch.

    model: in training mode, compressed already or not; it is only copied, twice, and stays as it is, as
    does torch's random state. batch: a tensor, or a tuple or mapping of tensors, samples in dimension 0; a list,
    or another iterable, is several batches. loss: called as `loss(model, batch)` with a copy of the
    model, returns a scalar tensor, a mean over the samples:
    `lambda model, batch: cross_entropy(model(batch[0]), batch[1])`.

    bits to overrides: as for `compress_`, whatever the model was compressed with; modules that were made as
    fewbit's keep theirs. draws: pairs of independent draws for each context and batch. chunks: of one batch,
    equal parts whose gradients' variance over their number is taken for the sampling variance of the
    batch's; of several batches it is that between them. With batch norm give several: statistics of a chunk make
    its gradient another than its part of the batch's, and the estimate too large, often by much. seed: of the draws, and of dropout, which draws alike in all passes over a batch. progress: show how
    far it is on standard error if it takes longer than two seconds. Few-bit activations are not random: they
    are as compressed in all passes but the exact ones of `sampling` and `bias`.

    Takes 2 draws (C + 1) backward passes a batch with C contexts. Raises InputError for settings that there are
    not, a model in evaluation mode, one that cannot be copied, or that rounds nothing, and for a batch or loss
    that cannot be used.
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
        convert(compressed.model, own, Selection(include, exclude, overrides))
        compressed.defer()
        sampling, sampled = sampling_of(exact, batch, batches, chunks)
        with Progress("variance profile", progress).shown() as bar:
            samples = [
                _measured(compressed, exact, one, number, draws, len(batches), bar)
                for number, one in enumerate(batches)
            ]
    terms, direct, bias = zip(*samples, strict=True)
    if len({each.shape for each in terms}) > 1:
        raise InputError("batch: expected batches that go through the same modules, got others")
    arrays = {"sampling": sampling[None], "terms": terms, "direct": direct, "bias": bias}
    numbers, order = {}, compressed.order()
    for name, each in arrays.items():
        mean, error = _summed_up(each)
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
    """Settings whose quantizers round in the backward pass."""

    noise: Noise | None = None

    def quantizer(self, *args, **kwargs) -> Quantizer:
        return self.noise.defer(super().quantizer(*args, **kwargs))

    def attention_quantizer(self, *args, **kwargs) -> Quantizer:
        return self.noise.defer(super().attention_quantizer(*args, **kwargs))


class _Recorder(Recorder):
    """Also remembers when modules were first called. called: {path: contexts that there were before}."""

    def __init__(self, noise: Noise):
        super().__init__(Place("", "", False))
        self.noise = noise
        self.called: dict[str, int] = {}

    def enter(self, place) -> None:
        self.called.setdefault(place.path, len(self.noise.contexts))
        super().enter(place)


class _Measured(Measured):
    """A copy of the model, whose gradients are taken with the noise that is asked for."""

    def __init__(self, model: nn.Module, loss, seed: int):
        super().__init__(model, loss, seed)
        self.noise = Noise(seed, lambda: self._recorder.running[-1].path)
        self._recorder = _Recorder(self.noise)

    def order(self) -> list[int]:
        """The groups in the order of the forward: contexts in theirs, others where they are first called.

        Those of modules that are never called themselves come last.
        """
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
        """Defers the quantizers that modules had when they were made, too."""
        for module in self.model.modules():
            for value in vars(module).values():
                if type(value) is Quantizer:
                    self.noise.defer(value)

    @contextmanager
    def drawing(self, batch, number: int):
        """Yields a function from draws (`Noise.drawn`) to gradients. number: as for `forward`."""
        modules = dict(self.model.named_modules())
        with self._recorder.watching(modules), self.forward(batch, number) as value:
            yield lambda draws: self._drawn(value, draws)

    def _drawn(self, value, draws):
        with self.noise.drawn(draws):
            return self.backward(value, again=True)

    def gradient(self, batch, number: int):
        """One step's, without noise."""
        with self.drawing(batch, number) as gradient:
            return gradient({})


def _measured(compressed: _Measured, exact: _Measured, batch, number, draws, batches, bar):
    """Of a batch: terms (draws, C, P), direct and bias (draws, P)."""
    true = exact.gradient(batch, number)
    terms, direct, bias = [], [], []
    with compressed.drawing(batch, number) as gradient:
        contexts = list(compressed.noise.contexts)
        if not contexts:
            raise InputError(
                "model: expected layers that quantize what they keep for parameters that require grad, got "
                "none: fewbit.compress_ says what it converts"
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
            bias.append(compressed.inner(*(difference(each, true) for each in pair)))
            bar.step(steps)
    return np.array(terms), np.array(direct), np.array(bias)


def _summed_up(batches) -> tuple[np.ndarray, np.ndarray]:
    """The mean over batches, of (draws, ...) each, and its standard error, NaN for one draw."""
    draws = [np.asarray(each) for each in batches]
    mean = np.mean([each.mean(0) for each in draws], axis=0)
    if min(map(len, draws)) < 2:
        return mean, np.full_like(mean, np.nan)
    squares = [each.var(0, ddof=1) / len(each) for each in draws]
    return mean, np.sqrt(np.sum(squares, axis=0)) / len(draws)
