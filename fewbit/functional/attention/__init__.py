"""Scaled dot-product attention (`attention.py`), and its gradients, faster than by a second run of torch's function (`blocks.py`)."""
