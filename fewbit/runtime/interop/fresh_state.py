"""Call a function apart from the state of torch that surrounds the caller."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def in_fresh_state(function, *args, device: torch.device):
    """Return function(*args), called where no mode, transform, hook on saved tensors or autocast of the caller is active.

    torch keeps all of these for each thread, so a new thread has none.

    Args:
        function: the function.
        *args: its arguments.
        device: the device on which the function computes. On a GPU it computes in the caller's stream.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def call():
        with torch.cuda.stream(stream):
            return function(*args)

    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result()
    finally:
        pool.shutdown(wait=False)  # after Ctrl-C the caller does not wait
