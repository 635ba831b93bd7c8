"""Few-bit activation functions, which save a code of a few bits for each input element in place of the element.

This folder chooses the table, defines the autograd Functions, and makes tables for a user's callables. It may import
every other folder of `fewbit.runtime`; modules are in `fewbit.nn`.
"""
