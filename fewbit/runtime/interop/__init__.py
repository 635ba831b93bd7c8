"""Torch interfaces that are private, undocumented or missing, each wrapped in one file with the reason and a test.

A new version of torch should need changes in this folder alone. It may import `fewbit.errors`. It knows nothing of
tables, quantizers or layers.
"""
