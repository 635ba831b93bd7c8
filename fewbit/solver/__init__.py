"""The solver computes the table for a function f and a number of levels, and a lower bound on any such table's error.

A table describes a step function q that replaces the derivative f' in the backward pass. The levels are the values of
q, the breaks are the points at which q changes, and the pieces are the intervals between breaks. In form "levels"
pieces may have the same level; in form "intervals" each piece has its own. A weight w says how much the squared error
counts at each x of an interval, the domain. A level is pinned if its value is given. docs/solver.md explains the
options.

`solve.py` calls the stages in order. This folder may import `fewbit.functions`, `fewbit.table` and `fewbit.schema`. It
does not import torch, and does not search for existing tables, which `fewbit.catalog` does.
"""
