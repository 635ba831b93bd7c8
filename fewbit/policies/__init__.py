"""Policies: objects that choose the bits of each saved tensor while the model trains.

To add one, write a subclass of `BitPolicy`, and register a function with `make_policy`.
"""

from fewbit.policies.make import make_policy
from fewbit.runtime.saved.assignment import BitAssignment, Probe
from fewbit.runtime.saved.bit_policy import BitPolicy, wrong_state

__all__ = ["BitAssignment", "BitPolicy", "Probe", "make_policy", "wrong_state"]
