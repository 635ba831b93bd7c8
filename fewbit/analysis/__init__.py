"""Measurements of a model: saved bytes, gradients and their variance, memory of a training step.

The code here never calls `compress_`.
"""
