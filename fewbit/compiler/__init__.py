"""The compiler mode: `fewbit.compile` quantizes what a graph that torch.compile has traced saves for the backward pass.

AOTAutograd traces both passes into one *joint graph*, which a *partitioner* cuts into two. fewbit's first lets the
backward pass use dequantized copies (docs/guides/compile.md).
"""
