"""Measure the variance that rounding each saved tensor adds to the gradient, in one forward and backward pass.

A *probe* measures for a policy, the object that chooses bits. The policy puts the probe into the bit assignment of a
forward pass. This folder may import `runtime.ops` and what `runtime.ops` may import. The code here knows no policy.
"""
