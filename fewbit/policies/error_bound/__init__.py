"""policy="error-bound": bits from how much the error of the gradient may be (AC-GC; docs/error_bound.md)."""
