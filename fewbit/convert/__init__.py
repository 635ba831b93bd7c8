"""Conversion of a model in place: which modules and functions are replaced, by what, and how to restore them.

This folder may import `fewbit.nn`, `fewbit.functional` and `fewbit.runtime`. It chooses no bits and measures nothing.
"""
