"""Adapters for training frameworks, one file per framework. `import fewbit` imports none of them.

Each file needs the framework that it is named after. It may import everything of fewbit except the command line.
"""
