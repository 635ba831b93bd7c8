"""AC-GC's error bounds: how large the errors of what layers keep may be. docs/theory/ac_gc.md derives them.

A gradient error of at most e2 V2, V2 the squared norm of the exact gradient, is allowed (AC-GC, theorem 1). For each
kind of layer there are two functions: `..._d`, which bounds the squared gradient error for given errors of
what is kept, and `..._error`, the errors with which that bound is e2 V2. Errors are squares, dx2:

- worst-case (expectation=False): D is never below the squared gradient error if the elements' squared errors are at
  most dx2; for linear layers, convolutions and norms it is enough that their mean is.
- in expectation (expectation=True): D is never below the mean of the squared gradient error if the elements' errors
  are independent with mean 0 and variances of at most dx2. What a bound asks for besides is said where it does.

Rounding to b bits in a range r has steps of r / (2^b - 1): stochastic rounding has variances of at most step^2 / 4,
errors of at most a step; rounding to nearest errors of at most step / 2, which are not of mean 0.
"""

from fewbit.policies.error_bound.formulas.attention import (
    AttentionNorms,
    attention_d,
    attention_error,
    attention_norms,
)
from fewbit.policies.error_bound.formulas.linear import (
    Convolution,
    convolution_d,
    convolution_error,
    linear_d,
    linear_error,
    most_reads,
)
from fewbit.policies.error_bound.formulas.norms import (
    norm_error,
    norm_input_coefficients,
    norm_input_d,
    norm_input_error,
    norm_squares,
    norm_weight_d,
    norm_weight_error,
)
from fewbit.policies.error_bound.formulas.pointwise import (
    CURVATURE,
    largest_table_error,
    pointwise_d,
    pointwise_error,
    table_d,
    table_error,
)
from fewbit.policies.error_bound.formulas.shares import tolerance

__all__ = [
    "CURVATURE",
    "AttentionNorms",
    "Convolution",
    "attention_d",
    "attention_error",
    "attention_norms",
    "convolution_d",
    "convolution_error",
    "largest_table_error",
    "linear_d",
    "linear_error",
    "most_reads",
    "norm_error",
    "norm_input_coefficients",
    "norm_input_d",
    "norm_input_error",
    "norm_squares",
    "norm_weight_d",
    "norm_weight_error",
    "pointwise_d",
    "pointwise_error",
    "table_d",
    "table_error",
    "tolerance",
]
