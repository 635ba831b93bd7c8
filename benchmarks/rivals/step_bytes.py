"""The bytes that a training step allocates, as torch's profiler counts them."""

from __future__ import annotations

import gc

import torch

MARK = "alternatives: the forward pass is over"


def step_bytes(module, run, batch) -> tuple[int, int]:
    """Return the bytes that a forward pass saves, and the most bytes that a forward and a backward pass need.

    Both count allocations of torch since the beginning of the step, so they do not contain parameters, the batch and the
    optimizer's state, but they contain what hooks and compilers save. The gradients are part of the peak.
    """
    module.zero_grad(set_to_none=True)
    gc.collect()
    if next(module.parameters()).is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = run(*batch)
        saved = torch.cuda.memory_allocated() - before
        loss.backward()
        return saved, torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        loss = run(*batch)
        gc.collect()
        with torch.profiler.record_function(MARK):
            pass
        loss.backward()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now = most = saved = 0
    for event in events:
        if event.name() == MARK:
            saved = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return saved, most
