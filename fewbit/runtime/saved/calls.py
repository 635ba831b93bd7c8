"""Run the calls of a converted model's modules."""

from __future__ import annotations

import torch

from fewbit.runtime.interop import bypass
from fewbit.runtime.interop.autograd_graph import next_sequence_number
from fewbit.runtime.interop.checkpoint import checkpoint_hook, in_backward, reentrant_region
from fewbit.runtime.interop.containers import tensors_in
from fewbit.runtime.saved.context import ForwardContext
from fewbit.runtime.saved.forward import Forward, running
from fewbit.runtime.saved.seeds import advance_generator


class CallGuard:
    """Runs the calls of one model's modules, each as a part of a forward pass of the model."""

    def __init__(self, context: ForwardContext):
        self.context = context

    def call(self, module, function, args=(), kwargs=None):
        """Return function(*args, **kwargs), run as a call of `module`. The outermost call is the forward pass."""
        forward = running.forward
        if forward is not None and forward.context is not self.context:
            forward = self.context.innermost_forward()
        run = self._outermost if forward is None else self._inner
        return run(forward, module, function, args, kwargs or {})

    def _inner(self, forward: Forward, module, function, args, kwargs):
        before, modes = (running.forward, forward.module, forward.hook), bypass.stack.modes
        compressor = self.context.compressor
        start = 0 if compressor is None else next_sequence_number()
        try:
            running.forward, forward.module, forward.hook = forward, module, checkpoint_hook()
            if forward.hook is not None or not torch.is_grad_enabled():
                self.context.join_region(forward)
            outputs = function(*args, **kwargs)
            if compressor is not None:
                self._compress(forward, start, outputs)
            return outputs
        finally:
            running.forward, forward.module, forward.hook = before
            bypass.stack.modes = modes

    def _outermost(self, _, module, function, args, kwargs):
        context, outer, modes = self.context, running.forward, bypass.stack.modes
        has_grad = torch.is_grad_enabled()
        compressor, start = context.compressor, 0
        # A reentrant checkpoint first runs its region without grad. The backward pass runs the region again with grad.
        if has_grad or (module.training and reentrant_region() is not None):
            forward = context.begin(module, (*args, *kwargs.values()) if kwargs else args)
        else:
            forward = context.begin_without_gradients(module)
        entered = ()
        try:
            running.forward = forward
            bypass.stack.modes = ()  # those of modules that contain the model do not apply within it
            if forward.hook is not None or not has_grad:
                context.join_region(forward, is_whole=True)
            if has_grad and module.training:
                if compressor is not None:
                    start = next_sequence_number()
                    compressor.begin(module, (args, kwargs))
                for each in context.contexts:
                    each.__enter__()
                    entered = (*entered, each)
            outputs = function(*args, **kwargs)
            if compressor is not None:
                self._compress(forward, start, outputs, is_outermost=True)
            shared = forward.shared
            if shared is not None and shared.results:
                context.forget_unused(forward)
            if shared is not None and shared.wanted:
                is_one = type(outputs) is torch.Tensor
                for tensor in (outputs,) if is_one else tensors_in(outputs):
                    shared.note_kept(tensor)
        finally:
            running.forward = outer
            for each in reversed(entered):
                each.__exit__(None, None, None)
            bypass.stack.modes = modes
            context.end(forward)
            if compressor is not None:
                compressor.end()
        if forward.is_first and forward.assignment is not None:
            probe = forward.assignment.probe
            if probe is not None:
                probe.watch(outputs)
        # Advance torch's generator once per forward, after the model has drawn its own numbers, and only if a layer saved a
        # tensor. What follows in a region draws the same numbers when the region runs again.
        if forward.has_saved and (forward.is_first or context.repeats(forward)):
            advance_generator()
        return outputs

    def _compress(self, forward: Forward, start: int, outputs, is_outermost=False) -> None:
        if forward.hook is not None or not (forward.module.training and torch.is_grad_enabled()):
            return
        if not in_backward():
            self.context.compressor.compress(forward.path, start, outputs, self.context)
            if is_outermost:
                self.context.compressor.finish(self.context)
