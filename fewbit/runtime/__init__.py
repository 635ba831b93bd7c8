"""The torch half: what is kept for the backward pass, and the backends that compute it."""
