"""Compression of the tensors that torch's own operations have saved, such as products and recurrent layers.

This folder may import `runtime.quantizers` and what `runtime.quantizers` may import.
"""
