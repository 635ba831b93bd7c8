"""The tables that exist: shipped with the package, cached on disk or solved on demand.

This folder also verifies tables by recomputing their errors, compares tables, and has the figures of the paper. It may
import the solver and what the solver may import. It does not import torch.
"""
