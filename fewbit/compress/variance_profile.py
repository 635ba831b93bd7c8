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

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from fewbit.compress import kinds, meter
from fewbit.compress.convert import Filter, Settings, convert, restore_
from fewbit.compress.deferred import Noise
from fewbit.compress.variance_profile_report import Progress, VarianceProfileReport
from fewbit.errors import InputError
from fewbit.files import write_atomic
from fewbit.runtime.groups import GROUP_SIZE
from fewbit.runtime.quantiser import Quantiser

SCHEMA = "fewbit.variance_profile/1"


@dataclass(frozen=True, repr=False, eq=False)
class VarianceProfile(VarianceProfileReport):
    """The terms of ActNN's Theorem 3, C contexts by P modules with parameters, float64 NumPy arrays.

    A variance is summed over all elements of a module's parameters, in units of the gradient squared. Each array
    has its standard errors, of the same shape and name with `_error`; NaN where there was one measurement only.
    Errors are those of the draws, given the batches, but for `sampling_error`.

    contexts: paths of the modules whose kept tensors are rounded ("" is the model itself), in the order of the
    forward. parameters: paths of the modules that own parameters which require grad. terms: (C, P). sampling:
    (P,), the variance of the exact gradient between minibatches. direct: (P,), the variance with all
    contexts drawn at once, to compare with `quantisation`. bias: (P,), the squared norm of the
    compressed gradient's mean minus the exact gradient, of few-bit activations too; an estimate that is
    exact in expectation, so that it may be below 0. bits: of the settings. draws: pairs of draws for each
    context and batch. sampled: what `sampling` was measured from.
    """

    model: str
    contexts: tuple[str, ...]
    parameters: tuple[str, ...]
    terms: np.ndarray
    terms_error: np.ndarray
    sampling: np.ndarray
    sampling_error: np.ndarray
    direct: np.ndarray
    direct_error: np.ndarray
    bias: np.ndarray
    bias_error: np.ndarray
    bits: int
    draws: int
    batches: int
    sampled: str

    @property
    def quantisation(self) -> np.ndarray:
        """(P,): the sum of the terms over contexts, what rounding adds by Theorem 3."""
        return self.terms.sum(0)

    @property
    def quantisation_error(self) -> np.ndarray:
        """(P,): its standard error; the draws of different contexts are independent."""
        return np.sqrt(np.square(self.terms_error).sum(0))

    def total(self) -> np.ndarray:
        """(P,): the variance of the compressed gradient by Theorem 3, sampling and quantisation."""
        return self.sampling + self.quantisation

    @property
    def agreement(self) -> np.ndarray:
        """(P,): `quantisation` minus `direct` in standard errors of that difference; 0 where nothing rounds."""
        error = np.hypot(self.quantisation_error, self.direct_error)
        difference = self.quantisation - self.direct
        return np.divide(difference, error, out=np.zeros_like(error), where=error > 0)

    @property
    def sampling_ratio(self) -> float:
        """Sampling variance over quantisation variance, each summed over all parameters."""
        return _ratio(self.sampling.sum(), self.quantisation.sum())

    @property
    def own(self) -> np.ndarray:
        """(P,): the term of the module's own context; 0 where it has none."""
        rows = {context: row for row, context in enumerate(self.contexts)}
        return np.array(
            [
                self.terms[rows[name], column] if name in rows else 0.0
                for column, name in enumerate(self.parameters)
            ]
        )

    @property
    def own_share(self) -> float:
        """The share of all quantisation variance that comes from modules' own contexts."""
        return _ratio(self.own.sum(), self.quantisation.sum())

    def to_dict(self) -> dict:
        """Everything as JSON-able values; standard errors that are not known as None."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"schema": SCHEMA} | {name: _plain(value) for name, value in values.items()}

    def to_json(self) -> str:
        """`to_dict()` as JSON text; `from_json` has every number back exactly."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> VarianceProfile:
        """InputError for what is not a document of schema fewbit.variance_profile/1."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"expected JSON of a variance profile, got: {error}") from None
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise InputError(f"expected the schema {SCHEMA!r}, got {schema!r}")
        names = [each.name for each in fields(cls)]
        missing = [name for name in names if name not in document]
        if missing:
            raise InputError(f"expected {missing[0]!r} in a variance profile, which it lacks")
        values = {name: document[name] for name in names}
        shape = len(values["contexts"]), len(values["parameters"])
        for name in ARRAYS:
            try:
                values[name] = np.array(values[name], dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise InputError(f"{name}: expected numbers, got: {error}") from None
            expected = shape if name.startswith("terms") else shape[1:]
            if values[name].shape != expected:
                raise InputError(f"{name}: expected shape {expected}, got {values[name].shape}")
        for name in ("contexts", "parameters"):
            values[name] = tuple(values[name])
        return cls(**values)

    def save(self, path, force: bool = False) -> None:
        """Writes `to_json()` to `path`; OutputExistsError if it exists, unless `force`."""
        write_atomic(path, self.to_json(), force=force)

    @classmethod
    def load(cls, path) -> VarianceProfile:
        """What `save` wrote; InputError as `from_json`."""
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            return cls.from_json(text)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


ARRAYS = tuple(each.name for each in fields(VarianceProfile) if each.type == "np.ndarray")


def variance_profile(
    model: nn.Module,
    batch,
    loss: Callable[[nn.Module, object], torch.Tensor],
    *,
    bits: int = 2,
    activation_bits: int | None = None,
    attention_bits: int | None = None,
    group_size: int = GROUP_SIZE,
    minimum: str = "auto",
    copies: int = 1,
    functional: bool = True,
    include: Filter = "*",
    exclude: Filter = (),
    overrides: Mapping[str, int | Mapping | None] | None = None,
    draws: int = 16,
    chunks: int = 8,
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
    settings = dict(
        bits=bits,
        activation_bits=activation_bits,
        attention_bits=attention_bits,
        group_size=group_size,
        minimum=minimum,
        copies=copies,
        functional=functional,
    )
    settings = {name: value for name, value in settings.items() if value is not None}
    Settings(**settings).check()
    _check_count("draws", draws, 2, even=False)
    _check_count("chunks", chunks, 4, even=True)
    _check_count("seed", seed, 0, even=False)
    _check_model(model)
    _check_loss(loss)
    batches = _batches(batch)
    tensors = [each for each in tree_leaves(batches) if isinstance(each, torch.Tensor)]
    with meter._unchanged(dict(model.named_modules()), tensors):
        exact = _Measured(_copy(model), loss, seed)
        restore_(exact.model)
        exact.defer()
        compressed = _Measured(_copy(model), loss, seed)
        own = _Deferring(**settings, noise=compressed.noise)
        convert(compressed.model, own, include, exclude, overrides)
        compressed.defer()
        if len(batches) == 1:
            sampling = _sampling(exact, _parts(batches[0], chunks)) / chunks
        else:
            with _explained(batch):
                sampling = _sampling(exact, batches)
        with Progress(progress, len(batches)) as bar:
            samples = [
                _measured(compressed, exact, one, number, draws, bar)
                for number, one in enumerate(batches)
            ]
    terms, direct, bias = zip(*samples, strict=True)
    if len({each.shape for each in terms}) > 1:
        raise InputError("batch: expected batches that go through the same modules, got others")
    sampled = f"{len(batches)} batches of {_size(batches[0])}"
    if len(batches) == 1:
        sampled = f"{chunks} chunks of one batch of {_size(batches[0])}"
        if _has_batch_norm(model):
            sampled += (
                " (too much, as chunks have batch norm statistics of their own: give batches)"
            )
    arrays = {"sampling": sampling[None], "terms": terms, "direct": direct, "bias": bias}
    numbers = {}
    for name, each in arrays.items():
        numbers[name], numbers[f"{name}_error"] = _summed_up(each)
    return VarianceProfile(
        model=type(model).__name__,
        contexts=tuple(compressed.noise.contexts),
        parameters=tuple(compressed.groups),
        **numbers,
        bits=bits,
        draws=draws,
        batches=len(batches),
        sampled=sampled,
    )


# -- Measuring -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Deferring(Settings):
    """Settings whose quantisers round in the backward pass."""

    noise: Noise | None = None

    def quantiser(self, *args, **kwargs) -> Quantiser:
        return self.noise.defer(super().quantiser(*args, **kwargs))

    def attention_quantiser(self, *args, **kwargs) -> Quantiser:
        return self.noise.defer(super().attention_quantiser(*args, **kwargs))


class _Measured:
    """A copy of the model, whose gradients are taken.

    groups: {path of a module: its own parameters that require grad}, each parameter once.
    """

    def __init__(self, model: nn.Module, loss, seed: int):
        self.model = model
        self.loss = loss
        self.seed = seed
        self.groups = _groups(model)
        self.parameters = [each for group in self.groups.values() for each in group]
        self._recorder = meter._Recorder(meter._Place("", "", False))
        self.noise = Noise(seed, lambda: self._recorder.running[-1].path)

    def defer(self) -> None:
        """Defers the quantisers that modules had when they were made, too."""
        for module in self.model.modules():
            for value in vars(module).values():
                if type(value) is Quantiser:
                    self.noise.defer(value)

    @contextmanager
    def forward(self, batch, number: int):
        """Yields a function from draws (`Noise.drawn`) to gradients. number: dropout is as it was for that."""
        modules = dict(self.model.named_modules())
        tensors = [each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
        with meter._unchanged(modules, tensors), self._recorder.watching(modules):
            devices = {each.device for each in (*self.parameters, *tensors)}
            _seed_generators(devices, self.seed + number)
            with torch.enable_grad():
                value = self.loss(self.model, batch)
            _check_value(value)
            yield lambda draws: self._gradients(value, draws)

    def _gradients(self, value, draws):
        with self.noise.drawn(draws):
            found = torch.autograd.grad(
                value, self.parameters, retain_graph=True, allow_unused=True
            )
        if all(each is None for each in found):
            raise InputError(
                "loss: expected a loss of the model that it is called with, got one that depends on none of "
                "its parameters"
            )
        return [
            torch.zeros_like(parameter) if each is None else each.to_dense()
            for parameter, each in zip(self.parameters, found, strict=True)
        ]

    def inner(self, a, b) -> np.ndarray:
        """(P,) float64: the inner products of two gradients by group."""
        products = [(x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)]
        device = products[0].device  # one transfer of them all, also of a model on several devices
        products = iter(torch.stack([each.to(device) for each in products]).tolist())
        return np.array([sum(next(products) for _ in group) for group in self.groups.values()])


def _sampling(exact: _Measured, parts) -> np.ndarray:
    """(pairs, P): half the squared differences of the exact gradients of two minibatches."""
    pairs = []
    for first in range(0, len(parts) - 1, 2):
        gradients = []
        for number in (first, first + 1):
            with exact.forward(parts[number], number) as gradient:
                gradients.append(gradient({}))
        pairs.append(_halved(exact, *gradients))
    return np.array(pairs)


def _measured(compressed: _Measured, exact: _Measured, batch, number, draws, bar):
    """Of a batch: terms (draws, C, P), direct and bias (draws, P)."""
    with exact.forward(batch, number) as gradient:
        true = gradient({})
    terms, direct, bias = [], [], []
    with compressed.forward(batch, number) as gradient:
        contexts = list(compressed.noise.contexts)
        if not contexts:
            raise InputError(
                "model: expected layers that quantise what they keep for parameters that require grad, got "
                "none: fewbit.compress_ says what it converts"
            )
        for draw in range(draws):
            pairs = []
            for place, context in enumerate(contexts):
                name = number, context, draw
                later = dict.fromkeys(contexts[place + 1 :], (*name, "later"))
                pair = [gradient({**later, context: (*name, side)}) for side in (0, 1)]
                pairs.append(_halved(compressed, *pair))
                bar.step(draws * (len(contexts) + 1))
            terms.append(pairs)
            pair = [gradient(dict.fromkeys(contexts, (number, draw, side))) for side in (0, 1)]
            direct.append(_halved(compressed, *pair))
            bias.append(compressed.inner(*(_difference(each, true) for each in pair)))
            bar.step(draws * (len(contexts) + 1))
    return np.array(terms), np.array(direct), np.array(bias)


def _halved(measured, a, b) -> np.ndarray:
    difference = _difference(a, b)
    return measured.inner(difference, difference) / 2


def _difference(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def _summed_up(batches) -> tuple[np.ndarray, np.ndarray]:
    """The mean over batches, of (draws, ...) each, and its standard error, NaN for one draw."""
    draws = [np.asarray(each) for each in batches]
    mean = np.mean([each.mean(0) for each in draws], axis=0)
    if min(map(len, draws)) < 2:
        return mean, np.full_like(mean, np.nan)
    squares = [each.var(0, ddof=1) / len(each) for each in draws]
    return mean, np.sqrt(np.sum(squares, axis=0)) / len(draws)


# -- What is given -------------------------------------------------------------------------------------------


def _groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    groups, seen = {}, set()
    for path, module in model.named_modules():
        if type(module) is kinds._PART_OF_ATTENTION:
            # Never called: its parameters are those of the attention around it.
            path = path.rpartition(".")[0]
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                groups.setdefault(path, []).append(parameter)
    return groups


def _check_model(model) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not model.training:
        raise InputError(
            "model: expected one in training mode, got one in evaluation mode, in which nothing is compressed"
        )
    if any(map(meter._is_compiled, model.modules())):
        raise InputError("model: expected one that is not compiled, got one of torch.compile")
    if not any(each.requires_grad for each in model.parameters()):
        raise InputError("model: expected parameters that require grad, got none")


def _has_batch_norm(model) -> bool:
    """Whether samples of a batch change each other's gradients."""
    norms = nn.modules.batchnorm._BatchNorm
    return any(isinstance(each, norms) and each.training for each in model.modules())


