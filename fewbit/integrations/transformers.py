"""A callback for the Trainer of transformers, and for trainers that are derived from it, such as those of TRL.

`on_init_end` compresses the model, which then has its adapters and is not yet wrapped or compiled. The states of callbacks are in
`trainer_state.json`, which the Trainer loads before `on_train_begin`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator

from accelerate.state import AcceleratorState
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from fewbit.analysis.step_meter import StepMeter
from fewbit.checkpointing import CHECKPOINTING, checkpoint
from fewbit.compress.compress import compress_
from fewbit.compress.controller import Controller
from fewbit.config import DEFAULT_BITS, as_config, plain_arguments
from fewbit.convert.swap import is_converted
from fewbit.errors import InputError
from fewbit.integrations.first_batch import first_batch
from fewbit.integrations.refusals import refuse, shards
from fewbit.planning.all_ranks import DDP
from fewbit.planning.fit import fit_
from fewbit.planning.fits import check_memory
from fewbit.runtime.parallel.process_groups import is_sharded
from fewbit.runtime.saved.bit_policy import SAMPLES
from fewbit.runtime.saved.context import contexts_of
from fewbit.sizes import counted

__all__ = ["FewbitCallback"]

SAVED, BITS = "fewbit/saved_bytes", "fewbit/bits"
"""The names of the values in the Trainer's logs."""
_STATE = "controller_state"
"""The entry for the controller's state."""
_controllers = weakref.WeakKeyDictionary()
"""{model: its controller}, for callbacks that the Trainer makes anew when it resumes."""


