"""Tests of the callback for Lightning: conversion, functions in training_step, metrics, and resumed training."""

import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from composed import names_of_nodes
from quick_fit import quick_fit
from torch import nn
from torch.nn import functional as F

import fewbit

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402

from fewbit.integrations import lightning as adapter  # noqa: E402

# Lightning's own use of torch, and its advice about settings of the trainer.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
]

WIDTH, CLASSES, SAMPLES = 64, 8, 32


class Functions(lightning.LightningModule):
    """A network whose training_step calls only functions."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 8)
        self.second = nn.Parameter(torch.randn(CLASSES, WIDTH, generator=generator) / 8)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = F.gelu(F.linear(x, self.first))
        return F.cross_entropy(F.linear(h, self.second), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Layers(lightning.LightningModule):
    """A network of layers, called in training_step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = layers()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Late(Layers):
    """A network whose layers are made in configure_model."""

    def __init__(self):
        lightning.LightningModule.__init__(self)
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = layers()


class LateAndCompressed(Late):
    """A network that is compressed in configure_model, as fully_shard needs it."""

    def configure_model(self):
        super().configure_model()
        adapter.compress(self)


class Manual(Layers):
    """A network that runs its backward pass in training_step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()


def layers():
    parts = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*parts)


def pairs(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        yield x, x[:, :CLASSES].argmax(1)


def mappings(count):
    return [{"x": x, "y": y} for x, y in pairs(count)]


class SeededSteps(lightning.Callback):
    """Seeds torch before each step from the number of the step, as Lightning does not save torch's generator."""

    def on_train_batch_start(self, trainer, *_):
        torch.manual_seed(trainer.global_step)


