"""Run the calls of a converted model's modules, and restore the state of the thread after each call.

A call may end with an exception. Python may raise KeyboardInterrupt at any bytecode, even while state is being
restored. All restoring is therefore idempotent and done twice after an exception (docs/decisions/0013). Because an
exception may occur between any two statements, do not change the order of the statements here.
"""

from __future__ import annotations

import weakref

import torch

from fewbit.runtime.interop import bypass
from fewbit.runtime.interop.autograd_graph import next_sequence_number
from fewbit.runtime.interop.checkpoint import (
    checkpoint_hook,
    in_backward,
    reentrant_region,
    region_of,
)
from fewbit.runtime.interop.interrupts import ThreadState, close_suspended
from fewbit.runtime.interop.module_calls import PATH
from fewbit.runtime.saved.context import ForwardContext


class CallGuard:
    """Runs the calls of the modules of one model, each as a part of a forward pass of the model.

    Args:
        context: the model's `ForwardContext`, the state that the model's layers share.
    """

    def __init__(self, context: ForwardContext):
        self.context = context

    def call(self, module, function, args=(), kwargs=None):
        """Return function(*args, **kwargs), run as a part of a forward pass of this model.

        The outermost call is the whole forward pass. When a call returns or raises, the previous state is restored.
        After an exception the state is restored a second time, because the first restoration may have been interrupted.

        Args:
            module: the module that is called.
            function: the function that runs the module.
            args: the arguments of the call.
            kwargs: the keyword arguments of the call, or None.
        """
        kwargs, context = kwargs or {}, self.context
        call = _Call(context, module)
        try:
            try:
                call.begin(module, args, kwargs)
                outputs = function(*args, **kwargs)
                call.compress(outputs)
                ended = context.finished_forward() if call.is_outermost else None
                has_saved = context.has_saved
                if call.is_outermost:
                    context.cache.forget_unused()
            finally:
                call.put_back()
        except BaseException as error:
            close_suspended(error)
            call.put_back()
            if call.state is not None:
                call.state.put_back()
            raise
        if ended is not None:
            if ended.assignment and ended.assignment.probe is not None:
                ended.assignment.probe.watch(outputs)
            # Advance torch's generator once per forward, after the model has drawn its own numbers, and only if a
            # layer saved a tensor.
            if has_saved:
                torch.randint(2**63 - 1, (), device="cpu")
        return outputs


class _Call:
    """A call of a module, with the state to restore when the call ends.

    Only the Python frame of the call has a strong reference to this object. If the call is abandoned, the object is
    gone with the frame, so it no longer counts as a running call.

    `ForwardContext` reads these attributes:

    Attributes:
        context: the context of the model.
        hook: the hook of the checkpointed region in which the module was called, or None.
        training: whether the module is in training mode.
        path: the path of the module in the model.
    """

    __slots__ = (
        "__weakref__", "context", "hook", "training", "path", "is_outermost", "contexts", "state", "_calls", "_modes", "_start",
    )  # fmt: skip

    def __init__(self, context: ForwardContext, module):
        self.context = context
        self.hook, self.training = checkpoint_hook(), module.training
        self.path = vars(module).get(PATH, "")
        self._start = next_sequence_number()
        self._calls, self._modes = context.calls(), bypass.modes()
        self.is_outermost = not context.is_running()
        self.state = ThreadState() if self.is_outermost else None
        contexts = context.contexts if self.is_outermost else ()
        self.contexts = [(outer, outer.depth_outside()) for outer in contexts]

    def begin(self, module, args, kwargs) -> None:
        """Make this call the innermost one of the thread. If it is the outermost one too, begin a forward pass."""
        context, has_grad = self.context, torch.is_grad_enabled()
        reference = weakref.ref(self)
        context.set_calls(reference, reference)
        # A reentrant checkpoint first runs its region without grad. The backward pass runs the region again with grad.
        is_first_of_two = self.training and not has_grad and reentrant_region() is not None
        if self.is_outermost:
            bypass.clear()
            context.cache.begin()
            context.record_save(False)
            if has_grad or is_first_of_two:
                context.begin_forward(module, (*args, *kwargs.values()))
        region = reentrant_region() if is_first_of_two else region_of(self.hook)
        context.join_region(region, is_first_of_two)
        if self.is_outermost and has_grad and self.training:
            if context.compressor is not None:
                context.compressor.begin(module, (args, kwargs))
            for entered, _ in self.contexts:
                entered.__enter__()

    def compress(self, outputs) -> None:
        """Compress what torch's operations have saved in this call, unless the call will be computed again."""
        compressor = self.context.compressor
        if (
            compressor is None
            or self.hook is not None
            or not (self.training and torch.is_grad_enabled())
        ):
            return
        if not in_backward():
            compressor.compress(self.path, self._start, outputs, self.context)
            if self.is_outermost:
                compressor.finish(self.context)

    def put_back(self) -> None:
        """Restore everything that the call has changed. Calling this twice has the same effect as calling it once."""
        context = self.context
        if self.is_outermost:
            for entered, depth in reversed(self.contexts):
                entered.cut(depth)
            if context.is_private or context.checkpoints.is_over():
                context.checkpoints.clear()
            context.cache.end()
            context.end_forward()
            if context.compressor is not None:
                context.compressor.end()
        bypass.restore_modes(self._modes)
        context.set_calls(*self._calls)
