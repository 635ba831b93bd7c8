"""`fewbit.fit_`: what each block of a model saves, so that a training step fits in memory, in the least time.

This folder may import `fewbit.planning` and everything that `fewbit.planning` may import. Among the other folders, only
`fewbit/integrations` and `fewbit/cli` import it.

`fit` has the public function, and `result` what it returns. `blocks` finds the repeated modules of a model, and `settings`
has the options of a block and applies them. `examination` measures every option: `steps` runs training steps, `watching` marks
in them where blocks begin and end, `timeline` computes bytes from the marks, allocations and releases, and `costs` estimates
times of steps that cannot run. `choose` is the solver.
"""
