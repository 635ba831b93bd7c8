"""The compiler mode: `fewbit.compile` quantizes what a graph that torch.compile has traced saves for the backward pass.

AOTAutograd traces the forward and the backward pass into one *joint graph*, and a *partitioner* cuts it into two
graphs. fewbit's partitioner first lets the backward pass use dequantized copies, which torch's own partitioner then
saves, because they are smaller (docs/guides/compile.md).
"""
