"""The checks that every layer and activation of fewbit makes before its own forward runs."""

from __future__ import annotations

from functools import wraps

from torch.fx import Proxy, Tracer


class Guarded:
    """A mixin that wraps the forward of its subclasses for two cases.

    torch.fx.symbolic_trace records the layer as a leaf module, as it records torch's layers. If the bound forward of a
    converted module was saved, for instance by a wrapper, it runs torch's forward after the model is restored.
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
        for each in (*args, *kwargs.values()):
            if isinstance(each, Proxy) and isinstance(each.tracer, Tracer):
                path = each.tracer.path_of_module(self)
                return each.tracer.create_proxy("call_module", path, args, kwargs)
        return forward(self, *args, **kwargs)

    # A name of its own makes a code object per layer: Dynamo compiles only a few versions of each code object.
    guarded.__code__ = guarded.__code__.replace(co_qualname=name)
    return guarded
