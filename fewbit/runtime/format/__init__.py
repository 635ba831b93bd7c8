"""Sizes and layouts: the order of elements, their packing into words, groups and bits. There are no kernels here.

This folder may import `runtime.interop` and the tables. Every backend and every op relies on these definitions.
"""
