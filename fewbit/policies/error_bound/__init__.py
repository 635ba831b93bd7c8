"""The policy of `ErrorBound`: as few bits as a bound on the error of gradients allows (the AC-GC method, docs/guides/error_bound.md).

`policy.py` chooses bits from estimates, and `probe.py` measures how rounding changes gradients. This folder may import
`fewbit.policies` and what `fewbit.policies` may import.
"""
