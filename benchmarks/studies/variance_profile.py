"""The sources of the variance of compressed gradients: ActNN's figure 8, for a residual network and a transformer.

    python benchmarks/study.py variance_profile       # some minutes

Writes results/variance_profile.json (a row for each model, number of bits and module), variance_profile_summary.json
(a row for each model and number of bits), and at 2 bits docs/images/variance_profile.png and
variance_profile_transformer.png. It also writes results/variance_profile_chunks.json: the residual network's sampling
variance if it is estimated from chunks of single batches, which batch norms distort.
"""

from __future__ import annotations

import time

import harness
import numpy as np
import torch
from networks import digits_resnet
from torch import nn
from torch.nn.functional import cross_entropy

import fewbit
from fewbit.demo import text, training

EPOCHS, STEPS = 5, 200
BITS = (1, 2, 4)
BATCHES, DRAWS = 16, 4


def digits(epochs=EPOCHS):
    """Return (trained model, batches, loss) of the ResNet for digits, with 64 digits per batch."""
    digits_resnet.EPOCHS = epochs
    model = digits_resnet.build(nn.ReLU, 0)
    if epochs:
        digits_resnet.train(model, 0)
    found = list(digits_resnet.batches(torch.Generator().manual_seed(1)))
    return model, found[:BATCHES], lambda model, batch: cross_entropy(model(batch[0]), batch[1])


def transformer():
    """Return (trained model, batches, loss) of the demo's transformer, with 32 windows of 64 characters per batch."""
    corpus, settings = text.python_topics(), training.TrainingSettings(steps=STEPS)
    model = training.build(corpus, settings, nn.GELU, 0)
    training.train(model, corpus, settings, 0)
    generator = torch.Generator().manual_seed(1)
    found = [corpus.batch(settings.batch, settings.context, generator) for _ in range(BATCHES)]
    return model, found, lambda model, batch: training.loss(model, *batch)


def summary(profile) -> dict:
    has_own = profile.own > 0
    shares = profile.own[has_own] / profile.quantization[has_own]
    ratios = profile.sampling / profile.quantization
    return {
        "contexts": len(profile.contexts),
        "sampling": float(profile.sampling.sum()),
        "quantization": float(profile.quantization.sum()),
        "direct": float(profile.direct.sum()),
        "bias": float(profile.bias.sum()),
        "sampling_ratio": profile.sampling_ratio,
        "least_ratio": float(ratios.min()),
        "least_ratio_of": profile.parameters[ratios.argmin()],
        "own_share": profile.own_share,
        "median_own_share": float(np.median(shares)),
        "largest_disagreement": float(np.abs(profile.agreement).max()),
        "mean_square_disagreement": float(np.square(profile.agreement).mean()),
    }


def chunks():
    """Yield the sampling variance between batches, and from 8 chunks of single batches, for each number of epochs."""
    for epochs in (0, EPOCHS):
        model, batches, loss = digits(epochs)
        between = fewbit.variance_profile(model, batches, loss, draws=2).sampling.sum()
        single = [
            fewbit.variance_profile(model, batch, loss, draws=2).sampling.sum() for batch in batches
        ]
        yield {
            "epochs": epochs,
            "between_batches": float(between),
            "median_from_chunks": float(np.median(single)),
            "median_ratio": float(np.median(single) / between),
        }


def main():
    rows, summaries = [], []
    for make, picture in ((digits, ""), (transformer, "_transformer")):
        model, batches, loss = make()
        for bits in BITS:
            start = time.perf_counter()
            profile = fewbit.variance_profile(model, batches, loss, bits=bits, draws=DRAWS)
            of = {"model": profile.model, "bits": bits}
            seconds = time.perf_counter() - start
            rows += [of | record for record in profile.records()]
            summaries.append(of | summary(profile) | {"seconds": seconds})
            print(profile, f"{seconds:.0f} s", sep="\n", end="\n\n")
            if bits == 2:
                path = harness.IMAGES / f"variance_profile{picture}.png"
                profile.plot(path, force=True)
    about = harness.machine("torch", "numpy") | {"batches": BATCHES, "draws": DRAWS}
    harness.save("variance_profile", about, rows)
    harness.save("variance_profile_summary", about, summaries)
    harness.save("variance_profile_chunks", about, list(chunks()))
