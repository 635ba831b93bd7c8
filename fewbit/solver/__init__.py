"""The solver computes the best table for a function f and a number of levels, and a lower bound on the error of any such table.

docs/concepts/solver.md explains the stages, which `solve.py` calls in order.
"""
