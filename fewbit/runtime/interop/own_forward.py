"""A forward that a module has as an attribute, in place of that of its class.

`torch.nn.DataParallel` copies the attributes of a module to its replicas, so a replica would run the forward of the
original, with the original's weights. It makes replicas by the private method `_replicate_for_data_parallel`, so an
attribute of this name binds the forward of a replica to the replica.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from fewbit.errors import InputError

_REPLICATE = "_replicate_for_data_parallel"
ATTRIBUTES = "forward", _REPLICATE


class OwnForward:
    """The base class of forwards that are attributes of `module`. `earlier` is the module's attribute before, or None."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.earlier: Callable | None = vars(module).get("forward")

    @property
    def original(self) -> Callable:
        """The forward that the module would have without this one. The class may have changed, by compress_ for example."""
        return self.earlier or partial(type(self.module).forward, self.module)

    def put(self) -> None:
        """Make this the module's forward, in place of one of the same class, if there is one."""
        if isinstance(self.earlier, type(self)):
            self.earlier = self.earlier.earlier
        self.module.forward = self
        setattr(self.module, _REPLICATE, self._replicate)

    def remove(self) -> None:
        del self.module.forward
        if self.earlier is not None:
            self.module.forward = self.earlier
        if not isinstance(self.earlier, OwnForward):
            vars(self.module).pop(_REPLICATE, None)

    def _replicate(self) -> nn.Module:
        replica = getattr(type(self.module), _REPLICATE)(self.module)
        vars(replica)["forward"] = self._bound_to(replica)
        return replica

    def _bound_to(self, module: nn.Module) -> OwnForward:
        earlier = self.earlier
        if isinstance(earlier, OwnForward):
            earlier = earlier._bound_to(module)
        elif earlier is not None:
            raise InputError(
                f"expected a model whose modules have no forward of another library in torch.nn.DataParallel, got one in "
                f"{type(module).__name__}; use DistributedDataParallel"
            )
        bound = object.__new__(type(self))
        vars(bound).update(vars(self), module=module, earlier=earlier)
        return bound
