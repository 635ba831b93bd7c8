"""`fewbit.plan`, `fewbit.fits` and `fewbit.fit_`: compare settings before a training run, and choose one that fits in memory.

`plan` compares saved bytes and gradient errors. `fits` compares the memory of a training step with that of a device. `fit_`
chooses what each block of a model saves, so that a training step fits in memory, in the least time.

This folder may import `fewbit.compress`, `fewbit.compiler` and everything that these two may import. Among the other
folders, only `fewbit/integrations` and `fewbit/cli` import it.

`candidates` has the settings that all three measure and apply. `real_steps` and `fake_steps` run training steps on real and on
fake tensors; `timeline` computes bytes from the allocations and releases of a step, which `storages` follows on fake tensors,
and `watching` marks in a step where blocks begin and end.

`plan`, `fits` and `fit` have the public functions, and `training_plan`, `fits_result` and `fastest_fit` their results. `loss`
replaces the loss function's cross-entropy for `plan`, and `picture` draws. `largest` searches the largest size that fits.

For `fit_`, `blocks` finds the repeated modules of a model, and `settings` has their options. `examination` measures every
option with `block_steps`; `costs` estimates times of steps that cannot run, and `processes` computes what a process of several
holds. `choose` is the solver.
"""
