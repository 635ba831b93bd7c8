"""The second run of a checkpointed region: it decides as the first run did, and leaves the state of modules alone.

`fewbit.checkpoint` runs a region a second time from rounded inputs. `Run` records the first run, and `Rerun` uses the
record. This folder may import `runtime.quantizers` and what `runtime.quantizers` may import.
"""
