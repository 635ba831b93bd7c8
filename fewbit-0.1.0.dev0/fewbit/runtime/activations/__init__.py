"""Few-bit activation functions, which save a code of a few bits for each input element in place of the element.

A table gives the value of the derivative for each code. The files of this folder choose the table, define the autograd
Functions, and make tables for a user's callables. This folder may import every other folder of `fewbit.runtime`. It
defines no modules; those are in `fewbit.nn`.
"""
