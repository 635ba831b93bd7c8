"""Entries "measurement": plans, variance profiles and gradient ratios of small models."""

from __future__ import annotations

from functools import partial

import torch

from recorded import api, models

NAMES = ("mlp", "functions", "resnet")
RATIOS = {
    "2 bits": {"bits": 2},
    "L3": {"bits": 1.75},
    "error bound": {"policy": "error-bound"},
    "pre-activation": {"fuse": "preactivation"},
}
CANDIDATES = [
    ("fixed", {"level": "L2", "bits": 2}, False),
    ("shared", {"level": "L3", "bits": 1.5}, False),
    ("error-bound", {"policy": "error-bound", "e2": 0.5}, False),
    ("activations", {"bits": 2}, True),
]


def entries():
    """Yield (key, function that returns the answers)."""
    for name in NAMES:
        yield f"measurement/plan of {name}", partial(_plan, name)
        yield f"measurement/variance profile of {name}", partial(_profile, name)
        for setting, options in RATIOS.items():
            yield f"measurement/gradient ratio of {name}, {setting}", partial(_ratio, name, options)
    yield "measurement/plan with defaults", partial(_plan, "mlp", None)
    yield "measurement/plan of one batch", _one_batch
    yield "measurement/variance profile with settings", _other_profile
    yield "measurement/saved bytes of a function", _saved


def _plan(name, candidates=CANDIDATES):
    case = models.made(name)
    return api.plan(case.model, case.batches[:3], case.loss, candidates) | _after()


def _one_batch():
    case = models.made("mlp")
    return api.plan(case.model, case.batches[0], case.loss, CANDIDATES[:2], draws=3, seed=4)


def _profile(name):
    case = models.made(name)
    return api.variance_profile(case.model, case.batches[:2], case.loss, draws=2) | _after()


def _other_profile():
    case = models.made("attention")
    options = {"bits": 3, "attention_bits": 5, "exclude": "0.mlp", "draws": 3, "seed": 2}
    return api.variance_profile(case.model, case.batches[:2], case.loss, **options)


def _ratio(name, options):
    case = models.made(name)
    controller = api.compressed(case.model, **options)
    for batch in case.batches:
        case.loss(case.model, batch).backward()
    return api.gradient_ratio(controller, case.batches[:2], case.loss, draws=3) | _after()


def _saved():
    weight = torch.randn(8, 8, requires_grad=True)
    return api.saved(lambda x: (x @ weight).exp().relu().sum(), torch.randn(4, 8))


def _after() -> dict:
    """Return the next random number, which measurements leave as it was."""
    return {"next draw": torch.rand(1)}
