"""The checkpointed regions of one model: to which forward pass each belongs, and the copies made in the latest region.

A *region* is the part of a forward pass that `torch.utils.checkpoint` runs again, or recomputes, in the backward pass.
"""

from __future__ import annotations

import threading
import weakref

from fewbit.runtime.interop.checkpoint import (
    checkpoint_hook,
    in_backward,
    in_checkpoint,
    reentrant_region,
    region_of,
)


class CheckpointRegions:
    """Remembers regions from their first run to their recomputation in the backward pass.

    A recomputed region has to use the bits and seeds of its first run, so that both runs save the same copies.
    """

    def __init__(self):
        self._forwards = weakref.WeakKeyDictionary()  # {region: forward}
        self._whole = weakref.WeakSet()  # regions around whole forwards
        self._local = _Local()

    def remember(self, region, forward):
        """Record to which forward pass a region belongs, unless that is recorded already. Return the recorded forward pass."""
        return self._forwards.setdefault(region, forward)

    def recorded_forward(self):
        """Return the forward pass that was recorded for the region that runs in this thread, or None."""
        frame = region_of(checkpoint_hook())
        found = None if frame is None else self._forwards.get(frame)
        if found is None and in_backward():
            region = reentrant_region()
            found = None if region is None else self._forwards.get(region)
        return found

    def is_over(self) -> bool:
        """Return whether the copies of the running region can be dropped when the outermost call of a module ends.

        The copies can be dropped outside of a region, and in a region that contains a whole forward pass. The answer in
        the recomputation is that of the first run, because a call that was within another call in the first run may be
        outermost when recomputed.
        """
        if not in_checkpoint():
            return True
        frame = region_of(checkpoint_hook())
        if frame is not None and not in_backward():
            self._whole.add(frame)
        return frame in self._whole

    def entries(self, outer: dict | None) -> dict | None:
        """Return the cache entries of the region that runs in this thread, or `outer` if none runs.

        `outer` are the entries of the whole forward pass. The recomputation has no copies from the part of the forward
        pass outside of the region, so the first run may not use such copies either. The entries of a region are dropped
        when this function is next called in another region, or outside of all regions. This happens at the same place in
        the first run and in the recomputation.
        """
        hook, regions = checkpoint_hook(), self._local.regions
        if hook is None or hook not in regions:
            # Only the latest region has entries: hooks live as long as the graph, which must not hold copies.
            regions.clear()
        return outer if hook is None else regions.setdefault(hook, {})

    def clear(self) -> None:
        """Drop the entries of the latest region."""
        self._local.regions.clear()


class _Local(threading.local):
    """The cache entries of the latest region in a thread, by the region's hook."""

    def __init__(self):
        self.regions = weakref.WeakKeyDictionary()
