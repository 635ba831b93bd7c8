"""The state of a forward pass: bits and seeds of saved tensors, shared quantized copies, tensors moved to the host.

It does not depend on quantizers or policies, and imports `runtime.probes` and what that may import.
"""
