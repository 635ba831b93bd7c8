"""Sizes and layouts: the order of a tensor's elements, groups, codes in int32 words, and the variance of rounding."""
