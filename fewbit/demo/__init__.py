"""`fewbit demo`: train a small character-level transformer exactly and compressed."""
