"""Which tables there are: shipped with the package, cached on disk or solved on demand.

This folder also recomputes tables' errors to verify them, compares tables, and holds the figures of the papers. It may
import the solver and what the solver may import. It does not import torch.
"""
