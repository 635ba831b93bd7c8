"""The base classes of fewbit's modules."""

from __future__ import annotations

import inspect
from functools import wraps

import torch
from torch import nn
from torch.fx import Proxy, Tracer

from fewbit.config import DEFAULT_BITS, GROUP_SIZE
from fewbit.errors import InputError
from fewbit.runtime.interop.bypass import bypass, run_outside
from fewbit.runtime.quantizers.quantizer import Quantizer


class Guarded:
    """A mixin that wraps the forward of its subclasses.

    torch.fx.symbolic_trace records a call as one node. A `module.forward` that was stored before `fewbit.restore_` runs
    torch's forward afterwards. fewbit's own code runs outside of a converted model's function mode (`run_outside`).

    Attributes:
        calls_others: whether the forward calls other modules or a user's function, and so stays in the function mode.
    """

    calls_others = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not issubclass(cls, nn.Module):
            return  # a mixin
        cls.__signature__ = _signature_of(cls)
        if "forward" in vars(cls) or not hasattr(cls.forward, "is_guarded"):
            cls.forward = _guarded(cls.forward, f"{cls.__qualname__}.forward")

    def __prepare_scriptable__(self):
        raise InputError(
            f"torch.jit.script: expected torch's layers, got fewbit's {type(self).__name__}; call fewbit.restore_ first "
            "if compress_ has made it, else use torch's class"
        )


class Quantized(Guarded):
    """A mixin that makes `quantizer` from the arguments `bits` (4 by default), `group_size` and `quantizer` ("rotated", "uniform" or None)."""

    quantizer: Quantizer

    def __init__(
        self,
        *args,
        bits: int = DEFAULT_BITS,
        group_size: int = GROUP_SIZE,
        quantizer: str | None = None,
        **kwargs,
    ):
        made = Quantizer(bits, group_size, kind=quantizer)
        super().__init__(*args, **kwargs)
        self.quantizer = made

    def _exact(self, *args, **kwargs):
        """Run the forward of torch's class, and compress no function that it calls."""
        with bypass():
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [super().extra_repr(), repr(self.quantizer)]))


def _guarded(forward, name):
    is_own = forward.__module__.startswith("fewbit.")

    @wraps(forward)
    def guarded(self, *args, **kwargs):
        # Every layer runs this code, so it calls few functions.
        if Guarded not in type(self).__mro__:
            return type(self).forward(self, *args, **kwargs)
        if kwargs or not args or args[1:] or type(args[0]) is not torch.Tensor:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Proxy) and isinstance(value.tracer, Tracer):
                    path = value.tracer.path_of_module(self)
                    return value.tracer.create_proxy("call_module", path, args, kwargs)
        # With parametrizations, an access to a weight calls modules.
        calls_others = self.calls_others or not is_own or "parametrizations" in self._modules
        if calls_others:
            return forward(self, *args, **kwargs)
        return run_outside(forward, self, *args, **kwargs)

    guarded.is_guarded = True
    # The name gives each layer a code object of its own, because Dynamo compiles each code object only a few times.
    guarded.__code__ = guarded.__code__.replace(co_qualname=name)
    return guarded


def _signature_of(cls) -> inspect.Signature:
    """Return the signature of torch's class, or of an `__init__` without `**kwargs`, plus the options of mixins."""
    inits = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    parameters = {}
    for init in inits:
        own = dict(list(inspect.signature(init).parameters.items())[1:])
        is_open = init.__module__.startswith("fewbit.") and "kwargs" in own
        if is_open or init is nn.Module.__init__:
            own = {name: value for name, value in own.items() if name not in ("args", "kwargs")}
        parameters = own | parameters
        if not is_open:
            break
    return inspect.Signature(sorted(parameters.values(), key=lambda parameter: parameter.kind))
