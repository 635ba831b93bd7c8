"""Quantizers: a tensor becomes a few bits per element in the forward pass, and approximate values in the backward pass.

`Quantizer` is the group quantizer of a layer. A `SlotCodec` takes its place for single slots. This folder may import the
other folders of `fewbit.runtime` except `codecs` and `activations`. A new quantizer is a new file here.
"""
