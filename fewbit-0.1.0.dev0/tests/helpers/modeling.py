"""Access to classes of transformers by name. They are imported when a test needs them."""

from importlib import import_module


def of(name: str, cls: str) -> type:
    """Return a class of transformers.models.<name>, from its module of models or of configurations."""
    kind = "configuration" if cls.endswith("Config") else "modeling"
    return getattr(import_module(f"transformers.models.{name}.{kind}_{name}"), cls)
