"""Operations of torch that are no layers, such as `torch.einsum`, with fewer bytes saved for the backward pass.

`compress_` puts these in the place of torch's functions. They take torch's arguments and a quantizer, and have no default number of
bits, so `fewbit.functional` does not export them.
"""
