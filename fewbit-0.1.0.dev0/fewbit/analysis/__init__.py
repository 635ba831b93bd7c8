"""Measurements of a model: saved bytes, gradients and their variance, memory of a training step.

This folder may import `fewbit.convert` and what `fewbit.convert` may import. The code here never calls `compress_`.
"""
