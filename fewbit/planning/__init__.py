"""`fewbit.plan`: compare settings of `compress_` by memory and gradient error before a training run.

This folder may import `fewbit.compress` and everything that `fewbit.compress` may import. Among the other folders, only
`fewbit/cli` imports it.
"""
