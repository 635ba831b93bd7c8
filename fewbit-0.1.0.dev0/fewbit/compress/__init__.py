"""`compress_`, `replace_activations_`, and the controller that `compress_` returns.

This folder puts the parts together. It converts a model (`fewbit.convert`) and gives the model a policy, which is an
object that chooses bits (`fewbit.policies`). It offers measurements of the model (`fewbit.analysis`). This folder may
import all three of these folders.
"""
