"""Few-bit activation functions, for whose backward pass a code of a few bits is saved in place of each input element.

A table gives the value of the derivative for each code. The files choose the table, define the autograd Functions, and
make tables of a user's callables. This folder may import every other folder of `fewbit.runtime`. It defines no modules;
`fewbit.nn` does.
"""
