"""The search for tables, which are shipped with the package, cached on disk or solved on demand.

A table describes a step function q that replaces the derivative f' of an activation function. This folder also verifies
tables by recomputing their errors, and compares these errors with those that the paper "Few-bit Backward" prints. It
may import the solver and what the solver may import. It does not import torch.
"""
