"""The policy of `ErrorBound` (AC-GC, docs/guides/error_bound.md): as few bits as a bound on the error of gradients allows.

`policy.py` chooses bits from estimates, and `probe.py` measures how rounding changes gradients.
"""
