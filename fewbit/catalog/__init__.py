"""The search for tables, which are shipped with the package, cached on disk or solved on demand.

This folder also verifies tables by recomputing their errors, and compares these with the errors that the paper "Few-bit Backward" prints. It
may import the solver and what the solver may import, and not torch.
"""
