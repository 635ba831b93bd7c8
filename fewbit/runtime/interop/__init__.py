"""Torch interfaces that are private, undocumented or missing. Each is wrapped in one file, with the reason and a test.

If a new version of torch needs changes in fewbit, the changes should be in this folder alone. The folder may import
`fewbit.errors`. The code here knows nothing of tables, quantizers or layers.
"""
