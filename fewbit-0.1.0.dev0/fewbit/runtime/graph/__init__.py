"""Compression of the tensors that torch's own operations have saved, after they have saved them.

fewbit's layers decide what they save. Operations of torch that no layer replaces, such as a product of two tensors or a
recurrent layer, save exact tensors in the nodes of the autograd graph. After each block of a model, the code here walks
the new part of the graph and replaces such tensors by copies of a few bits, if the node's backward pass allows it.

`rules` says which arguments of which nodes are compressed and how, and `compressor` walks the graph. This folder may
import `runtime.quantizers` and what `runtime.quantizers` may import.
"""
