"""Compression of what a model keeps for backward, and the meter that counts it."""
