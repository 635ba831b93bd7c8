"""Call a model through torch.compile, with code that no other model shares, and warn if a part runs uncompressed.

torch.compile gives up on a code object after eight compilations, and models of one class share the code of `forward`.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level
from torch._dynamo import OptimizedModule
from torch._dynamo.utils import counters
from torch.utils import _python_dispatch

from fewbit.analysis.recorder import is_fewbit_node
from fewbit.compiler.partitioner import Partitioner
from fewbit.compiler.seed_counters import Drawing, takes_part
from fewbit.errors import CompileWarning
from fewbit.render.formats import amount
from fewbit.runtime.format.groups import LEAST_ELEMENTS
from fewbit.runtime.interop.autograd_graph import (
    next_sequence_number,
    nodes_of,
    nodes_since,
    saved_by,
)
from fewbit.runtime.interop.checkpoint import in_backward
from fewbit.runtime.interop.compiler_tracing import constant, notify_traced
from fewbit.runtime.interop.containers import tensors_in
from fewbit.runtime.parallel.process_groups import is_distributed_run, process_groups

_COMPILED = "CompiledFunctionBackward"
"""The name of the autograd node of a compiled graph."""
_ISOLATED = (
    # Functions that the model calls after a graph break share their code with other models.
    {"isolate_recompiles": True}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters
    else {}
)
_numbers = itertools.count()


class CompiledModel(OptimizedModule):
    """A model that `fewbit.compile` has compiled. A copy or an unpickled model is compiled anew."""

    partitioner = None
    _compile = None

    @classmethod
    def of(cls, compiled: OptimizedModule, partitioner: Partitioner, arguments: Mapping, anew):
        """Turn a result of torch.compile into an instance of this class.

        `arguments` are those of torch.compile, and `anew` compiles a copy of the model.
        """
        compiled.__class__ = cls
        compiled.partitioner, compiled._compile = partitioner, anew
        model = compiled._orig_mod
        call = CompiledCall(model, partitioner, *_code_of(model, arguments))
        # If the model has lazy parameters, torch's `forward` initializes them, and then calls `_forward`.
        setattr(compiled, "_forward" if "_forward" in vars(compiled) else "forward", call)
        return compiled

    def __call__(self, *args, **kwargs):
        """Call the model; torch.compile traces only `forward`."""
        call = self.forward if torch.compiler.is_compiling() else super().__call__
        return call(*args, **kwargs)

    def __bool__(self) -> bool:
        # torch's class has a __len__, which fails for most models, and Dynamo in torch 2.11 asks for the truth value.
        return True

    def __reduce__(self):
        return self._compile, (self._orig_mod,)


class CompiledCall:
    """A function that calls a model through torch.compile, and that warns if a part of the model runs uncompressed.

    `partitioner` is None if the graphs are torch's own. `plain` calls the model in eager mode.
    """

    is_from_fewbit = True

    def __init__(
        self, model: nn.Module, partitioner: Partitioner | None, plain: Callable, compiled: Callable
    ):
        self._model = model
        self._compresses = partitioner is not None and partitioner.compresses
        self._others = [path for path, part in model.named_modules() if path and _is_of_torch(part)]
        self._call, self._compiled = plain, compiled
        self._checked = set()  # sets of the names of all autograd nodes of calls that were checked
        self._known = set()  # the numbers of autograd nodes that these calls have made
        self._counters = set()  # of the seeds that calls draw
        self._ranks = ()  # of the latest call outside of a backward pass, in which torch does not tell them
        self._told = set()  # reasons that a warning has named

    def __call__(self, *args, **kwargs):
        """Call the model, and look for uncompressed parts after a compilation."""
        if torch.compiler.is_compiling():
            notify_traced(self)
            return self._call(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args, **kwargs):
        outside = _outside()
        run = self._compiled if outside is None else self._call
        if not self._compresses:
            return run(*args, **kwargs)
        draws = outside is None and takes_part(self._model)
        if outside is None and not in_backward():
            self._ranks = process_groups(self._model).data_rank if is_distributed_run() else ()
        drawing = Drawing(self._counters, self._ranks) if draws else nullcontext()
        if not torch.is_grad_enabled():
            with drawing:
                return run(*args, **kwargs)
        frames, reasons, start = dict(counters["frames"]), _reasons(), next_sequence_number()
        _running.depth += 1
        try:
            with drawing:
                result = run(*args, **kwargs)
        finally:
            _running.depth -= 1
        made = next_sequence_number() - start
        if made in self._known and counters["frames"] == frames and _is_of_compiled(result):
            return result  # as most calls, for which the check that follows would take much of the time
        self._known.add(made)
        inputs = tensors_in((args, kwargs))
        nodes, _ = nodes_since(_ends(result), start, {*nodes_of(inputs)})
        names = frozenset(node.name() for node in nodes)
        if nodes and (names not in self._checked or counters["frames"] != frames):
            self._checked.add(names)
            saved = self._exact_tensors(nodes, inputs)
            if saved:
                self._warn(saved, outside or _explanation(frames, reasons))
            if self._others and sum(node.name() == _COMPILED for node in nodes) > 1:
                self._tell(
                    "parts",
                    f"its graph breaks, and torch.compile has compiled {self._others[0]}, which saves exact tensors if a break "
                    "is before it; let fewbit.compile alone compile the model",
                )
        return result

    def was_traced(self) -> None:
        """Warn that torch.compile traces the call into the graph of a function that fewbit does not compile."""
        if self._compresses and not _running.depth:
            self._tell(
                "calls",
                "torch.compile compiles a function that calls the model, so the model saves exact tensors for the backward "
                "pass; call the model outside of that function, or compile only the parts around the model",
            )

    def _exact_tensors(self, nodes, inputs) -> dict[int, tuple[str, int]]:
        """Return {storage: (name of the node, bytes)} of the large tensors that uncompiled code has saved."""
        owned = {_storage(x) for x in (*self._model.parameters(), *self._model.buffers(), *inputs)}
        return {
            _storage(x): (node.name(), x.nbytes)
            for node in nodes
            if node.name() != _COMPILED and not is_fewbit_node(node)
            for argument in saved_by(node)
            if argument.is_computed or not argument.needs_grad  # no copy or view of a parameter
            for x in tensors_in(
                argument.tensor if argument.tensor is not None else argument.raw.data
            )
            if x.numel() >= LEAST_ELEMENTS and _storage(x) not in owned
        }

    def _warn(self, saved: Mapping, explanation: tuple[str, str]) -> None:
        reason, advice = explanation
        names = sorted({name for name, _ in saved.values()})
        self._tell(
            reason,
            f"{amount(sum(size for _, size in saved.values()))} of exact tensors are saved for the backward pass, in "
            f"{', '.join(names)}, because {reason}; {advice}",
        )

    def _tell(self, reason: str, message: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(
                f"fewbit.compile: {type(self._model).__name__}: {message}",
                CompileWarning,
                stacklevel=4,
            )


class CompiledBlock(CompiledCall):
    """A `CompiledCall` that breaks the graph of a function around it, unless fewbit compiles that function too."""

    def __call__(self, *args, **kwargs):
        """Call the block."""
        if torch.compiler.is_compiling():
            # torch.compile would trace the block into a graph of its own partitioner.
            is_traced = torch.compiler.is_exporting() or not torch.compiler.is_dynamo_compiling()
            if is_traced or _is_within_fewbit():
                return self._call(*args, **kwargs)
            return _apart(self, *args, **kwargs)
        return self._run(*args, **kwargs)


@torch.compiler.disable(
    reason="fewbit.compile_blocks_ has compiled this block: leave out fullgraph=True"
)
def _apart(block: CompiledBlock, /, *args, **kwargs):
    return block._run(*args, **kwargs)


@constant
def _is_within_fewbit() -> bool:
    return _running.depth > 0


def _before_block(block: nn.Module, args: tuple) -> None:
    """Make torch.compile call a block, as a hook, which a copy of the block loses when it is called.

    torch.compile traces only `forward` of modules without hooks, and passes over the compiled code.
    """
    if not torch.compiler.is_compiling() and block._compiled_call_impl is None:
        _remove_hook(block)


def _remove_hook(block: nn.Module) -> None:
    for number, hook in [*block._forward_pre_hooks.items()]:
        if hook is _before_block:
            del block._forward_pre_hooks[number]


def is_hook_of_blocks(hook: Callable) -> bool:
    """Return whether a hook is the one that `compile_blocks` adds."""
    return hook is _before_block


def compile_in_place(model: nn.Module, partitioner: Partitioner | None, arguments: Mapping) -> None:
    """Let calls of a model run compiled code. The arguments are torch.compile's."""
    plain, compiled = _code_of(model, arguments, in_place=True)
    model._compiled_call_impl = CompiledCall(model, partitioner, plain, compiled)


