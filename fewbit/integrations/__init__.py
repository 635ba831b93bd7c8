"""Adapters for training frameworks, one file per framework, which needs it. `import fewbit` imports none of them."""
