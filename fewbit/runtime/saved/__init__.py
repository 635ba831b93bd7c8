"""The state of one forward pass: the bits and seeds of saved tensors, shared quantized copies, and tensors moved to the host.

This folder may import `runtime.probes` and what `runtime.probes` may import. It does not know which quantizer makes a
copy, nor which policy chooses the bits of a copy.
"""
