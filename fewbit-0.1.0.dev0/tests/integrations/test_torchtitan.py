"""Tests of the policy for torchtitan, with a stand-in that has torchtitan's interface.

torchtitan is not a requirement of the tests. The stand-in has the classes `Configurable` and
`ActivationCheckpointing`, a policy that recomputes blocks, layers that subclass those of torch, and a trainer that calls
the policy where torchtitan does.
"""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import fewbit

WIDTH, INNER, WORDS, LENGTH = 64, 160, 50, 32


class Configurable:
    """A class with a configuration, whose `build` makes an instance."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **arguments):
            return self._owner(config=self, **arguments)

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        if "Config" in vars(cls):
            assert "__slots__" in vars(cls.Config)
            cls.Config._owner = cls


class ActivationCheckpointing(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False

    def __init__(self, config, dump_folder=""):
        self.config, self.dump_folder = config, dump_folder


class Recomputed(ActivationCheckpointing):
    """Recomputes every block, as torchtitan's FullAC does."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass

    def apply(self, model):
        for name, block in model.layers.named_children():
            model.layers.register_module(name, checkpoint_wrapper(block, early_stop=False))


class Linear(nn.Linear):
    """A subclass of torch's layer with torch's forward, as torchtitan's layers are."""


class RMSNorm(nn.RMSNorm):
    pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.w1, self.w3 = (Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm = RMSNorm(WIDTH)
        self.lm_head = Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.lm_head(self.norm(x))


def trained(policy, steps=0):
    """Return a model that is built, compressed and initialized in torchtitan's order, then trained for some steps."""
    with torch.device("meta"):
        model = Decoder()
    if policy is not None:
        policy.build(dump_folder="").apply(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1) if parameter.dim() > 1 else parameter.fill_(1.0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def tokens():
    return torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def policy(monkeypatch):
    """Return the policy's class, made for the stand-in."""
    for name in ("torchtitan", "torchtitan.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    name = "torchtitan.distributed.activation_checkpoint"
    module = ModuleType(name)
    module.ActivationCheckpointing = ActivationCheckpointing
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "fewbit.integrations.torchtitan", raising=False)
    made = importlib.import_module("fewbit.integrations.torchtitan").CompressedActivations
    yield made
    sys.modules.pop("fewbit.integrations.torchtitan")


def saved(model):
    return fewbit.saved_bytes(model, tokens()).total


def test_saves_less_and_trains_alike(policy, capsys):
    exact, losses = trained(None, 20)
    model, compressed = trained(policy.Config(bits=4), 20)
    assert saved(model) < saved(exact) / 5
    assert model.state_dict().keys() == exact.state_dict().keys()
    assert compressed[0] == losses[0]
    assert abs(compressed[-1] - losses[-1]) < 0.1 * (losses[0] - losses[-1])
    assert "called functions save 4 bits" in capsys.readouterr().out


def test_the_output_layer_stays_exact(policy):
    model, _ = trained(policy.Config(bits=2))
    result = model(tokens())
    assert result.grad_fn.name() != "_LinearBackward"
    everything, _ = trained(policy.Config(bits=2, exclude=[]))
    assert everything(tokens()).grad_fn.name() == "_LinearBackward"


def test_a_stage_without_an_output_layer(policy):
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Block()})})
    built = policy.Config(bits=2).build(dump_folder="")
    built.apply(model)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    assert fewbit.saved_bytes(model["layers"]["0"], x).total < 4 * x.numel()
    assert built.controller.config == fewbit.FixedBits(2)


def test_with_recomputed_blocks(policy):
    """The blocks are compressed, and recomputed from inputs that torch saves in full."""
    model, losses = trained(policy.Config(bits=8, then=Recomputed.Config()), 3)
    plain, exact = trained(Recomputed.Config(), 3)
    assert type(model.layers["0"]).__name__ == "CheckpointWrapper"
    assert losses[0] == exact[0]
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0)


@pytest.mark.slow
def test_sharded_after_it_is_compressed(policy, tmp_path):
    """torchtitan calls fully_shard on the blocks after the policy."""
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = Decoder().train()
        whole = fewbit.saved_bytes(model, tokens()).total
        policy.Config(bits=2).build(dump_folder="").apply(model)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        recorded = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: recorded.append(tensor) or tensor, lambda tensor: tensor
        ):
            loss = model(tokens()).square().mean()
        codes = sum(t.nbytes for t in recorded if t.dtype is torch.int32)
        assert 0 < codes < whole / 8
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
