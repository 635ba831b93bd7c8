"""How elements are counted, packed into words, grouped and given bits: sizes and layouts, no kernels.

This folder may import `runtime.interop` and the tables. Every backend and every op relies on these definitions.
"""
