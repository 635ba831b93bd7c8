"""Random models compressed at 8 bits against themselves, uncompressed: every gradient of every parameter.

The mean of DRAWS gradients may be off by RELATIVE of the exact one's norm, by SPREADS times the spread between draws, and,
because exact gradients may cancel (of a weight before a norm), by FLOOR of the model's largest, or of a tenth of that of y.
If a gradient is off by more than that, the error of torch's own gradient, against float64, is measured too. At most one case
in FEW may need this. A gradient of noise would hide in its own spread, so of many gradients nine in ten must have a spread of
at most MOST_SPREAD.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from cases import CHUNKS, seeds
from random_models import Model

import fewbit
from fewbit.runtime.format import sums
from fewbit.runtime.ops import activation_ops
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec

DRAWS = 3
RELATIVE = {torch.float32: 0.15, torch.float64: 0.15, torch.bfloat16: 0.3}
SPREADS = 6.0
FLOOR = 0.01
FEW = 100
MOST_SPREAD = 0.06
LEAST_GRADIENTS = 900
"""The number of gradients from which their spreads are judged. Those of fewer gradients differ too much by chance."""
SETTINGS = ({}, {}, {"group_size": 32}, {"group_size": 64}, {"copies": 2}, {"functional": False})


def leaves_of(model, inputs):
    named = [(f"input {number}", x) for number, x in enumerate(inputs)] + list(
        model.named_parameters()
    )
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def run(model, inputs):
    """Return (y, the gradient of each leaf that needs one, or None) for a fixed gradient of y."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, on lower precision
        y = model(*inputs)
        generator = torch.Generator().manual_seed(model.seed)
        grad = torch.randn(y.shape, generator=generator).to(y.dtype)
        leaves = [leaf for _, leaf in leaves_of(model, inputs)]
        if not y.requires_grad:
            return y, (None,) * len(leaves)
        return y, torch.autograd.grad(y, leaves, grad, allow_unused=True)


def in_float64(seed):
    """Return the gradients of the exact model in float64."""
    model = Model(seed, is_exact=True)
    inputs = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in model.inputs()
    ]
    model.dtype = torch.float64
    return run(model.double(), inputs)[1]


class Case:
    """One model, exact and compressed, with its gradients and their allowed errors."""

    def __init__(self, seed: int):
        self.seed, self.is_explained = seed, False
        settings = SETTINGS[seed % len(SETTINGS)]
        # Functions that stay torch's own have its defects.
        exact, ours = Model(seed, is_exact=True), Model(seed, "functional" in settings)
        self.what = f"seed {seed}: {exact.dtype}, {settings}, {exact.kind}: {exact.names}"
        inputs = exact.inputs()
        self.names = [name for name, _ in leaves_of(exact, inputs)]
        self.y, self.exact = run(exact, inputs)
        fewbit.compress_(ours, 8, layers={"activation_bits": 8, **settings}, verbose=False)
        inputs = ours.inputs()
        torch.manual_seed(seed)
        draws = [run(ours, inputs) for _ in range(DRAWS)]
        self.ours = draws[0][0]
        self.draws = list(zip(*(grads for _, grads in draws), strict=True))
        self.relative = RELATIVE[exact.dtype]
        norms = [float(grad.double().norm()) for grad in self.exact if grad is not None]
        # A gradient of y of ones' size: where all gradients cancel, rounding is about as much of that.
        self.largest = max([0.1 * self.y.numel() ** 0.5, *norms])

    def errors(self):
        """Return (name, norm of the exact gradient, error of the mean of draws, allowed error, spread)."""
        for name, exact, draws in zip(self.names, self.exact, self.draws, strict=True):
            if exact is None or exact.numel() == 0:
                continue
            exact, draws = exact.double(), torch.stack([draw.double() for draw in draws])
            norm = float(exact.norm())
            mean = draws.mean(0)
            off = float((mean - exact).norm())
            spread = float((draws - mean).flatten(1).norm(dim=1).max())
            allowed = self.relative * norm + SPREADS * spread + FLOOR * self.largest
            yield name, norm, off, allowed, spread

    def wrong(self) -> str | None:
        """Return a description in one line of the first error, or None."""
        same = self.y.dtype == self.ours.dtype and self.y.stride() == self.ours.stride()
        close = torch.allclose(self.y, self.ours, rtol=0.05, atol=0.05) or self.y.isnan().any()
        if not (same and close):
            return f"{self.what}: the result differs"
        for name, exact, draws in zip(self.names, self.exact, self.draws, strict=True):
            for draw in draws:
                if (draw is None) != (exact is None):
                    return f"{self.what}: {name}: {draw} in place of {exact}"
                if draw is not None and (draw.shape, draw.dtype) != (exact.shape, exact.dtype):
                    return f"{self.what}: {name}: {draw.shape}, {draw.dtype} for {exact.shape}"
        for name, norm, off, allowed, spread in self.errors():
            if not off <= allowed:
                self.is_explained = True
                if off <= allowed + self._rounding(name):
                    continue
                return f"{self.what}: {name}: off by {off:.3g} of {norm:.3g}, spread {spread:.3g}"
        return None

    def _rounding(self, name) -> float:
        """Return SPREADS times the error of torch's own gradient."""
        index = self.names.index(name)
        return SPREADS * float((self.exact[index] - in_float64(self.seed)[index]).norm())


def check(seeds):
    """Return one line for each case that is wrong, and for each error of all cases together."""
    wrong, spreads, explained = [], [], []
    for seed in seeds:
        case = Case(seed)
        wrong += filter(None, [case.wrong()])
        explained += [seed] * case.is_explained
        spreads += [spread / max(norm, 1e-300) for _, norm, _, _, spread in case.errors()]
    if len(explained) > 1 + len(seeds) // FEW:
        wrong.append(f"too many are off by more than the spread between draws: {explained}")
    if len(spreads) >= LEAST_GRADIENTS:
        largest = sorted(spreads)[len(spreads) * 9 // 10]
        if largest > MOST_SPREAD:
            wrong.append(f"one gradient in ten has a spread above {largest:.1%}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients_are_those_of_the_exact_model(chunk):
    wrong = check(seeds(chunk))
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:10]])


# -- what would be found ----------------------------------------------------------------------------------


def permuted(original):
    """Return the values in another order."""

    def dequantize(*arguments, **options):
        values = original(*arguments, **options)
        return values.flatten().roll(1).view(values.shape)

    return dequantize


PLACES = {
    "what layers restore": (QuantizedTensorSpec, "dequantize"),
    "sums over rows": (sums, "over_rows"),
    "sums over channels": (sums, "over_channels"),
    "the product of activations": (activation_ops, "decode_mul"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_mistake_is_found(place, monkeypatch):
    holder, name = PLACES[place]
    monkeypatch.setattr(holder, name, permuted(getattr(holder, name)))
    assert any(Case(seed).wrong() for seed in range(100))
