"""The solver computes the best table for a function f and a number of levels, and proves how good a table can be.

A table describes a step function q that replaces the derivative f' in the backward pass. Its values are the levels. It
changes at the breaks, and the intervals between them are the pieces. In form "levels" pieces may have the same level; in
form "intervals" each has its own. The weight w says how much the squared error counts at each x of the domain. A pinned
level is given by the request. docs/concepts/solver.md explains the options.

`solve.py` calls the stages in order. This folder may import `fewbit.functions`, `fewbit.table` and `fewbit.schema`, and
not torch. `fewbit.catalog` searches for existing tables.
"""