def fit(module, batches, callbacks, epochs=1, path=None, folder=None, **arguments):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[SeededSteps(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(module, loader, ckpt_path=path)
    return trainer


def saved(module, batch):
    """Return the bytes of what training_step saves, counted by fewbit's meter."""
    return fewbit.saved_bytes(module.training_step, batch, 0).total


class Watch(lightning.Callback):
    """Stores the metrics and the names of the autograd nodes of the loss."""

    def __init__(self):
        self.metrics, self.nodes = {}, set()

    def on_before_backward(self, trainer, module, loss):
        self.nodes |= names_of_nodes(loss)

    def on_train_batch_end(self, trainer, *_):
        self.metrics = {**self.metrics, **trainer.callback_metrics}


def test_functions_in_training_step(tmp_path):
    batches = list(pairs(1))
    exact = saved(Functions(), batches[0])
    module, watch = Functions(), Watch()
    callback = adapter.FewbitCallback(bits=2, verbose=False)
    fit(module, batches, [callback, watch], folder=tmp_path)
    assert {"_LinearBackward", "CopiedActivationBackward", "_CrossEntropyBackward"} <= watch.nodes
    assert not {"MmBackward0", "GeluBackward0", "LogSoftmaxBackward0"} & watch.nodes
    assert watch.metrics["fewbit/bits"] == 2
    assert 0 < watch.metrics["fewbit/saved_bytes"] < exact / 5
    assert "training_step" not in vars(module)


def test_logged_bytes_are_those_of_the_meter(tmp_path):
    batches = mappings(1)
    module, watch = Layers(), Watch()
    fit(module, batches, [adapter.FewbitCallback(bits=4, verbose=False), watch], folder=tmp_path)
    adapter._TrainingStep.put_into(module)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # the meter's are gone
    assert watch.metrics["fewbit/saved_bytes"] == saved(module, batches[0])
    adapter._TrainingStep.take_from(module)


@pytest.mark.parametrize("make", [Late, LateAndCompressed])
def test_layers_that_are_made_late(make, tmp_path):
    callback, watch = adapter.FewbitCallback(bits=2, verbose=False), Watch()
    fit(make(), mappings(1), [callback, watch], folder=tmp_path)
    assert len(callback.controller.report.converted) == 4
    assert "AddmmBackward0" not in watch.nodes


def test_manual_optimization(tmp_path):
    module, watch = Manual(), Watch()
    before = module.net[0].weight.detach().clone()
    callback = adapter.FewbitCallback(bits=4, verbose=False)
    fit(module, mappings(2), [callback, watch], folder=tmp_path)
    assert len(callback.controller.report.converted) == 4
    assert not torch.equal(before, module.net[0].weight)
    exact = saved(Layers(), mappings(1)[0])
    assert exact / 20 < watch.metrics["fewbit/saved_bytes"] < exact / 3


def test_a_second_fit_keeps_the_controller(tmp_path):
    module, callback = Layers(), adapter.FewbitCallback(fewbit.AdaptiveBits(2.5), verbose=False)
    fit(module, mappings(3), [callback], folder=tmp_path)
    controller, state = callback.controller, callback.state_dict()
    callback.setup(None, module, "fit")
    assert callback.controller is controller
    assert callback.state_dict() == state
    fewbit.restore_(module)
    callback.setup(None, module, "fit")
    assert callback.controller is not controller


def test_compress_without_a_callback(tmp_path):
    with pytest.raises(fewbit.InputError, match="expected one FewbitCallback .* got 0"):
        fit(LateAndCompressed(), mappings(1), [], folder=tmp_path)


@pytest.mark.parametrize(
    "bits", [2, fewbit.AdaptiveBits(2.5, interval=4)], ids=["fixed", "adaptive"]
)
@pytest.mark.parametrize("make", [Layers, Late])
def test_resumed_training_is_the_uninterrupted_one(bits, make, tmp_path):
    def train(module, epochs, path=None):
        callback = adapter.FewbitCallback(bits, verbose=False)
        return fit(module, mappings(4), [callback], epochs, path, tmp_path), callback

    whole, resumed = make(), make()
    _, whole_callback = train(whole, 3)
    trainer, _ = train(make(), 2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    _, callback = train(resumed, 3, tmp_path / "two.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert callback.state_dict() == whole_callback.state_dict()
    if bits != 2:
        assert callback.state_dict()["controller"]


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    """The strategy passes training_step through the wrapper's forward, whose calls are those of the model."""
    module, watch = Functions(), Watch()
    callback = adapter.FewbitCallback(bits=2, verbose=False)
    try:
        with patch.dict(
            os.environ
        ):  # Lightning sets variables such as RANK, which other frameworks would read
            fit(
                module,
                list(pairs(2)),
                [callback, watch],
                folder=tmp_path,
                strategy="ddp",
                devices=1,
            )
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert {"_LinearBackward", "CopiedActivationBackward", "_CrossEntropyBackward"} <= watch.nodes
    plain = Functions()
    fit(plain, list(pairs(2)), [adapter.FewbitCallback(bits=2, verbose=False)], folder=tmp_path)
    assert torch.equal(plain.first, module.first)


class Deep(Layers):
    """A network of four blocks, which logs a metric of its own."""

    def __init__(self):
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        ]
        self.net = nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss)
        return loss


@pytest.mark.filterwarnings("ignore:You are trying to .self.log:UserWarning")
def test_a_memory_in_place_of_bits(tmp_path, monkeypatch):
    """The first batch is the sample; steps that measure are not logged, and the model trains with what was chosen."""
    quick_fit(monkeypatch, tmp_path)
    batches = [
        {name: value.repeat(32, *[1] * (value.dim() - 1)) for name, value in one.items()}
        for one in mappings(2)
    ]
    exact = saved(Deep(), batches[0])
    module, watch, memory = Deep(), Watch(), 6 * 2**20
    callback = adapter.FewbitCallback(memory=memory, verbose=False, progress=False)
    before = module.net[1].weight.detach().clone()
    fit(module, batches, [callback, watch], folder=tmp_path)
    assert callback.fit.peak <= memory < callback.fit.exact_peak
    assert callback.fit.optimizer == "AdamW" and callback.fit.batch == 1024
    assert len(callback.fit.settings.blocks) == 4
    assert 0 < watch.metrics["fewbit/saved_bytes"] < 0.8 * exact
    assert "own" in watch.metrics and "log" not in vars(module)
    assert not torch.equal(before, module.net[1].weight)


def test_a_memory_needs_a_training_that_it_can_measure(tmp_path):
    callback = adapter.FewbitCallback(memory="1 GiB")
    with pytest.raises(fewbit.InputError, match="with automatic_optimization=True, got False"):
        fit(Manual(), mappings(1), [callback], folder=tmp_path)
    trainer = SimpleNamespace(world_size=1, strategy=SimpleNamespace(model=None), optimizers=[1, 2])
    with pytest.raises(fewbit.InputError, match="a training with one optimizer, got 2"):
        callback._fit(trainer, Deep(), None)


def test_a_memory_needs_replicas_in_several_processes():
    """With FSDP or DeepSpeed a process does not have the whole model."""
    trainer = SimpleNamespace(world_size=2, strategy=FSDPStrategy())
    with pytest.raises(fewbit.InputError, match="with DistributedDataParallel, got FSDPStrategy"):
        adapter.FewbitCallback(memory="1 GiB")._fit(trainer, Deep(), None)
