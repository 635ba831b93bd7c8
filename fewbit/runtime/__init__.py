"""Tensors saved between the forward and the backward pass. Nothing here knows a layer class or a policy.

docs/architecture.md lists the folders in the order in which they may import each other.
"""