def compile_blocks(
    blocks: Sequence[nn.Module], partitioner: Partitioner | None, arguments: Mapping
) -> None:
    """Let calls of several modules of one class run the same compiled code."""

    def call(block, /, *args, **kwargs):
        return block._call_impl(*args, **kwargs)

    compiled = _compiled(call, blocks[0], arguments)
    for block in blocks:
        own = partial(call, block), partial(compiled, block)
        block._compiled_call_impl = CompiledBlock(block, partitioner, *own)
        _remove_hook(block)
        block.register_forward_pre_hook(_before_block)


def undo(module: nn.Module) -> None:
    """Let calls of a module run uncompiled again."""
    _remove_hook(module)
    if hasattr(module._compiled_call_impl, "is_from_fewbit"):
        module._compiled_call_impl = None


def _code_of(
    model: nn.Module, arguments: Mapping, in_place: bool = False
) -> tuple[Callable, Callable]:
    def call(*args, **kwargs):
        return (model._call_impl if in_place else model)(*args, **kwargs)

    return call, _compiled(call, model, arguments)


def _compiled(call: Callable, model: nn.Module, arguments: Mapping) -> Callable:
    # torch.compile also looks up by name and line which sizes varied in earlier calls.
    name = f"call_{type(model).__name__}_{next(_numbers)}"
    call.__code__ = call.__code__.replace(co_name=name)
    return torch.compile(call, **_ISOLATED, **arguments)


