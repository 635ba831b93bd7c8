"""Conversion of a model: which modules and functions are replaced, by what, and how to restore them.

To convert a module is to change its class in place, to a class that saves fewer bytes for the backward pass.

This folder may import `fewbit.nn`, `fewbit.functional` and `fewbit.runtime`. It chooses no bits and measures nothing.
"""
