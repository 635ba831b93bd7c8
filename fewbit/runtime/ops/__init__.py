"""The torch ops of the namespace `fewbit`: schema, implementation, fake, autograd and vmap of each.

`torch.compile`, `torch.export` and `torch.func` go through them; eager mode calls the same implementations. Every op
that packs or unpacks in storage order takes the strides as an argument and restrides its input to them, because in a
compiled graph a tensor's strides can differ from those at tracing time. The strides of a result never depend on the
strides of an input. This folder may import `runtime.backends` and what that may import. It saves nothing.
"""
