"""The search for tables: shipped, cached on disk or solved on demand; and checks of their errors."""
