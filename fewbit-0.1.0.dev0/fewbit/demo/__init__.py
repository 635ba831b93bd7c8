"""`fewbit demo`: train a small character-level transformer with exact and with few-bit activations.

The command compares the losses and the memory of several settings. This folder may import everything except
`fewbit.cli`.
"""
