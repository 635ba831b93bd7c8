"""`fewbit.plan`, `fewbit.fits` and `fewbit.fit_`: compare settings before a training run, and choose one that fits in memory."""
