"""Measurement of one forward and backward pass: what rounding each saved tensor adds to the variance of the gradient.

A policy puts a probe into the bit assignment of a forward pass. This folder may import `runtime.ops` and what `runtime.ops`
may import. It knows no policy.
"""
