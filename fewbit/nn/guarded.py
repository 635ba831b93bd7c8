"""What every layer and activation of fewbit asks before its own forward runs."""

from __future__ import annotations

from functools import wraps

from torch.fx import Proxy, Tracer


class Guarded:
    """A mixin: forwards of its subclasses are not run on what is no tensor, nor for what is none of fewbit's modules.

    torch.fx.symbolic_trace takes the layers for leaves, as it does torch's own. A forward that somebody has taken from a
    converted module, to call it in one on the instance, is torch's once the model is restored.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            cls.forward = _guarded(cls.forward, f"{cls.__qualname__}.forward")


def _guarded(forward, name):
    @wraps(forward)
    def guarded(self, *args, **kwargs):
        if not isinstance(self, Guarded):
            return type(self).forward(self, *args, **kwargs)
        if args and isinstance(args[0], Proxy) and isinstance(args[0].tracer, Tracer):
            tracer = args[0].tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    # Dynamo keeps what it compiles by code object, and not more than a few versions of each.
    guarded.__code__ = guarded.__code__.replace(co_qualname=name)
    return guarded
