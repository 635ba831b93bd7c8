"""The storages that a training step on fake tensors allocates and frees, as the same step with real tensors would.

It does not include what kernels allocate inside an operation, and what an allocator adds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fewbit.planning.timeline import TRANSIENT, Event, Mark, Timeline


@dataclass(eq=False, slots=True)
class Storage:
    """A storage that exists, or existed.

    Attributes:
        role: what the storage is for, such as "weights".
    """

    size: int
    role: str


class StorageTracker(FakeTensorMode):
    """A mode for fake tensors that records each allocation and each release of a storage.

    It is a FakeTensorMode, because fewbit's layers treat fake tensors like ordinary ones only if no other mode is active.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self._depth = 0
        self._living: dict[int, tuple[weakref.ref, Storage]] = {}
        self._events: list[Event] = []
        self._before: list[Storage] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # The shapes of a result may come from operations of smaller steps, which a real kernel does not run.
        self._depth += 1
        try:
            result = super().__torch_dispatch__(function, types, args, kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            self.add(tree_leaves(result), TRANSIENT)
        return result

    def add(self, values: Iterable, role: str) -> None:
        """Record the storages of tensors, unless they are recorded already."""
        for value in values:
            storage = _storage_of(value)
            if storage is None:
                continue
            key, size = storage._cdata, storage.nbytes()
            known = self._living.get(key)
            if known is None:
                reference = weakref.ref(storage, partial(self._free, key))
            elif known[1].size != size:  # resized in place
                reference, role = known[0], known[1].role
                self._events.append(Event(known[1], -known[1].size))
            else:
                continue
            found = Storage(size, role)
            self._living[key] = reference, found
            self._events.append(Event(found, size))

    def _free(self, key: int, _) -> None:
        _, storage = self._living.pop(key)
        self._events.append(Event(storage, -storage.size))

    def claim(self, values: Iterable, role: str) -> None:
        """Record the storages of tensors, and give them a role."""
        self.add(values, role)
        for value in values:
            storage = _storage_of(value)
            if storage is not None:
                self._living[storage._cdata][1].role = role

    def claim_transient(self, role: str) -> None:
        """Give a role to all existing transient storages."""
        for _, storage in self._living.values():
            if storage.role == TRANSIENT:
                storage.role = role

    def total(self, role: str | None = None) -> int:
        """Return the bytes of the existing storages, with this role if given."""
        storages = (storage for _, storage in self._living.values())
        return sum(storage.size for storage in storages if role in (None, storage.role))

    def start(self) -> None:
        """Forget the past."""
        self._events.clear()
        self._before = [storage for _, storage in self._living.values()]

    def keys_of(self, values: Iterable) -> list[Storage]:
        """Return the recorded storages of tensors."""
        storages = [storage for storage in map(_storage_of, values) if storage is not None]
        known = [self._living.get(storage._cdata) for storage in storages]
        return [entry[1] for entry in known if entry is not None]

    @property
    def moment(self) -> int:
        """The number of allocations and releases since `start`."""
        return len(self._events)

    def timeline(self, marks: Iterable[tuple[int, Mark]] = ()) -> Timeline:
        """Return what has happened since `start`, with marks (moment, mark), by ascending moment."""
        existing: dict[str, int] = {}
        for storage in self._before:
            existing[storage.role] = existing.get(storage.role, 0) + storage.size
        happened: list[Event | Mark] = []
        position = 0
        for moment, mark in marks:
            happened += self._events[position:moment]
            happened.append(mark)
            position = moment
        return Timeline(existing, happened + self._events[position:])


def _storage_of(value) -> torch.UntypedStorage | None:
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
