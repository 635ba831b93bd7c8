"""A callback for Lightning that compresses the LightningModule and saves the chosen bits in its checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fewbit.analysis.step_meter import StepMeter
from fewbit.compress.compress import compress_
from fewbit.compress.controller import Controller
from fewbit.config import DEFAULT_BITS, as_config
from fewbit.errors import InputError
from fewbit.integrations.refusals import refuse, shards
from fewbit.planning.all_ranks import DDP
from fewbit.planning.fit import fit_
from fewbit.planning.fits import check_memory
from fewbit.runtime.interop.containers import tensors_in
from fewbit.runtime.interop.module_calls import GUARD
from fewbit.runtime.saved.context import contexts_of

__all__ = ["FewbitCallback", "compress"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_MADE_IN = ("setup", "configure_model")
"""The methods in which layers may still be made when the setup of callbacks runs."""


def _callbacks() -> list[type]:
    """Return the base classes of callbacks of the imported ones of `lightning` and `pytorch_lightning`, else of the installed one."""
    names = [name for name in _PACKAGES if name in sys.modules]
    if names:
        return [import_module(name).Callback for name in names]
    try:
        return [import_module(_PACKAGES[0]).Callback]
    except ModuleNotFoundError:
        return [import_module(_PACKAGES[1]).Callback]


class FewbitCallback(*_callbacks()):  # type: ignore[misc]
    """Compresses the LightningModule before the first training step, as `fewbit.compress_` does.

    If the module overrides `setup` or `configure_model`, this happens after these methods and the strategy, unless `configure_model` calls
    `compress(self)`, which is needed before `fully_shard`.

    Functions that `training_step` calls, such as F.cross_entropy, are compressed too, but not with manual optimization, where the backward
    pass runs within `training_step`.

    "fewbit/saved_bytes", the bytes that autograd holds when the backward pass begins, without parameters and buffers, and "fewbit/bits", the
    average bits per element of quantized tensors, are logged at the first step and whenever the trainer logs. With a compiled module and with
    `offload`, only the bits are logged.

    Args:
        bits: as in `fewbit.compress_`.
        memory: a size such as "24 GiB". Before the first batch, `fewbit.fit_` then chooses what each block saves, so that a
            training step fits in this memory, with this batch as the sample, the loss of `training_step`, and the trainer's
            only optimizer. The other arguments are those of `fewbit.fit_`, without `bits`. Several processes train with
            DistributedDataParallel.
        **arguments: the other arguments of `fewbit.compress_`. By default only the first process prints the report.

    Attributes:
        controller: the `Controller` of the compressed module; None before the module is compressed.
        fit: the result of `fewbit.fit_`; None without `memory`, or before the first batch.
    """

    def __init__(self, bits=None, memory=None, **arguments):
        check_memory(memory, bits)
        self.config = as_config(DEFAULT_BITS if bits is None else bits)
        self.memory, self.fit = memory, None
        self.arguments = arguments
        self.controller: Controller | None = None
        self._loaded: dict | None = None
        self._meter = StepMeter()
        self._is_logged = False

    def compress(self, module: nn.Module) -> Controller:
        """Compress a module, unless this callback already has. Return the controller."""
        if self.controller is None or self.controller.context not in contexts_of(module):
            arguments = {"verbose": _is_first_process(module)} | self.arguments
            self.controller = compress_(module, self.config, **arguments)
        if self._loaded is not None:
            self.controller.load_state_dict(self._loaded)
            self._loaded = None
        return self.controller

    # -- Hooks of Lightning -------------------------------------------------------------------------------

    def setup(self, trainer, pl_module, stage) -> None:
        if (
            self.memory is None
            and stage == "fit"
            and not any(_overrides(pl_module, name) for name in _MADE_IN)
        ):
            self.compress(pl_module)

    def on_fit_start(self, trainer, pl_module) -> None:
        if self.memory is None:
            self.compress(pl_module)
        _TrainingStep.put_into(pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self.memory is not None and self.fit is None:
            self._fit(trainer, pl_module, batch)
        interval = trainer.log_every_n_steps
        is_due = interval and (trainer.global_step + 1) % interval == 0
        self._is_logged = not trainer.barebones and bool(is_due or self._meter.total is None)
        # The hooks of the meter would make torch.compile compile the module again, and would keep tensors on the GPU that
        # fewbit moves to the host.
        is_offloaded = self.controller is not None and self.controller.offload is not None
        if self._is_logged and pl_module._compiler_ctx is None and not is_offloaded:
            self._meter.begin(pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._meter.end()
        if not self._is_logged:
            return
        if self._meter.total is not None:
            self.log("fewbit/saved_bytes", float(self._meter.total))
        bits = None if self.controller is None else self.controller.average_bits
        if bits is not None:
            self.log("fewbit/bits", bits)

    def _fit(self, trainer, module, batch) -> None:
        is_replica = isinstance(trainer.strategy.model, DistributedDataParallel)
        strategy = type(trainer.strategy).__name__
        refuse([shards(strategy, trainer.world_size > 1 and not is_replica)])
        count = len(trainer.optimizers)
        refuse(
            [
                ("automatic_optimization=True", "False", not module.automatic_optimization),
                ("one optimizer", count, count != 1),
                ("a module that is not compiled", "one of torch.compile", module._compiler_ctx),
            ]
        )

        def loss(module, batch):
            with trainer.precision_plugin.train_step_context():
                result = module.training_step(batch, 0)
            return result["loss"] if isinstance(result, Mapping) else result

        own = vars(module).get("log")
        vars(module)["log"] = lambda *args, **kwargs: None  # steps that measure are not logged
        try:
            self.fit = fit_(
                module,
                batch,
                self.memory,
                loss=loss,
                optimizer=trainer.optimizers[0],
                accumulates=trainer.accumulate_grad_batches > 1,
                parallel=DDP if is_replica else None,
                **{"verbose": _is_first_process(module)} | self.arguments,
            )
        finally:
            del vars(module)["log"]
            if own is not None:
                vars(module)["log"] = own
        self.controller = self.fit.controller

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._meter.end()

    def teardown(self, trainer, pl_module, stage) -> None:
        _TrainingStep.take_from(pl_module)

    def state_dict(self) -> dict:
        return {} if self.controller is None else {"controller": self.controller.state_dict()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue from a checkpoint's state, once the module is compressed."""
        self._loaded = state_dict.get("controller")
        if self.controller is not None and self._loaded is not None:
            self.controller.load_state_dict(self._loaded)
            self._loaded = None


