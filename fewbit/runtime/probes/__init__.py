"""Measure, in one forward and backward pass, how much variance rounding each saved tensor adds to the gradient.

A *probe* does this for a policy, the object that chooses bits. The policy puts the probe into the bit assignment of a
forward pass. This folder may import `runtime.ops` and what `runtime.ops` may import. It knows no policy.
"""
