"""The policy of `ErrorBound`: as few bits as a bound on the error of gradients allows (the AC-GC method).

docs/guides/error_bound.md describes the method. `policy.py` chooses bits from estimates, `probe.py` measures how rounding
changes gradients. The formulas for the errors of gradients stand beside the layers, in `fewbit/functional/`. This folder may import
`fewbit.policies` and what `fewbit.policies` may import.
"""
