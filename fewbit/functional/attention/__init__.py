"""Scaled dot-product attention.

`attention.py` has the function and what it saves. `blocks.py` computes its gradients if that is faster than running and
differentiating torch's own function again. This folder may import what `fewbit.functional` may import.
"""
