"""A seed is a function of its purpose, and of nothing else."""

import threading

import pytest
import torch
from odd_models import ODD, OPTIONS
from samples import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime.backends import reference
from fewbit.runtime.ops import quantizer_ops
from fewbit.runtime.saved.seeds import Seeds

CPU = torch.device("cpu")


def test_a_seed_is_the_same_for_the_same_purpose_in_any_order():
    torch.manual_seed(3)
    one, other = Seeds(), Seeds()
    a, b = one.of(CPU, "a", 0), one.next(CPU, "b", 1)
    c = one.next(CPU, "b", 1)
    assert other.next(CPU, "b", 1) == b and other.next(CPU, "b", 1) == c
    assert other.of(CPU, "a", 0) == a and one.of(CPU, "a", 0) == a
    assert len({a, b, c}) == 3
    assert all(-(2**63) <= seed < 2**63 for seed in (a, b, c))


def test_seeds_draw_nothing_and_start_from_torchs_generator():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seed = Seeds().of(CPU, "a")
    assert torch.equal(torch.get_rng_state(), state)
    assert Seeds(b"salt").of(CPU, "a") != seed
    torch.rand(())
    assert Seeds().of(CPU, "a") != seed


def test_seeds_are_unrelated():
    """Seeds of consecutive names, inputs, numbers and steps: each bit is like a fair coin."""
    found = []
    for _ in range(4):
        torch.rand(())
        seeds = Seeds()
        for layer in range(16):
            for slot in range(3):
                found += [seeds.next(CPU, f"blocks.{layer}", slot) for _ in range(8)]
    assert len(set(found)) == len(found)
    bits = torch.tensor([[seed >> bit & 1 for bit in range(64)] for seed in found]).double()
    n = len(found)
    assert (bits.mean(0) - 0.5).abs().max() < 5 * 0.5 / n**0.5
    for distance in (1, 8, 24, n // 4):  # neighbors in number, input, layer and step
        changed = (bits[distance:] != bits[:-distance]).double()
        assert abs(changed.mean() - 0.5) < 5 * 0.5 / changed.numel() ** 0.5
        assert (changed.mean(0) - 0.5).abs().max() < 5 * 0.5 / len(changed) ** 0.5


@pytest.mark.parametrize("name", ODD)
def test_no_two_tensors_are_rounded_with_one_seed(name, choice, monkeypatch):
    """This holds in a step and in the following steps. A recomputation rounds the same tensors, with their seeds."""
    monkeypatch.setitem(choice, CPU, reference)  # which makes no copy that is not asked for
    torch.manual_seed(0)
    model = ODD[name]()
    fewbit.compress_(model, 2, verbose=False, **OPTIONS.get(name, {}))
    rounded, original = {}, quantizer_ops.quantize

    def quantize(x, seed, *rest, **named):
        assert torch.equal(rounded.setdefault(int(seed), x.detach().clone()), x)
        return original(x, seed, *rest, **named)

    monkeypatch.setattr(quantizer_ops, "quantize", quantize)
    for step in range(3):
        x = normal((6, 8), seed=step).abs()  # (positive, so that no layer is skipped)
        getattr(model, "parts", model)(x).square().sum().backward()
    assert len(rounded) >= 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_is_one_region_is_rounded_anew_in_each_step(reentrant):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fewbit.compress_(model, 1, verbose=False)
    x = normal((6, 64)).requires_grad_()

    def step():
        model.zero_grad()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        return model[0].weight.grad

    torch.manual_seed(0)
    first, second = step(), step()
    torch.manual_seed(0)
    assert torch.equal(step(), first) and torch.equal(step(), second)
    assert not torch.equal(first, second)


class Interrupted(nn.Module):
    """A model in which `between` runs between two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.between = lambda: None

    def forward(self, x):
        x = self.a(x)
        self.between()
        return self.b(x)


def test_a_forward_in_another_thread_changes_nothing():
    model = Interrupted()
    fewbit.compress_(model, 1, verbose=False)
    x, ran = normal((6, 64)), []

    def gradients():
        torch.manual_seed(0)
        return torch.autograd.grad(model(x).sum(), [model.a.weight, model.b.weight])

    def another():
        model.between = lambda: None
        ran.append(model(2 * x).requires_grad)

    def interrupt():
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()

    expected = gradients()
    model.between = interrupt
    found = gradients()
    assert ran == [True]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
