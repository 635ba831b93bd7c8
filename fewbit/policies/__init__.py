"""Policies choose the bits of each tensor while the model trains.

Each policy implements one interface, so a new policy is one file. This folder may import `fewbit.convert`,
`fewbit.runtime` and `fewbit.render`. Only `fewbit.compress` creates policies.
"""
