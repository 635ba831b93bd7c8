"""Mutation testing: small changes of the sources that some test should notice. `__main__.py` is the command."""
