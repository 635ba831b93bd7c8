"""Few-bit activation functions, which save a code of a few bits for each input element in place of the element."""
