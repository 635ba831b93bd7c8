"""The state of a forward pass: bits and seeds of saved tensors, shared quantized copies, tensors moved to the host."""
