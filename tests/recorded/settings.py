"""Settings of `compress_`, by the names that keys of the record have."""

from __future__ import annotations

EVERYWHERE = {
    "1 bit": {"bits": 1},
    "2 bits": {"bits": 2},
    "4 bits": {"bits": 4},
    "8 bits": {"bits": 8},
    "default": {},
    "L0": {"level": "L0"},
    "L1": {"level": "L1"},
    "L2.5, 2 bits": {"level": "L2.5", "bits": 2},
    "L3, 1.75 bits": {"level": "L3", "bits": 1.75, "interval": 1},
    "L4, 2 bits": {"level": "L4", "bits": 2, "interval": 2},
    "budget": {"budget": 0.3, "interval": 1},
    "large budget": {"budget": 0.7, "interval": 1},
    "error bound": {"policy": "error-bound", "interval": 1},
    "error bound .1": {"policy": "error-bound", "e2": 0.1, "interval": 2},
    "pre-activation": {"fuse": "preactivation"},
    "no functions": {"bits": 2, "functional": False},
}
"""Settings for every model. A budget is a share of what the exact model keeps, to be multiplied before the call."""

_BOUND = {"policy": "error-bound", "interval": 1}

FEW = {
    "3 bits": {"bits": 3},
    "5 bits": {"bits": 5},
    "6 bits": {"bits": 6},
    "7 bits": {"bits": 7},
    "L2, 2 bits": {"level": "L2", "bits": 2},
    "L5": {"level": "L5", "bits": 3},
    "L2.5, 2.3 bits": {"level": "L2.5", "bits": 2.3},
    "L3, default": {"level": "L3"},
    "2.5 bits": {"bits": 2.5, "interval": 3},
    "budget, L4": {"budget": 0.5, "level": "L4", "interval": 1},
    "error bound 1": {**_BOUND, "e2": 1.0},
    "error bound 2, max": {**_BOUND, "e2": 2.0, "window": "max"},
    "error bound by channel": {**_BOUND, "by_channel": True},
    "error bound quant+zvc": {**_BOUND, "codec": "quant+zvc"},
    "error bound error-bounded": {**_BOUND, "codec": "error-bounded"},
    "error bound jpeg": {**_BOUND, "codec": "jpeg"},
    "error bound jpeg by channel": {**_BOUND, "codec": "jpeg", "by_channel": True},
    "error bound, bits given": {**_BOUND, "activation_bits": 2, "attention_bits": 5},
    "error bound, override": {**_BOUND, "overrides": {"*0*": 4}},
    "pre-activation, 2 bits": {"fuse": "preactivation", "bits": 2},
    "pre-activation, 8 bits": {"fuse": "preactivation", "bits": 8},
    "2 copies": {"bits": 2, "copies": 2},
    "groups of 32": {"bits": 2, "group_size": 32},
    "groups of 64": {"bits": 3, "group_size": 64},
    "bfloat16 minimums": {"bits": 2, "minimum": "bfloat16"},
    "float32 minimums": {"bits": 2, "minimum": "float32"},
    "activations 1": {"bits": 2, "activation_bits": 1},
    "activations 4": {"bits": 2, "activation_bits": 4},
    "attention 2": {"bits": 2, "attention_bits": 2},
    "attention 8": {"bits": 2, "attention_bits": 8},
    "L3, attention 4": {"bits": 1.5, "attention_bits": 4, "interval": 1},
    "include": {"bits": 2, "include": "*0*"},
    "exclude": {"bits": 2, "exclude": "*1*"},
    "include a function": {"bits": 2, "include": lambda path, module: len(path) % 2 == 1},
    "override bits": {"bits": 2, "overrides": {"*0*": 8, "*1*": 5}},
    "override a mapping": {
        "bits": 2,
        "overrides": {"*0*": {"bits": 3, "activation_bits": 1, "group_size": 64}, "*1*": None},
    },
    "L3, override": {"bits": 1.75, "interval": 1, "overrides": {"*0*": 6}},
}
"""More settings, for the models in SOME. Globs match something in each of them."""

SOME = (
    "mlp",
    "functions",
    "transformer",
    "attention",
    "convolutions",
    "channels last",
    "resnet",
    "pre-activation resnet",
    "nested",
    "text",
    "signals",
    "bfloat16",
    "autocast",
    "llama",
    "gpt2",
    "t5",
    "vit",
)
"""Models that FEW is for."""

REFUSED = {
    "9 bits": {"bits": 9},
    "half a bit": {"bits": 0.5},
    "2.5 bits at L2": {"bits": 2.5, "level": "L2"},
    "no such level": {"level": "L6"},
    "budget without a sample": {"budget": "1 GiB"},
    "bound and bits": {"policy": "error-bound", "bits": 2},
    "no such codec": {"policy": "error-bound", "codec": "zip"},
    "e2 of 0": {"policy": "error-bound", "e2": 0},
    "groups of 33": {"group_size": 33},
    "3 copies": {"copies": 3},
    "no such minimum": {"minimum": "float64"},
    "no such fuse": {"fuse": "everything"},
    "fused copies": {"fuse": "preactivation", "copies": 2},
    "fused at L3": {"fuse": "preactivation", "level": "L3"},
    "no such path": {"include": "nowhere.*"},
    "interval of 0": {"level": "L3", "interval": 0},
}
"""Settings that fewbit refuses."""
