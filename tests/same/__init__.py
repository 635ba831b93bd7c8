"""Comparison of the results of two versions of fewbit: see `__main__.py`."""
