"""`compress_`, `replace_activations_` and the controller that they return.

This folder puts the parts together: it converts a model (`fewbit.convert`), gives it a policy (`fewbit.policies`) and offers
measurements (`fewbit.analysis`). It may import all of these.
"""
