"""Measure the variance that rounding each saved tensor adds to the gradient, in one forward and backward pass.

This folder may import `runtime.ops` and what `runtime.ops` may import.
"""