def _is_of_torch(module: nn.Module) -> bool:
    if isinstance(module, OptimizedModule):
        return not isinstance(module, CompiledModel)
    call = module._compiled_call_impl  # of torch's method `Module.compile`
    return call is not None and not hasattr(call, "is_from_fewbit")


class _RunningCompiled(threading.local):
    depth = 0


_running = _RunningCompiled()


def _outside() -> tuple[str, str] | None:
    """Return why torch.compile would compile nothing now, and advice; or None."""
    if _modes_prevent_compilation():
        return (
            "torch.compile compiles nothing in a TorchDispatchMode, such as FlopCounterMode",
            "call the model outside of the mode",
        )
    if maybe_current_level() is not None:
        return (
            "torch.compile compiles no function that a transform of torch.func calls, such as vmap",
            "call torch.func within the model that you compile",
        )
    if torch._dynamo.config.disable:
        return "torch._dynamo.config.disable is set", "do not set it"
    return None


def _modes_prevent_compilation() -> bool:
    is_in_any = _python_dispatch.is_in_any_mode_without_ignore_compile_internals()  # of any thread
    if not (is_in_any or torch._C._len_torch_dispatch_stack()):
        return False  # for most calls, without reading torch's config, which takes longer
    if getattr(torch._dynamo.config, "inline_torch_dispatch_torch_compile", False):
        return _python_dispatch.any_torch_dispatch_mode_on_stack()  # the stack of this thread
    return is_in_any


def _reasons() -> dict[str, int]:
    """Return {torch.compile's reason to leave code to Python: how often}."""
    return {**counters["unimplemented"], **counters["graph_break"]}


def _explanation(frames: Mapping, reasons: Mapping) -> tuple[str, str]:
    new = sorted(text for text, count in _reasons().items() if count != reasons.get(text))
    limits = [text for text in new if "recompile limit" in text]
    if limits:
        limit = "accumulated_recompile_limit" if "accumulated" in limits[0] else "recompile_limit"
        return (
            f"torch.compile has reached torch._dynamo.config.{limit}",
            "let fewer things vary between calls (dynamic=True if these are sizes), or raise the limit",
        )
    if new:
        return (
            f"torch.compile cannot compile some code: {new[0].splitlines()[0]}",
            'change this code, which fullgraph=True shows, or call compress_ with layers={"everything": True} instead',
        )
    if torch._dynamo.config.suppress_errors and _failed(counters["frames"]) != _failed(frames):
        return (
            "torch.compile failed, and torch._dynamo.config.suppress_errors hides the error",
            "set suppress_errors to False to see the error",
        )
    return (
        "torch.compile was switched off, or gave up on a function in an earlier call",
        "look for torch.compiler.disable, torch.compiler.set_stance and torch._dynamo.config.disable",
    )


def _failed(frames: Mapping) -> int:
    return frames.get("total", 0) - frames.get("ok", 0)


def _is_of_compiled(result) -> bool:
    """Return whether compiled code has computed a result: a tensor with a gradient, or all such tensors in it."""
    ends = (result.grad_fn,) if type(result) is torch.Tensor else _ends(result)
    return all(node is not None and node.name() == _COMPILED for node in ends)


def _ends(result) -> list:
    tensors = tensors_in(result) or tensors_in(result, in_objects=True)  # which may take long
    return nodes_of(layer for x in tensors for layer in _layers(x))


def _layers(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor, and those that the wrappers of torch.func hide in it, the innermost last."""
    yield x
    while is_functorch_wrapped_tensor(x):
        yield (x := get_unwrapped(x))


def _storage(x: torch.Tensor) -> int:
    return [*_layers(x)][-1].untyped_storage()._cdata
