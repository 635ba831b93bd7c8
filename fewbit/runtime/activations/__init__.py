"""Few-bit activation functions: which table applies, the autograd Function, and tables of a user's callables.

This folder may import every other folder of `fewbit.runtime`. It defines no modules; `fewbit.nn` does.
"""
