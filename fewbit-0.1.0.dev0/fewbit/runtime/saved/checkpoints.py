"""The checkpointed regions of one model: to which forward pass each belongs, and the copies made in the latest region.

A *region* is the part of a forward pass that `torch.utils.checkpoint` recomputes, that is, runs again in the backward
pass. A *copy* is the quantized form of a saved tensor. Copies are entries of a cache, so that layers can share them.
"""

from __future__ import annotations

import threading
import weakref

import torch

from fewbit.runtime.interop.checkpoint import (
    checkpoint_hook,
    in_backward,
    in_checkpoint,
    reentrant_region,
    region_of,
)


class CheckpointRegions:
    """Remembers regions from their first run to their recomputation in the backward pass.

    A recomputed region has to use the bits and seeds of its first run, so that both runs save the same copies. If the region
    is differentiated twice, it runs a third time, and has to save the same copies again.
    """

    def __init__(self):
        self._seeds = weakref.WeakKeyDictionary()  # {region: (its number, its latest run, seeds)}
        self._forwards = weakref.WeakKeyDictionary()  # {region: forward}
        self._whole = weakref.WeakSet()  # regions around whole forwards
        self._local = _Local()

    def remember(self, region, forward):
        """Record that a region belongs to a forward pass. An earlier record stays. Return the recorded forward pass."""
        return self._forwards.setdefault(region, forward)

    def recorded_forward(self):
        """Return the forward pass that was recorded for the region that runs in this thread, or None."""
        frame = region_of(checkpoint_hook())
        found = None if frame is None else self._forwards.get(frame)
        if found is None and in_backward():
            region = reentrant_region()
            found = None if region is None else self._forwards.get(region)
            if found is not None:
                run = torch._C._current_graph_task_id()
                found = found._replace(seeds=self.seeds(region, run, found.seeds))
        return found

    def seeds(self, region, run, seeds):
        """Return the seeds of a run of a region. They are the same in every run of the region.

        Args:
            region: the region.
            run: an object that stands for the run.
            seeds: the seeds of the forward pass of which the region is a part.
        """
        number, latest, found = self._seeds.get(region, (None, None, None))
        if found is None or latest != run:
            number = seeds.number("region") if number is None else number
            found = seeds.restarted("region", number)
            self._seeds[region] = number, run, found
        return found

    def is_over(self) -> bool:
        """Return whether cached copies of regions can be dropped when the outermost call of a module ends.

        They can be dropped if no region runs, or if the running region contains the whole forward pass that ends. In
        a recomputation, the answer is that of the region's first run. The recomputation alone cannot tell: if a region
        contains only a part of a forward pass, the outermost call in the recomputation was inside another call in the
        first run.
        """
        if not in_checkpoint():
            return True
        frame = region_of(checkpoint_hook())
        if frame is not None and not in_backward():
            self._whole.add(frame)
        return frame in self._whole

    def entries(self, outer: dict | None) -> dict | None:
        """Return the cache entries of the region that runs in this thread, or `outer` if no region runs.

        A region has its own entries, because a recomputation finds no copies that were made outside of the region. The
        first run must find the same copies as the recomputation. A region's entries are dropped as soon as this method
        is called in another region or outside of all regions.

        Args:
            outer: the entries of the whole forward pass, or None.
        """
        hook, local = checkpoint_hook(), self._local
        if local.has_regions and hook not in local.regions:
            # Only the latest region keeps entries. Hooks live as long as the graph, and the graph must not hold copies.
            self.clear()
        if hook is None:
            return outer
        local.has_regions = True
        return local.regions.setdefault(hook, {})

    def clear(self) -> None:
        """Drop the entries of the latest region."""
        self._local.regions.clear()
        self._local.has_regions = False


class _Local(threading.local):
    """The cache entries of the latest region in a thread, by the region's hook."""

    def __init__(self):
        self.regions = weakref.WeakKeyDictionary()
        self.has_regions = False  # whether regions may have entries, known without a call of len
