"""Sizes and layouts: the order of a tensor's elements, groups of elements, and codes packed into int32 words.

The variance of rounding by the number of bits, and the division of bits among samples, are here too.

This folder contains no kernels. It may import `runtime.interop`, `fewbit.catalog` and `fewbit.table`. Every backend and
every op relies on these definitions.
"""
