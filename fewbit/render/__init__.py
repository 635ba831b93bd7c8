"""One renderer of results: terminal tables, HTML, CSV, JSON, and the common style of figures.

A subclass of `Result` has the numbers in `records()`, and in `view()` the columns, notes and pictures that show them.
"""
