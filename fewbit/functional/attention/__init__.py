"""Scaled dot-product attention, and a computation of its gradients that is faster than a second run of torch's function."""
