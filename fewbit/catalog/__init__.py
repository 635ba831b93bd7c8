"""The search for tables, which are shipped with the package, cached on disk or solved on demand, and checks of their errors."""
