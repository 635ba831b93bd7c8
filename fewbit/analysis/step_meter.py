"""The step meter, which counts the bytes that a user's training step has saved when its backward pass begins."""

from __future__ import annotations

import sys
import threading
import weakref

import torch
from torch import nn

from fewbit.analysis.meter import existing_kinds, identity_of, parts_of
from fewbit.analysis.recorder import Place, Token
from fewbit.runtime.interop.checkpoint import in_backward
from fewbit.runtime.interop.saved_tensor_hooks import take_off_hooks

_NOWHERE = Place("", "", False)
_running = threading.local()  # its attribute `meter` is the meter that watches this thread


class _Held(Token):
    """A `Token` of a step that goes on: the backward pass gets the saved tensor, or what a copy restores."""

    restore = None

    def replace(self, tensors, restore) -> None:
        super().replace(tensors, restore)
        self.tensor, self.restore = None, restore  # type: ignore[assignment]

    def restored(self) -> torch.Tensor:
        return self.tensor if self.restore is None else self.restore(None)


class StepMeter:
    """Counts the bytes that are saved when the first backward pass of a step begins.

    Call `begin` before the forward passes of a step, and `end` after its backward passes. Tensors for which other
    saved-tensor hooks inside the step are called are not counted.

    Attributes:
        total: the bytes of the latest counted step; None before.
    """

    def __init__(self):
        self.total: int | None = None
        self._model = None
        self._hooks = None
        self._tokens: list[weakref.ref[_Held]] = []
        self._lock = threading.Lock()

    def __reduce__(self):
        return type(self), ()

    def begin(self, model: nn.Module) -> None:
        """Watch the tensors that autograd saves in this thread, except parameters and buffers."""
        self.end()
        abandoned = getattr(_running, "meter", None)
        if abandoned is not None:
            # Its step has raised an error, after which nobody could call `end`.
            abandoned.end()
        hooks = self._pack, self._unpack
        if "torch._dynamo" in sys.modules:
            hooks = tuple(map(torch.compiler.disable, hooks))
        # After an error the hooks may stay on the stack for long. They must not keep the model's memory.
        self._model, self._tokens, self._hooks = weakref.ref(model), [], hooks
        _running.meter = self
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    def end(self) -> None:
        """Stop watching."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            _running.meter = None
            take_off_hooks(hooks)
            self._count()

    def _pack(self, tensor):
        token = _Held(tensor, _NOWHERE)
        if self._model is not None:
            self._tokens.append(weakref.ref(token))
        return token

    def _unpack(self, token):
        if self._model is not None and in_backward():
            self._count()
        return token.restored()

    def _count(self) -> None:
        # Autograd runs the backward passes of several devices in threads of their own.
        with self._lock:
            model, self._model = self._model and self._model(), None
            tokens = [token for token in (ref() for ref in self._tokens) if token is not None]
            self._tokens = []
            if model is None or not tokens:
                return
            sizes, existing = {}, existing_kinds({"": model}, ())
            for token in tokens:
                for part in (part for tensor in token.tensors for part in parts_of(tensor)):
                    key, size = identity_of(part)
                    if key not in existing and token.origin != "leaf":
                        sizes[key] = size
            self.total = sum(sizes.values())
