"""Measure what the bits of activations add to the gradient's error and to the saved bytes (docs/decisions/0017).

    python benchmarks/activation_bits.py            # about 3 minutes on one core
    python benchmarks/activation_bits.py --quick    # few steps and draws, to check that it works

The networks are those of quantizer_choice.py that have activations whose derivative has more than two values. Inputs of
layers have 4, 5, 6 or 8 bits (attention at least 4). Activations have 3 bits or as many as the inputs. The error is the
root of the mean of |g^ - g|^2 / |g|^2 over draws of the random rounding, where g is the exact gradient of all
parameters for one batch, and g^ that of the compressed network. It is measured at the start of training, and after 200
steps of exact training.

Writes results/activation_bits.json: a row for each network, time, number of bits, and number of bits of activations.
"""

from __future__ import annotations

import copy
import statistics

import quantizer_choice

import fewbit

NETWORKS = ("demo's transformer", "GPT-2", "BERT", "ViT on digits", "U-Net on digits")
BITS = (4, 5, 6, 8)
USUAL = 3
LATE, DRAWS = 200, 8


def measure(name, network, steps, draws):
    """Yield the rows of a network, early and late in training."""
    if name not in NETWORKS:
        return
    for time, _, model in quantizer_choice.early_and_late(network, steps):
        for row in errors(network, model, draws):
            yield {"network": name, "time": time, **row}


def errors(network, model, draws):
    """Yield a row for each number of bits and of bits of activations, for a network with its present parameters."""
    batch = network.batch(10**6)
    exact = quantizer_choice.gradient(network, model, batch)
    for bits in BITS:
        for of_activations in (USUAL, bits):
            compressed = copy.deepcopy(model)
            layers = {"activation_bits": of_activations}
            fewbit.compress_(compressed, bits=bits, layers=layers, verbose=False)
            saved = fewbit.saved_bytes(compressed, batch[0]).total
            found = quantizer_choice.relative_errors(network, compressed, batch, exact, draws)
            yield {
                "bits": bits,
                "activation_bits": of_activations,
                "saved_bytes": saved,
                "error": statistics.fmean(found) ** 0.5,
            }


def line(row):
    return (
        f"{row['network']:27} {row['time']:5} {row['bits']} bits, activations {row['activation_bits']}: "
        f"{row['saved_bytes'] / 2**20:.2f} MiB, error {row['error']:.2%}"
    )


if __name__ == "__main__":
    quantizer_choice.run(
        "activation_bits", __doc__.splitlines()[0], measure, (LATE, DRAWS), (3, 2), line
    )
