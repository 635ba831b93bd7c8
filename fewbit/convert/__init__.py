"""Conversion of a model in place: which modules and functions are replaced, by what, and how to restore them.

The code here chooses no bits and measures nothing.
"""