class FewbitCallback(TrainerCallback, ExportableState):
    """Compresses the model of a Trainer as `fewbit.compress_` does, logs what is saved, and resumes the chosen bits.

    The logs of training get "fewbit/saved_bytes", the bytes that autograd holds when the backward pass of the logged step begins, without
    parameters and buffers, and "fewbit/bits", the average bits per element of quantized tensors. With `torch_compile`, with TRL's
    `activation_offloading` and with `offload`, only the bits are logged.

    Args:
        bits: as in `fewbit.compress_`.
        memory: a size such as "24 GiB". When the training begins, `fewbit.fit_` then chooses what each block saves, so
            that a training step fits in this memory, with the first batch as the sample, the Trainer's optimizer, and the
            model's own loss. If the Trainer computes another loss, add the callback to it afterwards, with
            ``loss=trainer.compute_loss``. The other arguments are those of `fewbit.fit_`, without `bits`. Several processes
            train with DistributedDataParallel, and neither `torch_compile` nor gradient checkpointing is on.
        **arguments: the other arguments of `fewbit.compress_`. By default only the first process prints the report.

    Attributes:
        fit: the result of `fewbit.fit_`; None without `memory`, or before the training begins.
        controller: the `Controller` of the model; None before the Trainer's constructor has run.

    Raises:
        InputError: `bits` or `memory` cannot be used. Other arguments are checked when the model is compressed.
    """

    def __init__(self, bits=None, memory=None, **arguments):
        check_memory(memory, bits)
        self.arguments = {"bits": as_config(DEFAULT_BITS if bits is None else bits), **arguments}
        self.memory, self.fit = memory, None
        self.controller: Controller | None = None
        # The Trainer sets these three if it makes the callback from the state in a checkpoint.
        self.controller_state: dict | None = None
        self._is_restored = False
        self._missing: list[str] = []
        self._meter = StepMeter()
        self._is_due = False
        self._has_warned = False

    # -- Compression --------------------------------------------------------------------------------------

    def on_init_end(self, args, state, control, model=None, **kwargs) -> None:
        if self.memory is None:
            self._compress(model, state)

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        """Compress a model that `model_init` has made since, and continue from a checkpoint's state."""
        if self.memory is not None:
            self._fit(model, args, state, kwargs["train_dataloader"], kwargs["optimizer"])
        else:
            self._compress(model, state)
            if state.global_step > 0:
                self._resume(state)
        # The Trainer expects an entry of every callback, also if the checkpoint was saved without this one.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if not self._has_warned:
            self._has_warned = True
            for line in _lost_savings(model, args):
                warnings.warn(line, stacklevel=2)
        self._is_due = True

    def _compress(self, model, state) -> None:
        modules = set(model.modules())
        earlier = map(_controllers.get, modules) if self._is_restored else ()
        for controller in (self.controller, *earlier):
            if controller is not None and controller.model in modules and _is_current(controller):
                self.controller = controller
                return
        if self._missing:
            raise InputError(f"expected a compressed model, got one of model_init: {self._lost()}")
        wrapped = [type(module).__name__ for module in modules if is_sharded(module)]
        if wrapped:
            raise InputError(
                f"expected a model that is compressed before it is sharded, got {wrapped[0]}; with model_init and FSDP, "
                "call fewbit.compress_ in model_init"
            )
        # The report of a second model, made by the same model_init, would be the same.
        is_first = self.controller is None and state.is_world_process_zero
        self.controller = compress_(model, **{"verbose": is_first, **self.arguments})
        _controllers[model] = self.controller

    def _fit(self, model, args, state, batches, optimizer) -> None:
        kind = AcceleratorState().distributed_type.value
        if self._missing:
            raise InputError(f"memory: {self._lost()}")
        cases = [
            shards(kind, args.world_size > 1 and not kind.startswith("MULTI_")),
            ("one device per process", args.n_gpu, args.n_gpu > 1),
            ("gradient_checkpointing=False", "True", args.gradient_checkpointing),
            ("torch_compile=False", "True", args.torch_compile),
            (
                "label_smoothing_factor=0, or trainer.add_callback(FewbitCallback(memory=..., loss=trainer.compute_loss))",
                args.label_smoothing_factor,
                args.label_smoothing_factor and "loss" not in self.arguments,
            ),
        ]
        refuse(cases)
        devices = [] if args.device.type == "cpu" else [args.device]
        arguments = {name: value for name, value in self.arguments.items() if name != "bits"}
        loss = arguments.pop("loss", None)
        if loss is not None:  # `Trainer.compute_loss` may take the labels out of the batch
            arguments["loss"] = lambda model, batch: loss(model, dict(batch))
        self.fit = fit_(
            model,
            dict(first_batch(batches, devices)),
            self.memory,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # not accelerate's wrapper
            accumulates=args.gradient_accumulation_steps > 1,
            parallel=DDP if args.world_size > 1 else None,
            **{"verbose": state.is_world_process_zero} | arguments,
        )
        self.controller = self.fit.controller

    def _lost(self) -> str:
        return (
            f"the checkpoint has no {', '.join(self._missing)}; resume with "
            "restore_callback_states_from_checkpoint=False"
        )

    # -- Logs ---------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self._is_due |= args.logging_strategy == "epoch"

    def on_step_begin(self, args, state, control, model=None, **kwargs) -> None:
        self._meter.end()
        is_logged = (
            args.logging_strategy == "steps" and (state.global_step + 1) % state.logging_steps == 0
        )
        if (self._is_due or is_logged) and self._can_count(args):
            self._meter.begin(model)
        self._is_due = False

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self._meter.end()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs is None or "loss" not in logs or (self.controller is None and self.fit is None):
            return
        values = {} if self._meter.total is None else {SAVED: self._meter.total}
        bits = None if self.controller is None else self.controller.average_bits
        if bits is not None:
            values[BITS] = bits
        logs.update(values)
        # The Trainer has copied the logs into the history before it calls its callbacks.
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(values)

    def _can_count(self, args) -> bool:
        """Return whether the meter's hooks neither recompile, nor keep tensors on the GPU, nor see nothing."""
        is_compiled, is_moved = args.torch_compile, getattr(args, "activation_offloading", False)
        is_offloaded = self.controller is not None and self.controller.offload is not None
        return not (is_compiled or is_moved or is_offloaded)

    # -- Checkpoints --------------------------------------------------------------------------------------

    def state(self) -> dict:
        """Return the arguments and the controller's state for a checkpoint, without the numbers of samples, which JSON cannot hold."""
        plain, arguments = {}, dict(self.arguments)
        if self.memory is not None:
            plain["memory"] = self.memory
            del arguments["bits"]
        missing = []
        for name, value in arguments.items():
            try:
                plain |= plain_arguments({name: value})
            except InputError:
                missing.append(name)
        state = None if self.controller is None else self.controller.state_dict()
        if state is not None:
            state = {name: value for name, value in state.items() if name not in SAMPLES}
        attributes = {_STATE: state, "_is_restored": True, "_missing": missing}
        return {"args": plain, "attributes": attributes}

    def _resume(self, state) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        saved = saved[-1] if isinstance(saved, list) else saved
        found = saved.get("attributes", {}).get(_STATE)
        if found is not None:
            self.controller.load_state_dict(found)
        elif self.controller.state_dict():
            warnings.warn(
                "the checkpoint has no state of FewbitCallback: bits are chosen anew, from the first step on",
                stacklevel=3,
            )


def _lost_savings(model, args) -> Iterator[str]:
    """Yield a line for each setting of the Trainer because of which tensors are saved in full."""
    regions = [module for module in model.modules() if getattr(module, CHECKPOINTING[0], False)]
    functions = (getattr(module, CHECKPOINTING[1], None) for module in regions)
    if any(getattr(function, "func", None) is not checkpoint for function in functions):
        yield (
            "gradient checkpointing saves the input of each block in full, and fewbit compresses only what a block saves "
            "when it runs again; to save these inputs in 8 bits, call fewbit.checkpoint_(model), and switch gradient checkpointing "
            "off in the trainer's arguments"
        )
    if args.torch_compile:
        yield (
            "torch_compile=True: functions in compiled code save their inputs in full, and layers keep fixed bits"
        )
    patched = [
        path
        for path, module in model.named_modules()
        if is_converted(module) and "forward" in vars(module)
    ]
    if patched:
        yield (
            f"{counted(len(patched), 'compressed layer')}, {patched[0]} first, got the forward of another library, such as "
            "Liger's, and save what that forward saves"
        )


def _is_current(controller: Controller) -> bool:
    return any(context is controller.context for context in contexts_of(controller.model))
