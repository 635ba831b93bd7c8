"""Settings that every test shares."""

from hypothesis import settings

# The same examples in every run: a failure is a change, not luck.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")
