"""The objectives whose levels are drawn at random with the right mean: "unbiased" and "shared".

`unbiased` makes the stand-in for f' and finds the levels between which draws choose. `shared` finds levels that depend on
a random number that encoder and decoder share. This folder may import what `fewbit.solver` may import.
"""
