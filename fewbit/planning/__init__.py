"""`fewbit.plan`: compare settings of `compress_` by memory and gradient error before a training run.

This folder may import `fewbit.compress`, `fewbit.compiler` and everything that these two may import. Among the other
folders, only `fewbit/cli` imports it.

`candidates` has the settings, `steps` the passes that are measured, `loss` replaces the loss function's cross-entropy,
`plan` has the public function, `training_plan` its result, and `picture` the plot.
"""
