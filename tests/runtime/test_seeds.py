"""A seed is a function of its purpose, and of nothing else."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from composed import Composed
from odd_models import ODD, OPTIONS
from samples import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime.backends import reference
from fewbit.runtime.saved.forward import Saving
from fewbit.runtime.saved.seeds import generator_hash, purpose

CPU = torch.device("cpu")


X = torch.zeros(1)


def started(salt=b""):
    """Return what layers would need in a forward pass that begins now."""
    return Saving(None, generator_hash(salt))


def test_a_seed_is_the_same_for_the_same_purpose_in_any_order():
    torch.manual_seed(3)
    one, other = started(), started()
    a, b = one.seed_of(X, purpose("a", 0)), one.seed(X, purpose("b", 1))
    c = one.seed(X, purpose("b", 1))
    assert other.seed(X, purpose("b", 1)) == b and other.seed(X, purpose("b", 1)) == c
    assert other.seed_of(X, purpose("a", 0)) == a and one.seed_of(X, purpose("a", 0)) == a
    assert len({a, b, c}) == 3
    assert all(-(2**63) <= seed < 2**63 for seed in (a, b, c))


def test_seeds_draw_nothing_and_start_from_torchs_generator():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    start = generator_hash()
    assert torch.equal(torch.get_rng_state(), state)
    assert generator_hash(b"salt") != start and generator_hash(b"", (1,)) != start
    torch.rand(())
    assert generator_hash() != start


def test_seeds_are_unrelated():
    """Seeds of consecutive names, inputs, numbers and steps: each bit is like a fair coin."""
    found = []
    for _ in range(4):
        torch.rand(())
        saving = started()
        for layer in range(16):
            for slot in range(3):
                what = purpose(f"blocks.{layer}", slot)
                found += [saving.seed(X, what) for _ in range(8)]
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
    rounded, original = {}, reference.quantize

    def quantize(x, seed, *rest, **named):
        assert torch.equal(rounded.setdefault(int(seed), x.detach().clone()), x)
        return original(x, seed, *rest, **named)

    monkeypatch.setattr(reference, "quantize", quantize)
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


def test_a_forward_in_another_thread_changes_nothing():
    def forward(model, x):
        x = model.a(x)
        model.between()
        return model.b(x)

    layers = {"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}
    model = Composed(forward, **layers, between=lambda: None)
    fewbit.compress_(model, 1, verbose=False)
    x, ran = normal((6, 64)), []

    def gradients():
        torch.manual_seed(0)
        return torch.autograd.grad(model(x).sum(), [model.a.weight, model.b.weight])

    def another():
        model.between = lambda: None
        ran.append(model(2 * x).requires_grad)

    def interrupt():
        with ThreadPoolExecutor() as pool:
            pool.submit(another).result()

    expected = gradients()
    model.between = interrupt
    found = gradients()
    assert ran == [True]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
