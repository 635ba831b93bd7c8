"""The memory that training a model takes, by the formulas of appendix B of the paper Few-bit Backward (docs/results/memory.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from fewbit import models
from fewbit.errors import FewbitError
from fewbit.extras import needed_for
from fewbit.render.result import Result
from fewbit.render.view import Column, View
from fewbit.sizes import GB, MB, counted, format_size

COPIES = 4  # parameters, gradients and the two moments of Adam
IMAGE_SIZE = 256
SEQUENCE_LENGTH = 256
DEVICE_BYTES = 32 * GB
BITS = (1, 2, 3, 4)

# Appendix B, as printed: MB of the model, of all activations and of the nonlinearities' per sample,
# then the largest batch without compression and at 1 to 4 bits.
PAPER = {
    "resnet18": (44.6, 40.0, 11.5, 813, 1127, 1113, 1100, 1086),
    "resnet50": (99.2, 156.8, 47.9, 206, 293, 289, 285, 281),
    "resnet101": (171.4, 234.5, 73.4, 136, 196, 193, 190, 188),
    "resnet152": (232.3, 328.2, 104.9, 97, 140, 138, 136, 134),
    "densenet121": (30.9, 243.8, 79.1, 133, 195, 192, 189, 186),
    "densenet161": (112.4, 458.8, 147.0, 70, 102, 100, 99, 97),
    "densenet169": (54.7, 296.3, 95.3, 109, 159, 157, 155, 152),
    "densenet201": (77.4, 382.2, 123.9, 84, 123, 122, 120, 118),
    "efficientnet_b0": (20.4, 112.4, 32.4, 290, 403, 398, 393, 388),
    "efficientnet_b3": (47.5, 218.6, 59.5, 149, 202, 200, 197, 195),
    "efficientnet_b7": (256.3, 674.8, 179.3, 47, 63, 62, 61, 61),
    "vgg11": (507.2, 100.9, 37.0, 304, 472, 464, 456, 448),
    "vgg16": (528.2, 163.8, 68.5, 187, 314, 307, 301, 295),
    "vgg19": (548.4, 178.8, 75.0, 171, 288, 281, 275, 270),
    "roberta-base": (480.7, 185.6, 36.0, 166, 204, 203, 201, 200),
    "roberta-large": (1355.6, 482.1, 96.0, 56, 70, 69, 69, 68),
    "gpt2": (491.0, 297.1, 146.2, 103, 198, 192, 187, 182),
}


@dataclass(frozen=True)
class ModelMemory:
    """The bytes that one forward of a model saves, in float32.

    Attributes:
        size: The side of the images in pixels, or the number of tokens.
        activation: The name of the activation with which the model was built, or None.
        model_bytes: The bytes of parameters and buffers.
        activation_bytes: All bytes that are saved for backward.
        nonlinear_bytes: The part of `activation_bytes` that only activation modules save.
        activation_inputs: The number of input elements in each call of an activation.
    """

    model: str
    size: int
    batch: int
    activation: str | None
    dropout: bool
    parameters: int
    model_bytes: int
    activation_bytes: int
    nonlinear_bytes: int
    activation_inputs: tuple[int, ...]

    @property
    def share(self) -> float:
        """The fraction of the saved bytes that only activation modules save, 0 to 1."""
        return self.nonlinear_bytes / self.activation_bytes

    @property
    def like_paper(self) -> bool:
        """True if the settings are those of the paper's appendix B."""
        size = SEQUENCE_LENGTH if models.family(self.model).is_text else IMAGE_SIZE
        own = self.activation == paper_activation(self.model)
        return self.model in PAPER and own and self.size == size and not self.dropout

    def saved(self, bits: int | None) -> float:
        """Return the saved bytes by the paper's formula, with `bits` bits in activations; None stands for 32."""
        fraction = 1 if bits is None else bits / 32
        return self.activation_bytes - self.nonlinear_bytes * (1 - fraction)

    def saved_packed(self, bits: int) -> int:
        """Return the bytes that fewbit saves, with packed codes of `bits` bits."""
        packed = sum(4 * bits * -(-elements // 32) for elements in self.activation_inputs)
        return self.activation_bytes - self.nonlinear_bytes + packed

    def max_batch(self, saved: float, device_bytes: int) -> int:
        """Return the largest batch that fits on a device with COPIES times the model's bytes; `saved` is for `batch` samples."""
        return max(0, int((device_bytes - COPIES * self.model_bytes) * self.batch // saved))


def paper_activation(name):
    """Return the activation with which the paper measured a model; None for the model's own."""
    return "gelu" if models.family(name).has_relu else None


def measure(
    name: str,
    *,
    size: int | None = None,
    batch: int = 1,
    activation: str | None = "paper",
    dropout: bool = False,
) -> ModelMemory:
    """Count the bytes that one forward of a model in training saves.

    Args:
        name: One of the names that `fewbit.models.names` returns.
        size: The side of the images in pixels, or the number of tokens, 256 by default.
        batch: The number of samples.
        activation: A key of ``fewbit.models.activation_names.FACTORIES``, None for the model's own, or ``"paper"``: GELU
            replaces ReLU.
        dropout: Whether dropout is on. In the paper it is off.
    """
    name = models.resolve(name)
    if not isinstance(batch, int) or batch < 1:
        raise FewbitError(f"batch: expected an integer of at least 1, got {batch!r}")
    if activation == "paper":
        activation = paper_activation(name)
    with needed_for(f"the model {name}"):
        import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fewbit.analysis.meter import saved_bytes

    is_text = models.family(name).is_text
    if size is None:
        size = SEQUENCE_LENGTH if is_text else IMAGE_SIZE
    size = models.check_size(name, size)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        model = models.build(name, activation)
        if not dropout:
            freeze_dropout(model)
        if is_text:
            inputs = torch.zeros((batch, size), dtype=torch.int64)
        else:
            inputs = torch.empty((batch, 3, size, size))
        elements, hooks = _watch_activations(model)
        saved = saved_bytes(model, inputs)
        for hook in hooks:
            hook.remove()
    parameters = list(model.parameters())
    state = [*parameters, *model.buffers()]
    return ModelMemory(
        model=name,
        size=size,
        batch=batch,
        activation=activation,
        dropout=dropout,
        parameters=sum(tensor.numel() for tensor in parameters),
        model_bytes=sum(tensor.nbytes for tensor in state),
        activation_bytes=saved.total,
        nonlinear_bytes=_nonlinear(model, saved),
        activation_inputs=tuple(elements),
    )


def freeze_dropout(model):
    """Set all modules to evaluation mode except batch norms."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for module in model.modules():
        module.training = isinstance(module, _BatchNorm)


def _watch_activations(model):
    """Return hooks, and a list to which they append the number of input elements of each call of an activation."""
    from fewbit.models.activation_names import is_activation

    elements = []

    def count(_module, arguments):
        elements.append(arguments[0].numel())

    modules = [module for module in model.modules() if is_activation(module)]
    return elements, [module.register_forward_pre_hook(count) for module in modules]


def _nonlinear(model, saved):
    from fewbit.models.activation_names import is_activation

    paths = {path for path, module in model.named_modules() if is_activation(module)}
    return sum(entry.bytes for entry in saved.kept if {entry.module, *entry.shared_with} <= paths)


# -- The report ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class MemoryReport(Result):
    """Measurements of models, and the largest batches on a device. A single model has one row for each of `bits`.

    Attributes:
        bits: The bits per element of few-bit activations for the largest batches.
    """

    measurements: tuple[ModelMemory, ...]
    device_bytes: int = DEVICE_BYTES
    bits: tuple[int, ...] = BITS

    def records(self) -> list[dict]:
        return [self._record(measured) for measured in self.measurements]

    def _record(self, measured: ModelMemory) -> dict:
        record = asdict(measured)
        del record["activation_inputs"]
        record["nonlinear_share"] = measured.share
        record["device_bytes"] = self.device_bytes
        record["max_batch_standard"] = self._batch(measured, None)
        for bits in self.bits:
            record[f"max_batch_{bits}bit"] = self._batch(measured, bits)
            record[f"kept_bytes_{bits}bit"] = measured.saved_packed(bits)
            record[f"max_batch_packed_{bits}bit"] = self._packed_batch(measured, bits)
        return record

    def _batch(self, measured: ModelMemory, bits: int | None) -> int:
        return measured.max_batch(measured.saved(bits), self.device_bytes)

    def _packed_batch(self, measured: ModelMemory, bits: int | None) -> int:
        saved = measured.saved(None) if bits is None else measured.saved_packed(bits)
        return measured.max_batch(saved, self.device_bytes)

    def view(self) -> View:
        if len(self.measurements) == 1:
            return self._one(self.measurements[0])
        device = f"{format_size(self.device_bytes)} device"
        columns = [
            Column("MB per sample", lambda row: row.model, "name"),
            Column("model", lambda row: _mb(row.model_bytes), drop=3),
            Column("saved", lambda row: _mb(row.activation_bytes / row.batch)),
            Column("nonl.", lambda row: _mb(row.nonlinear_bytes / row.batch), drop=2),
            Column("share", lambda row: f"{100 * row.share:.0f} %", drop=1),
            Column("batch", lambda row: str(self._batch(row, None))),
        ]
        for place, bits in enumerate(self.bits):  # a narrow table drops most bits first
            cell = partial(self._batch, bits=bits)
            drop = 3 + len(self.bits) - place
            columns.append(Column(f"{bits} b", lambda row, cell=cell: str(cell(row)), drop=drop))
        notes = [
            "saved: for backward; nonl.: the part saved by nothing but nonlinearities.",
            "batch: the largest, beside four copies of the model; then at 1, 2, ... bits.",
            UNITS_NOTE,
        ]
        title = f"Memory of training and the largest batch on a {device}"
        return View(title, columns, self.measurements, notes)

    def _one(self, measured: ModelMemory) -> View:
        standard, first = measured.saved(None), self._batch(measured, None)
        printed = measured.like_paper and self.device_bytes == DEVICE_BYTES

        def less(bits: int | None) -> str:
            return f"{100 * (1 - measured.saved(bits) / standard):.1f} %"

        def gain(bits: int | None) -> str:
            return f"{100 * (self._batch(measured, bits) / first - 1):+.1f} %" if first else "-"

        def paper(bits: int | None) -> str:
            known = printed and (bits is None or bits in BITS)
            return str(PAPER[measured.model][3 + (bits or 0)]) if known else "-"

        columns = (
            Column("nonlinearities", lambda bits: counted(bits or 32, "bit"), "name"),
            Column("saved MB", lambda bits: _mb(measured.saved(bits) / measured.batch), drop=4),
            Column("less", less, drop=2),
            Column("batch", lambda bits: str(self._batch(measured, bits))),
            Column("gain", gain, drop=1),
            Column("fewbit's", lambda bits: str(self._packed_batch(measured, bits))),
            Column("paper", paper, drop=3),
        )
        unit = "tokens" if models.family(measured.model).is_text else f"x {measured.size} pixels"
        using = f", {measured.activation}" if measured.activation else ""
        title = f"{measured.model}{using}, {measured.size} {unit}, on a {format_size(self.device_bytes)} device"
        facts = [_facts(measured)]
        return View(title, columns, (None, *self.bits), list(_notes(measured)), more=facts)


UNITS_NOTE = "MB = 2^20 bytes, float32. docs/results/memory.md says how each figure is counted."


def _notes(measured: ModelMemory) -> Iterator[str]:
    yield "saved, batch: the paper's arithmetic, the nonlinear part at b of 32 bits."
    yield "fewbit's: the batch with the bytes that fewbit's layers save."
    if measured.nonlinear_bytes < 0.01 * measured.activation_bytes:
        yield "Other layers save the same tensors; few-bit codes gain nothing."
    stand_in = measured.activation
    if stand_in is not None and stand_in == paper_activation(measured.model):
        yield f"{stand_in} in place of relu, as in the paper; --activation own: as it is."
    yield UNITS_NOTE


def _facts(measured: ModelMemory) -> View:
    printed = PAPER[measured.model][:3] if measured.like_paper else ("-",) * 3
    share = f"{100 * measured.share:.1f} % of it, by nonlinearities alone"
    total = COPIES * measured.model_bytes + measured.activation_bytes
    rows = [
        (
            "model",
            measured.model_bytes,
            printed[0],
            f"{measured.parameters:,} parameters, and buffers",
        ),
        (
            "saved",
            measured.activation_bytes / measured.batch,
            printed[1],
            "for backward, per sample",
        ),
        ("nonlinear", measured.nonlinear_bytes / measured.batch, printed[2], share),
    ]
    if measured.batch != 1:
        saved, copies = f"saved at batch {measured.batch}", f"with {COPIES} copies of the model"
        rows += [("", measured.activation_bytes, "", saved), ("", total, "", copies)]
    columns = (
        Column("", lambda row: row[0], "word"),
        Column("MB", lambda row: _mb(row[1])),
        Column("paper", lambda row: str(row[2]), drop=1),
        Column("", lambda row: row[3], "text", least=24),
    )
    return View("", columns, rows)


def _mb(value: float) -> str:
    return f"{value / MB:.1f}"


def memory(
    names=None,
    *,
    bits=BITS,
    device_bytes: int = DEVICE_BYTES,
    image_size: int | None = None,
    sequence_length: int | None = None,
    batch: int = 1,
    activation: str | None = "paper",
    dropout: bool = False,
    progress=None,
) -> MemoryReport:
    """Measure one or several models, and compute their largest batches by the formulas of appendix B.

    The arguments are the options of `fewbit memory` (docs/reference/cli.md); `names` None stands for all models. `progress`, if given, is
    called as ``progress(what, done, total)`` before each measurement.
    """
    names = [models.resolve(name) for name in names or models.names()]
    names = list(dict.fromkeys(names))
    for count in bits:
        if count not in range(1, 9):
            raise FewbitError(f"bits: expected 1 to 8, got {count!r}")
    text = [models.family(name).is_text for name in names]
    if image_size is not None and all(text):
        raise FewbitError(f"{names[0]}: expected a sequence length, got an image size")
    if sequence_length is not None and not any(text):
        raise FewbitError(f"{names[0]}: expected an image size, got a sequence length")
    measurements = []
    for done, name in enumerate(names):
        if progress is not None:
            progress(f"measuring {name}", done, len(names))
        size = sequence_length if text[done] else image_size
        measurements.append(
            measure(name, size=size, batch=batch, activation=activation, dropout=dropout)
        )
    return MemoryReport(tuple(measurements), device_bytes, tuple(dict.fromkeys(bits)))
