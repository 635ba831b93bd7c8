"""The solver: from a request, a function and a number of levels, to a table with a certified lower bound on its error.

`solve.py` calls the stages in order. This folder may import `fewbit.functions`, `fewbit.table` and `fewbit.schema`. It does
not import torch, and it does not search for tables that exist already; `fewbit.catalog` does.
"""
