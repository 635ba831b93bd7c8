"""The solver computes the best table for a function f and a number of levels, and proves how good a table can be.

A table describes a step function q that replaces the derivative f' in the backward pass. The levels are the values of
q, the breaks are the points at which q changes, and the pieces are the intervals between breaks. In form "levels"
pieces may have the same level; in form "intervals" each piece has its own. A weight w says how much the squared error
counts at each x of an interval, the domain. A level is pinned if the request gives its value. The result includes a
lower bound: no table of the same form and size has a smaller error. docs/concepts/solver.md explains the options.

`solve.py` calls the stages in order. This folder may import `fewbit.functions`, `fewbit.table` and `fewbit.schema`. It
does not import torch, and does not search for existing tables, which `fewbit.catalog` does.
"""