def _copy(model: nn.Module) -> nn.Module:
    try:
        return deepcopy(model)
    except Exception as error:
        raise InputError(f"model: expected one that copy.deepcopy copies, got: {error}") from error


def _check_loss(loss) -> None:
    if not callable(loss):
        raise InputError(
            f"loss: expected a function (model, batch) -> scalar tensor, got {type(loss).__name__}"
        )
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError as error:
        raise InputError(
            f"loss: expected a function (model, batch) -> scalar tensor, got one for which: {error}"
        ) from None
    except ValueError:  # of built-in functions that do not tell
        pass


def _check_value(value) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"loss: expected a scalar tensor, got {type(value).__name__}")
    if value.numel() != 1 or not value.requires_grad:
        how = "one" if value.requires_grad else "one that requires no grad,"
        raise InputError(
            f"loss: expected a scalar tensor with a graph, got {how} of {_shape(value)}"
        )
    if not torch.isfinite(value).all():
        raise InputError(f"loss: expected a finite value, got {value.item()}")


def _check_count(name: str, value, least: int, even: bool) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (even and value % 2):
        kind = "an even integer" if even else "an integer"
        raise InputError(f"{name}: expected {kind} of at least {least}, got {value!r}")


def _batches(batch) -> list:
    """The batches that are given, one or several, of equal sizes; mappings as dictionaries."""
    if isinstance(batch, torch.Tensor | tuple | Mapping):
        batch = [batch]
    if not isinstance(batch, Iterable) or isinstance(batch, str):
        raise InputError(
            "batch: expected a tensor, a tuple or a mapping of tensors, or a list of batches, got "
            f"{type(batch).__name__}"
        )
    batches = [dict(each) if isinstance(each, Mapping) else each for each in batch]
    if not batches:
        raise InputError("batch: expected a batch or several, got an empty list")
    sizes = [_size(each) for each in batches]
    if len(set(sizes)) > 1:
        raise InputError(
            f"batch: expected batches of one size, got {', '.join(map(str, sizes))} samples"
        )
    return batches


