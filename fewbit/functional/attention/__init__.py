"""Scaled dot-product attention: the function (`attention.py`), and gradients that are faster than a second run of torch's function (`blocks.py`).

This folder may import what `fewbit.functional` may import.
"""
