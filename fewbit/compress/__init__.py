"""`compress_`, `replace_activations_`, and the controller that `compress_` returns."""
