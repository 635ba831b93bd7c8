"""`fewbit demo`: train a small character-level transformer with exact and with few-bit activations."""
