"""`compress_`, `replace_activations_`, and the controller that `compress_` returns.

This folder puts the parts together: it converts a model (`fewbit.convert`), gives it a policy, the object that chooses
bits (`fewbit.policies`), and offers measurements (`fewbit.analysis`). It may import all of these.
"""
