"""The second run of a checkpointed region: it decides as the first run did, and leaves the state of modules alone.

This folder may import `runtime.quantizers` and what `runtime.quantizers` may import.
"""
