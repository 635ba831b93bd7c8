"""The solver: from a request, a function and a number of levels, to a table with a certified lower bound on its error.

`solve.py` calls the stages in order. This folder may import `fewbit.functions`, `fewbit.table` and `fewbit.schema`. It does
not import torch, and does not search for existing tables, which `fewbit.catalog` does.
"""
