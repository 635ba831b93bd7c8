"""Compression of the tensors that torch's own operations have saved, such as products and recurrent layers.

After each block of a model, `compressor` walks the new part of the autograd graph and replaces saved tensors by copies
of a few bits, if the `rules` allow it. This folder may import `runtime.quantizers` and what `runtime.quantizers` may
import.
"""
