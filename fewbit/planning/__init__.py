"""`fewbit.plan`, `fewbit.fits` and `fewbit.fit_`: compare settings before a training run, and choose one that fits in memory.

`candidates` has the settings, and `real_steps` and `fake_steps` run training steps; `timeline` computes bytes from their allocations.
`plan`, `fits` and `fit` have the public functions, and `training_plan`, `fits_result` and `fastest_fit` their results.
"""
