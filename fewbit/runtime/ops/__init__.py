"""The torch ops of the namespace `fewbit`: the schema, implementation, fake, autograd and vmap rule of each op.

In a compiled graph a tensor's strides can differ from those at tracing time, so every op that packs or unpacks in
storage order takes the strides as an argument, and the strides of a result never depend on those of an input. This
folder may import `runtime.backends` and what `runtime.backends` may import; it saves no tensors for a backward pass.
"""
