"""Operations of torch that are no layers, such as `torch.einsum`, with fewer bytes saved for the backward pass.

`compress_` replaces torch's functions by these while a model trains. Each function takes torch's arguments and a quantizer, if
it quantizes anything. `fewbit.functional` does not export them, because they have no default number of bits.
"""
