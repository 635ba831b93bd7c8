"""Quantizers, which save a tensor in a few bits per element and compute approximate values in the backward pass."""
