"""Compression of the tensors that torch's own operations have saved, such as products and recurrent layers."""
