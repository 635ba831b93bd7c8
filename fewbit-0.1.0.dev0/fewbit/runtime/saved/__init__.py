"""The state of a forward pass: bits and seeds of saved tensors, shared quantized copies, tensors moved to the host.

This folder may import `runtime.probes` and what `runtime.probes` may import. The code here does not depend on the
quantizer that makes a copy, nor on the policy that chooses the bits of a copy.
"""