@contextmanager
def _explained(batch):
    """What a data loader calls a batch, a list [inputs, targets], is several batches here."""
    try:
        yield
    except Exception as error:
        if isinstance(batch, list) and all(isinstance(each, torch.Tensor) for each in batch):
            raise InputError(
                f"batch: expected a list of batches, got {len(batch)} tensors that loss cannot be called with one by "
                f"one ({type(error).__name__}); if they are one batch, give tuple(batch)"
            ) from error
        raise


def _size(batch) -> int:
    """How many samples a batch has: dimension 0 of its first tensor that has one."""
    for each in tree_leaves(batch):
        if isinstance(each, torch.Tensor) and each.dim():
            return len(each)
    raise InputError("batch: expected a tensor with samples in dimension 0, got none")


def _parts(batch, chunks: int) -> list:
    """Equal parts; tensors with another dimension 0 than the batch's size are in each of them."""
    size = _size(batch)
    if size % chunks:
        raise InputError(
            f"batch: expected a multiple of chunks={chunks} samples, or several batches, got {size}"
        )
    step = size // chunks

    def part(start, each):
        is_split = isinstance(each, torch.Tensor) and each.dim() and len(each) == size
        return each[start : start + step] if is_split else each

    return [tree_map(partial(part, start), batch) for start in range(0, size, step)]


def _seed_generators(devices, seed: int) -> None:
    """The CPU's and those of the devices; torch.manual_seed would reach those of others."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        if device.type != "cpu" and device.type != "meta":
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)


def _shape(value) -> str:
    return f"shape {tuple(value.shape)}"


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b else float("nan") if not a else float("inf")


def _plain(value):
    if isinstance(value, np.ndarray):
        return np.where(np.isnan(value), None, value.astype(object)).tolist()
    return list(value) if isinstance(value, tuple) else value
