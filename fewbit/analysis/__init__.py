"""Measurements of a model: saved bytes, gradients and their variance, memory of a training step.

This folder may import `fewbit.convert` and `fewbit.policies`. It never calls `compress_`.
"""
