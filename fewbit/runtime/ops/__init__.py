"""The torch ops of the namespace `fewbit`: the schema, implementation, fake, autograd and vmap rule of each op.

In a compiled graph a tensor's strides can differ from those at tracing time, so ops take the strides as an argument.
"""
