"""Measurements of a model: saved bytes, gradients and their variance, memory of a training step.

This folder may import `fewbit.convert` and what that may import. It never calls `compress_`.
"""
