"""The torch ops of the namespace `fewbit`: the schema, implementation, fake, autograd and vmap rule of each op.

`torch.compile`, `torch.export` and `torch.func` go through the ops; eager mode calls the same implementations directly.
In a compiled graph a tensor's strides can differ from those at tracing time. Every op that packs or unpacks in storage
order therefore takes the strides as an argument and brings its input to these strides. The strides of a result never
depend on the strides of an input. This folder may import `runtime.backends` and what `runtime.backends` may import. It
saves nothing.
"""
