"""Small models that compute their tensors by functions, for tests of `fewbit.compile`. Each returns a loss."""

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS = (
    F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.elu, F.softplus, F.mish, F.leaky_relu,
)  # fmt: skip


class Attention(nn.Module):
    """A transformer block with scaled_dot_product_attention, GELU, layer norms and cross-entropy."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, tokens, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(x.flatten(0, 1), torch.arange(n * tokens) % width)


class WrittenOut(nn.Module):
    """Attention by einsum and softmax, with dropout."""

    def __init__(self, width=64):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(torch.einsum("btd,bsd->bts", q, k) / 8, -1)
        weights = F.dropout(weights, 0.1, self.training)
        return self.out(torch.einsum("bts,bsd->btd", weights, v)).square().mean()


class Convolutions(nn.Module):
    """Convolutions with batch norms, ReLU, SiLU and max pooling."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(32), nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.silu(self.norm2(self.conv2(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.arange(len(x)) % 10)


class Gated(nn.Module):
    """RMS norm and SwiGLU, written out."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = self.embed(x)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return (x + self.down(F.silu(self.gate(y)) * self.up(y))).square().mean()


class Experts(nn.Module):
    """A mixture of experts: topk of a router, and masks."""

    def __init__(self, width=64, experts=4):
        super().__init__()
        self.embed, self.router = nn.Linear(width, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        x = self.embed(x).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = 0
        for number, expert in enumerate(self.experts):
            y = y + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return y.square().mean()


class Scan(nn.Module):
    """A gated recurrence, written out as a loop whose tensors have few elements."""

    def __init__(self, width=64):
        super().__init__()
        self.embed, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x):
        gates, values = self.embed(x).chunk(2, -1)
        gates, state, states = torch.sigmoid(gates), torch.zeros_like(values[:, 0]), []
        for t in range(x.shape[1]):
            state = gates[:, t] * state + (1 - gates[:, t]) * torch.tanh(values[:, t])
            states.append(state)
        return self.out(torch.stack(states, 1)).square().mean()


class Functions(nn.Module):
    """Activations called as functions, and quotients, roots and logarithms."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in ACTIVATIONS)

    def forward(self, x):
        for layer, function in zip(self.layers, ACTIVATIONS, strict=True):
            x = x + function(layer(x))
        quotients = (x / (1 + x.abs())).mean() + torch.log1p(x.square()).mean()
        return x.pow(3).mean() + quotients + torch.sqrt(x.square() + 1).mean()


def made(name):
    """Return the model `name` and its input, both from one seed."""
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    return kind(), torch.randn(shape)


MODELS = {
    "attention": (Attention, (8, 64, 64)),
    "attention written out": (WrittenOut, (64, 16, 64)),
    "convolutions": (Convolutions, (16, 3, 32, 32)),
    "gated": (Gated, (32, 16, 64)),
    "experts": (Experts, (32, 16, 64)),
    "scan": (Scan, (16, 16, 64)),
    "functions": (Functions, (32, 16, 64)),
}
