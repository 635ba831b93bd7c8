"""One renderer of results: terminal tables, HTML, CSV, JSON, and the common style of figures.

A result is a subclass of `Result`. Its method `records()` returns the numbers, and `view()` describes which columns,
notes and pictures show them; `Result` does the rest. This folder may import the files in the root of the package and
`fewbit.schema`. rich and matplotlib are imported only when something is drawn.
"""
