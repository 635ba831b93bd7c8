"""`compress_`, `replace_activations_`, and the controller that `compress_` returns.

This folder joins `fewbit.convert`, `fewbit.policies` and `fewbit.analysis`, and may import all three.
"""
