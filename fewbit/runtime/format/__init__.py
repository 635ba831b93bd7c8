"""Sizes and layouts: the order of a tensor's elements, groups of elements, and codes packed into int32 words.

This folder contains no kernels. It may import `runtime.interop` and `fewbit.table`. Every backend and every op relies
on these definitions.
"""
