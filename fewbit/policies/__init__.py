"""Policies choose the bits of each tensor while the model trains.

Each policy implements one interface, so a new policy is one file: a subclass of `BitPolicy`, whose assignments are
`BitAssignment`s and may have a `Probe`, and a function registered with `make_policy`. This folder may import
`fewbit.convert`, `fewbit.runtime` and `fewbit.render`. Only `fewbit.compress` creates policies.
"""

from fewbit.policies.make import make_policy
from fewbit.runtime.saved.assignment import BitAssignment, Probe
from fewbit.runtime.saved.bit_policy import BitPolicy, wrong_state

__all__ = ["BitAssignment", "BitPolicy", "Probe", "make_policy", "wrong_state"]
