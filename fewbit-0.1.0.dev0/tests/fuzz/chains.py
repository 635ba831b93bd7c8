"""Random chains of compressed layers, with views and operations without effect between them.

A chain is made from a seed. Between layers it has what a compiler removes or sees through (cats with empty tensors,
x + 0, permutations back and forth, slices of everything ...) and views of every kind, so that the strides which a
layer's kept input had when it was traced are often not those that the compiled graph gives it.
"""

import math
import random

import torch
from torch import nn

import fewbit
import fewbit.functional as F

EXACT_BITS = 8


class Chain(nn.Module):
    """Random steps that run one after another. `source()` draws an input of a random layout."""

    def __init__(self, seed, layers=4, sources=("tensor", "embedding")):
        super().__init__()
        self.seed, self.names = seed, []
        self.steps, self.layers = [], nn.ModuleList()
        self.random = random.Random(seed)
        self.shape = tuple(self.random.randint(2, 5) for _ in range(self.random.randint(2, 4)))
        self.batch = self.shape[0]
        self.dtype = torch.float64 if self.random.random() < 0.8 else torch.float32
        self.order = self.random.sample(range(len(self.shape)), len(self.shape))
        self.is_strided = self.random.random() < 0.2
        self.is_embedded = self.random.choice(sources) == "embedding"
        # Made once with real tensors, so that each step sees the shape of the one before.
        source = self.source()
        x = source
        if self.is_embedded:
            x = self._add("embedding", fewbit.nn.Embedding(7, self.random.randint(2, 6)), x)
        for _ in range(layers):
            for _ in range(self.random.randint(0, 3)):
                x = self._try(self.random.choice(VIEWS), x)
            x = self._try(self.random.choice(LAYERS), x)
        self.result = tuple(x.shape)
        self.to(self.dtype)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x

    def source(self):
        """Return an input, with values and layout from torch's generator and the seed."""
        if self.is_embedded:
            return torch.randint(7, self.shape)
        order = self.order
        sizes = [self.shape[dim] for dim in order]
        x = torch.randn([*sizes[:-1], sizes[-1] * (2 if self.is_strided else 1)], dtype=self.dtype)
        x = x[..., :: 2 if self.is_strided else 1]
        return x.permute([order.index(dim) for dim in range(len(order))]).requires_grad_()

    def draw(self):
        """Draw all parameters anew."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.1, 0.6 if parameter.dim() < 2 else parameter[0].numel() ** -0.5)

    def _add(self, name, step, x):
        if isinstance(step, nn.Module):
            self.layers.append(step.to(self.dtype))
            step = self.layers[-1]
        y = step(x)
        self.steps.append(step)
        self.names.append(name)
        return y

    def _try(self, make, x):
        """Add a random step if it fits x."""
        step = make(x, self.random)
        if step is None:
            return x
        with torch.no_grad():
            if math.prod(step(x).shape if not isinstance(step, nn.Module) else x.shape) > 600:
                return x
        return self._add(make.__name__, step, x)

    def __repr__(self):
        return f"Chain({self.seed}): {self.shape} {self.dtype} order {self.order} {' '.join(self.names)}"


# -- views and operations without effect: each returns a function of x, or None if it does not fit -----------


def cat_empty(x, random):
    dim = random.randrange(x.dim())
    if random.random() < 0.5:
        return lambda x: torch.cat([x.new_empty(0), x], dim)
    return lambda x: torch.cat([x, x.narrow(dim, 0, 0)], dim)


def cat_alone(x, random):
    dim = random.randrange(x.dim())
    return lambda x: torch.cat([x], dim)


def add_zero(x, random):
    return lambda x: x + 0


def times_one(x, random):
    return lambda x: x * 1


def over_one(x, random):
    return lambda x: x / 1


def to_same(x, random):
    return lambda x: x.to(x.dtype)


def view_same(x, random):
    return lambda x: x.reshape(x.shape)


def slice_all(x, random):
    return lambda x: x[:, 0:]


def there_and_back(x, random):
    a, b = random.randrange(x.dim()), random.randrange(x.dim())
    return lambda x: x.transpose(a, b).transpose(a, b)


def contiguous(x, random):
    return lambda x: x.contiguous()


def clone(x, random):
    return lambda x: x.clone()


def squeeze_again(x, random):
    dim = random.randrange(x.dim() + 1)
    return lambda x: x.unsqueeze(dim).squeeze(dim)


def transpose(x, random):
    a, b = random.randrange(x.dim()), random.randrange(x.dim())
    return lambda x: x.transpose(a, b)


def permute(x, random):
    order = random.sample(range(x.dim()), x.dim())
    return lambda x: x.permute(order)


def copied_transpose(x, random):
    a, b = random.randrange(x.dim()), random.randrange(x.dim())
    return lambda x: x.transpose(a, b).contiguous().transpose(a, b)


def double_flip(x, random):
    dim = random.randrange(x.dim())
    return lambda x: x.flip(dim).flip(dim)


def narrow(x, random):
    dim = random.randrange(1, x.dim())
    if x.shape[dim] < 3:
        return None
    return lambda x: x.narrow(dim, 1, x.shape[dim] - 1)


def every_second(x, random):
    if x.shape[-1] < 4:
        return None
    return lambda x: x[..., ::2]


def expand(x, random):
    if x.dim() > 3:
        return None
    dim = random.randrange(x.dim())
    return lambda x: x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], 2, *x.shape[dim + 1 :])


def flatten(x, random):
    if x.dim() < 3:
        return None
    dim = random.randrange(1, x.dim() - 1)
    return lambda x: x.flatten(dim, dim + 1)


def unflatten(x, random):
    dims = [dim for dim in range(1, x.dim()) if x.shape[dim] > 3 and x.shape[dim] % 2 == 0]
    if not dims or x.dim() > 3:
        return None
    dim = random.choice(dims)
    return lambda x: x.unflatten(dim, (2, x.shape[dim] // 2))


def roll(x, random):
    dim, shift = random.randrange(x.dim()), random.choice([-1, 1, 2])
    return lambda x: x.roll(shift, dim)


def chunk_and_cat(x, random):
    dim = random.randrange(1, x.dim())
    return lambda x: torch.cat(x.chunk(2, dim), dim)


def stack_and_take(x, random):
    return lambda x: torch.stack([x, x])[0]


def channels_last(x, random):
    if x.dim() != 4:
        return None
    return lambda x: x.contiguous(memory_format=torch.channels_last)


def residual(x, random):
    a = random.randrange(x.dim())
    return lambda x: x + torch.cat([x.new_empty(0), x], a) * 0.5


VIEWS = [
    *[cat_empty] * 4, cat_alone, add_zero, times_one, over_one, to_same, view_same, slice_all, there_and_back, contiguous,
    clone, squeeze_again, *[transpose] * 4, *[permute] * 3, *[copied_transpose] * 2, double_flip, narrow, every_second,
    expand, roll, flatten, unflatten, chunk_and_cat, stack_and_take, *[channels_last] * 2, residual,
]  # fmt: skip


# -- layers: each returns a module, or a function of x, or None if it does not fit ----------------------------

KEPT = {"bits": EXACT_BITS}


def linear(x, random):
    return fewbit.nn.Linear(x.shape[-1], random.randint(2, 6), random.random() < 0.5, **KEPT)


def convolution(x, random):
    if x.dim() not in (3, 4):
        return None
    kind = fewbit.nn.Conv1d if x.dim() == 3 else fewbit.nn.Conv2d
    size = random.choice([1, 1, 3])
    return kind(x.shape[1], random.randint(2, 4), size, padding=size // 2, **KEPT)


def layer_norm(x, random):
    dims = random.randint(1, min(2, x.dim() - 1))
    return fewbit.nn.LayerNorm(x.shape[-dims:], **KEPT)


def rms_norm(x, random):
    return fewbit.nn.RMSNorm(x.shape[-1], **KEPT)


def group_norm(x, random):
    if x.dim() < 3:
        return None
    return fewbit.nn.GroupNorm(random.choice([1, x.shape[1]]), x.shape[1], **KEPT)


def batch_norm(x, random):
    kinds = {2: fewbit.nn.BatchNorm1d, 3: fewbit.nn.BatchNorm1d, 4: fewbit.nn.BatchNorm2d}
    if x.dim() not in kinds or x.numel() // x.shape[1] < 2:
        return None
    return kinds[x.dim()](x.shape[1], track_running_stats=random.random() < 0.5, **KEPT)


def instance_norm(x, random):
    if x.dim() not in (3, 4) or x[0, 0].numel() < 2:
        return None
    kind = fewbit.nn.InstanceNorm1d if x.dim() == 3 else fewbit.nn.InstanceNorm2d
    return kind(x.shape[1], affine=True, **KEPT)


def activation(x, random):
    kind = random.choice("GELU SiLU Tanh Softplus Mish ELU Hardswish LeakyReLU Sigmoid".split())
    return getattr(fewbit, kind)(bits=random.choice([2, 4]))


def functional_activation(x, random):
    name, bits = random.choice(["gelu", "silu", "tanh"]), random.choice([1, 3])
    return lambda x: getattr(F, name)(x, bits=bits)


def prelu(x, random):
    return fewbit.nn.PReLU(x.shape[1], **KEPT)


def softmax(x, random):
    dim = random.randrange(x.dim())
    kind = random.choice([fewbit.nn.Softmax, fewbit.nn.LogSoftmax])
    return kind(dim, **KEPT)


def attention(x, random):
    if x.dim() < 3:
        return None
    is_causal = random.random() < 0.5
    a, b = random.sample(range(x.dim()), 2)

    def attend(x):
        key = torch.cat([x.new_empty(0), x.transpose(a, b).contiguous().transpose(a, b)], -2)
        return F.scaled_dot_product_attention(x, key, x * 0.5, is_causal=is_causal, **BITS)

    return attend


BITS = {"bits": EXACT_BITS}


def gated(x, random):
    if x.shape[-1] % 2:
        return None
    function = random.choice([F.swiglu, F.geglu, F.reglu])
    return lambda x: function(*x.chunk(2, -1), **BITS)


def product(x, random):
    dim = random.randrange(x.dim())
    return lambda x: F.mul(x * 1.5, torch.cat([x.new_empty(0), x.flip(dim)], dim), **BITS)


def matrix_product(x, random):
    return lambda x: F.matmul(x * 1.5, x.transpose(-2, -1) * 0.5, **BITS)


def max_pool(x, random):
    if x.dim() not in (3, 4) or min(x.shape[2:]) < 2:
        return None
    return fewbit.nn.MaxPool1d(2) if x.dim() == 3 else fewbit.nn.MaxPool2d(2, 1)


def average_pool(x, random):
    if x.dim() not in (3, 4) or min(x.shape[2:]) < 2:
        return None
    return fewbit.nn.AvgPool1d(2, 1) if x.dim() == 3 else fewbit.nn.AvgPool2d(2)


def dropout_without_effect(x, random):
    return fewbit.nn.Dropout(0.0) if random.random() < 0.5 else fewbit.nn.Dropout(0.5).eval()


def evaluated(x, random):
    return random.choice([fewbit.nn.LayerNorm(x.shape[-1], **KEPT), fewbit.GELU()]).eval()


def pad(x, random):
    if x.dim() != 3 or x.shape[2] < 2:
        return None
    mode = random.choice(["reflect", "replicate"])
    return lambda x: F.pad(x, (1, 1), mode)


LAYERS = [
    *[linear] * 4, *[convolution] * 3, *[layer_norm] * 2, rms_norm, group_norm, batch_norm, instance_norm, *[activation] * 4,
    functional_activation, prelu, softmax, *[attention] * 3, *[gated] * 2, product, matrix_product, max_pool,
    average_pool, dropout_without_effect, evaluated, pad,
]  # fmt: skip
