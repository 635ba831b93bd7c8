"""Scaled dot-product attention.

`attention.py` has the function and what it saves. `blocks.py` computes the gradients of attention if that is faster than running
torch's own function again and differentiating it. This folder may import what `fewbit.functional` may import.
"""
