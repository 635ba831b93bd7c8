"""The tables that exist: shipped with the package, cached on disk or solved on demand.

This folder also verifies tables by recomputing their errors, and compares them with the errors that the paper
"Few-bit Backward" prints. It may import the solver and what the solver may import. It does not import torch.
"""
