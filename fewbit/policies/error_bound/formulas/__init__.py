"""AC-GC's error bounds: the largest errors that saved tensors may have. docs/theory/ac_gc.md derives them.

AC-GC's theorem 1 allows a squared gradient error of at most e2 V2, where V2 is the squared norm of the exact gradient. For
each kind of layer there are two functions. `..._d` bounds the squared gradient error for given errors of the saved
tensor. `..._error` returns the errors with which this bound is e2 V2. Errors are given as squares, dx2:

- worst case (expectation=False): D is never below the squared gradient error if the elements' squared errors are at
  most dx2. For linear layers, convolutions and norms it is enough if their mean is at most dx2.
- in expectation (expectation=True): D is never below the mean of the squared gradient error if the elements' errors
  are independent with mean 0 and variances of at most dx2. A function names any further condition.

Rounding to b bits in a range r has steps of r / (2^b - 1). Stochastic rounding has variances of at most step^2 / 4, and
errors of at most a step. Rounding to nearest has errors of at most step / 2, whose mean is not 0.
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
