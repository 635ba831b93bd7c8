"""A small language model, its exact gradients, and checks of the gradients that two processes compute together."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from unittest.mock import patch

import torch
from exact_copies import ExactSpec
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fewbit
from fewbit import checkpointing
from fewbit.runtime.format import layout
from fewbit.runtime.quantizers.copies import unquantized
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import SavedTensors

TOKENS, WIDTH, HEADS, CLASSES = 16, 64, 4, 48
BATCH = 8


class Attention(nn.Module):
    """Causal attention. The number of heads follows from the size of the projections, which may be sharded."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        nn.init.zeros_(self.key.bias).requires_grad_(False)  # its gradient is 0 but for rounding

    def forward(self, x):
        batch, tokens, _ = x.shape
        shape = batch, tokens, -1, WIDTH // HEADS
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, activation):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.RMSNorm(WIDTH)
        self.up, self.activation = nn.Linear(WIDTH, 4 * WIDTH), activation()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """A decoder. `first` and `last` say whether the embedding and the head belong to this stage of a pipeline."""

    def __init__(self, activation=nn.ReLU, blocks: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block(activation) for i in range(blocks)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))

    def stage(self, number: int, count: int):
        """Keep stage `number` of `count` of a pipeline, and return the model."""
        size = len(self.blocks) // count
        kept = range(number * size, (number + 1) * size)
        for name in list(self.blocks):
            if int(name) not in kept:
                del self.blocks[name]
        if number > 0:
            self.embedding = None
        if number < count - 1:
            self.norm = self.head = None
        return self


def model(**options) -> LanguageModel:
    """Return a model whose parameters are the same in every process."""
    torch.manual_seed(0)
    return LanguageModel(**options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, targets) of all processes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CLASSES, (2, BATCH, TOKENS), generator=generator).unbind()


def share(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, targets) of one of two processes."""
    return tuple(part.chunk(2)[rank] for part in batch())


def loss_of(logits, targets):
    """Return the mean loss of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def exact_gradients(**options) -> dict[str, torch.Tensor]:
    """Return the gradients of the exact model for the whole batch, computed by this process alone."""
    exact = model(**options)
    tokens, targets = batch()
    loss_of(exact(tokens), targets).backward()
    return gradients_of(exact)


def gradients_of(module) -> dict[str, torch.Tensor]:
    """Return the whole gradients by the names that the parameters have without wrappers. All processes must call this."""
    found = {}
    for name, parameter in module.named_parameters():
        for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module."):
            name = name.replace(wrapper, "")
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def compressed(module, bits=8, **options):
    """Compress a model, and return the controller."""
    return fewbit.compress_(module, bits, layers={"activation_bits": 8}, verbose=False, **options)


def check(run, **options) -> None:
    """Check the gradients of two processes: equal to the exact ones with exact copies, and close with 8 bits.

    With copies that are not rounded, and ReLU, the only differences are those of summation in float32. A collective that
    is wrong or missing therefore shows. The check with 8 bits uses fewbit's own copies.

    Args:
        run: a function of a model that runs a step of training in this process and returns {name: gradient}. It may
            return some of the gradients.
        **options: arguments of `model`.
    """
    expected = exact_gradients(**options)
    with exact_copies():
        found = run(model(**options))
    assert found, "no gradients"
    for name, gradient in found.items():
        assert gradient.shape == expected[name].shape, name
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert error < 2e-5, (name, error)
    options["activation"] = nn.GELU
    expected = exact_gradients(**options)
    for name, gradient in run(model(**options)).items():
        cosine = float(torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), 0))
        assert cosine > 0.9996, (name, cosine)
        difference = float((gradient - expected[name]).norm() / expected[name].norm())
        # An exact gradient is a sign that nothing was compressed. Only gradients of biases may be nearly exact.
        assert difference < 0.03, (name, difference)


def checked(run):
    """Return a case, a function of the rank, that checks the gradients of a function of a model and the rank."""

    @wraps(run)
    def case(rank):
        check(lambda module: run(module, rank))

    return case


def _local(tensor):
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local.detach()


class _Spec(ExactSpec):
    """The spec of an exact copy, with the attributes of the spec of a quantized copy that a compressed model reads."""

    slot = None

    def for_consumer(self, name):
        return self


@contextmanager
def exact_copies():
    """Return a context manager in whose block layers make copies that are not rounded, wherever they quantize."""

    def made(self, x, dtype, bits, kind, seed, channels, stride, mask=None, normalize=None):
        values = x.detach().clone()
        if normalize is not None:
            mean, rstd, inner, _ = normalize
            rows = layout.storage_order(values).view(-1, len(rstd), inner)
            if mean is not None:
                rows.sub_(mean[:, None])
            rows.mul_(rstd[:, None])
        spec = _Spec(tuple(values.shape), tuple(values.stride()), dtype)
        return SavedTensors((values,), spec)

    with (
        patch.object(Quantizer, "_by_kernel", made),
        patch.object(Quantizer, "quantize_with_activation", lambda self, *arguments: None),
        patch.object(checkpointing, "_save", lambda x, *arguments: unquantized(x.detach())),
    ):
        yield


def local_bytes(module, *inputs) -> dict[str, int]:
    """Return the bytes that autograd saves in a forward pass in this process: {"codes": .., "floats": ..}.

    Parameters and inputs do not count. Codes are integers and 16-bit ranges. Every storage counts once.
    """
    saved = {}

    def pack(tensor):
        local = _local(tensor)
        saved[local.untyped_storage().data_ptr()] = local
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    for tensor in (*module.parameters(), *inputs):
        saved.pop(_local(tensor).untyped_storage().data_ptr(), None)
    found = {"codes": 0, "floats": 0}
    for tensor in saved.values():
        found["floats" if tensor.dtype == torch.float32 else "codes"] += tensor.nbytes
    return found
