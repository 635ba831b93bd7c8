"""The torch ops of the namespace `fewbit`: the schema, implementation, fake, autograd and vmap rule of each op.

A fake is the function that computes the shapes and dtypes of an op's results without data. `torch.compile`,
`torch.export` and `torch.func` go through the ops. Eager mode calls the same implementations directly.

In a compiled graph a tensor's strides can differ from those at tracing time. Every op that packs or unpacks in storage
order therefore takes the strides as an argument and brings its input to these strides. The strides of a result never
depend on the strides of an input. This folder may import `runtime.backends` and what `runtime.backends` may import. The
code here saves no tensors for a backward pass.
"""
