"""Quantizers turn a tensor into a few bits per element in the forward pass, and into approximate values in the backward pass.

`Quantizer` is the group quantizer of a layer. A `SlotCodec` replaces the group quantizer for single saved tensors. This
folder may import the other folders of `fewbit.runtime` except `codecs` and `activations`. A new quantizer is a new file
here.
"""
