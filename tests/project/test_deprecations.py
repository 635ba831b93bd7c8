"""A deprecation warning that fewbit causes fails every test, also one that ignores such warnings."""

import warnings

import pytest


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_deprecations_in_fewbit_are_errors(category):
    def warn(module):
        warnings.warn_explicit("a deprecated function", category, "file.py", 1, module=module)

    warn("torch.nn")
    with pytest.raises(category):
        warn("fewbit.nn.linear")
