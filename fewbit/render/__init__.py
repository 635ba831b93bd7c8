"""Rendering of results: terminal tables, HTML, CSV, JSON and the common style of pictures.

This folder may import the files in the root of the package and `fewbit.schema`. It imports rich and matplotlib only when
something is drawn.
"""
