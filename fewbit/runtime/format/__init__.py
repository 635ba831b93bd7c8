"""Sizes and layouts: the order of a tensor's elements, groups of elements, and codes packed into words. No kernels are here.

This folder may import `runtime.interop` and the tables. Every backend and every op relies on these definitions.
"""
