"""The compiler mode: `fewbit.compile` quantizes what a graph that torch.compile has traced saves for the backward pass.

AOTAutograd traces the forward and the backward pass into one *joint graph*. A *partitioner* cuts the joint graph into a
forward graph and a backward graph, and so decides what is saved. fewbit's partitioner changes the joint graph first: it
replaces the tensors that the backward pass uses by dequantized copies. Then torch's own partitioner saves the copies,
because they are smaller. docs/guides/compile.md describes the method.

`graphs` has helpers for traced graphs, `sizes` serves sizes that vary, `uses` says which ops may get dequantized values,
`normal_form` and `multiples` simplify the graph, `joint_graph` finds the tensors to quantize, `rewrite` changes the graph,
`partitioner` connects them with torch, `report` shows what is saved, and `compiling` has the public functions.
"""
