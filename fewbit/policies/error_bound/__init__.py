"""The policy "error-bound": as few bits as a bound on the error of the gradient allows (AC-GC; docs/error_bound.md).

`policy.py` chooses bits from estimates, `probe.py` measures what rounding costs, `formulas/` has the bounds of each kind of
layer. This folder may import `fewbit.policies` and what that may import.
"""
