"""The measurement, in one forward and backward pass, of the variance that rounding each saved tensor adds to the gradient."""
