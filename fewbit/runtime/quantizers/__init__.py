"""Quantizers, which save a tensor in a few bits per element and compute approximate values in the backward pass.

This folder may import the other folders of `fewbit.runtime` except `codecs` and `activations`.
"""
