"""`fewbit demo`: a small character-level transformer, trained with exact and with few-bit GELU."""
