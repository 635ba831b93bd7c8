"""The objectives "unbiased" and "shared", for which levels are drawn at random such that their mean is right.

`unbiased` makes the *stand-in*, a piecewise linear function that replaces f', and finds the levels of which one is
drawn for each value of the stand-in. `shared` finds levels that depend on a random number that encoder and decoder
share. This folder may import what `fewbit.solver` may import.
"""