def compress(module: nn.Module) -> Controller:
    """Compress a LightningModule now, with the settings of the trainer's `FewbitCallback`.

    Call this function in `configure_model`, when all layers exist and before `fully_shard` shards them. `module` is attached to a trainer.

    Raises:
        InputError: the trainer has no `FewbitCallback`.
    """
    found = [one for one in module.trainer.callbacks if isinstance(one, FewbitCallback)]
    if len(found) != 1:
        raise InputError(
            f"expected one FewbitCallback among the callbacks of the trainer, got {len(found)}"
        )
    return found[0].compress(module)


class _TrainingStep:
    """The `training_step`, run as a call of the compressed model, because strategies call it directly. Lightning reads `__wrapped__`."""

    def __init__(self, module: nn.Module):
        self.module, self.__wrapped__ = module, module.training_step

    @classmethod
    def put_into(cls, module: nn.Module) -> None:
        """Replace `training_step`, unless the module is compiled or optimizes manually."""
        is_done = isinstance(vars(module).get("training_step"), cls)
        if not is_done and module._compiler_ctx is None and module.automatic_optimization:
            vars(module)["training_step"] = cls(module)

    @classmethod
    def take_from(cls, module: nn.Module) -> None:
        if isinstance(vars(module).get("training_step"), cls):
            del vars(module)["training_step"]

    def __call__(self, *args, **kwargs):
        guard = vars(self.module).get(GUARD)
        if guard is None:
            return self.__wrapped__(*args, **kwargs)
        # The policy reads the number of samples from the first tensor, which may be inside of the batch.
        tensors = tuple(tensors_in((args, kwargs)))
        return guard.call(self.module, lambda *_: self.__wrapped__(*args, **kwargs), tensors)


def _overrides(module: nn.Module, name: str) -> bool:
    method: Callable = getattr(module, name)
    package = getattr(method, "__module__", "") or ""
    return not package.startswith(_PACKAGES)


def _is_first_process(module: nn.Module) -> bool:
    trainer = getattr(module, "_trainer", None)
    return trainer is None or trainer.is_global_zero
