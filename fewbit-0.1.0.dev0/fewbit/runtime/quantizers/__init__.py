"""Quantizers, which save a tensor in a few bits per element and compute approximate values in the backward pass.

`Quantizer` is the group quantizer, fewbit's default method: each group of elements has codes and two numbers. A
`SlotCodec` can replace the group quantizer for individual saved tensors. This folder may import the other folders of
`fewbit.runtime` except `codecs` and `activations`. To add a quantizer, add a file to this folder.
"""
