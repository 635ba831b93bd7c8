"""Sizes and layouts: the order of a tensor's elements, groups of elements, codes in int32 words, and the variance of rounding.

This folder may import `runtime.interop`, `fewbit.catalog` and `fewbit.table`.
"""
