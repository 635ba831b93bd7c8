"""The state of one forward pass: bits and seeds of each tensor, copies that layers share, copies on the host.

This folder may import `runtime.probes` and what `runtime.probes` may import. It does not know which quantizer makes a copy, nor
which policy chooses its bits.
"""
