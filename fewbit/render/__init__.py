"""One renderer of results: terminal tables, HTML, CSV, JSON, and the common style of figures.

A result has `records()` with its numbers and `view()`, which says which columns to make of them; `Result` does the rest.
This folder may import the files in the root of the package and `fewbit.schema`. It imports rich and matplotlib only when
something is drawn.
"""
