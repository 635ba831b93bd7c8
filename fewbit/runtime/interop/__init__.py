"""Torch interfaces that are private, undocumented or missing. Each is wrapped in one file, with the reason and a test.

If a new version of torch needs changes, they should be in this folder alone. It may import `fewbit.errors`. It knows
nothing of tables, quantizers or layers.
"""
