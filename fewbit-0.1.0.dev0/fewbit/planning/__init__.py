"""`fewbit.plan` and `fewbit.fits`: compare settings of `compress_` before a training run.

`plan` compares saved bytes and gradient errors; `fits` compares the memory of a training step with that of a device.

This folder may import `fewbit.compress`, `fewbit.compiler` and everything that these two may import. Among the other
folders, only `fewbit/cli` imports it.

`candidates` has the settings, `steps` the passes that are measured, `loss` replaces the loss function's cross-entropy,
`plan` has the public function, `training_plan` its result, and `picture` the plot.

`fits` has the other public function, and `fit` its result. `training_step` runs a training step on fake tensors,
`storages` follows the storages that the step allocates and frees, and `largest` searches the largest size that fits.
"""
