"""Random chains of compressed layers, with views and operations without effect between them.

A chain is made from a seed. Between layers it has what a compiler removes or sees through (cats with empty tensors,
x + 0, permutations back and forth, slices of everything ...) and views of every kind, so that the strides which a
layer's kept input had when it was traced are often not those that the compiled graph gives it.
"""

import math
import random
from functools import partial

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
                x = self._try(VIEWS, x)
            x = self._try(LAYERS, x)
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

    def _try(self, table, x):
        """Add a random step of a table if it fits x."""
        names = list(table)
        (name,) = self.random.choices(names, [table[name][0] for name in names])
        _, fits, make = table[name]
        if not fits(x):
            return x
        step = make(x, self.random)
        with torch.no_grad():
            if math.prod(step(x).shape if not isinstance(step, nn.Module) else x.shape) > 600:
                return x
        return self._add(name, step, x)

    def __repr__(self):
        return f"Chain({self.seed}): {self.shape} {self.dtype} order {self.order} {', '.join(self.names)}"


def always(x):
    return True


def is_sequence(x):
    return x.dim() == 3


def is_image(x):
    return x.dim() == 4


def has_positions(x):
    return x.dim() in (3, 4)


def can_be_pooled(x):
    return has_positions(x) and min(x.shape[2:]) > 1


def has_even_features(x):
    return x.shape[-1] % 2 == 0


def empty_before(x, dim):
    """Return the concatenation of an empty tensor and x."""
    return torch.cat([x.new_empty(0), x], dim)


def of_dims(function):
    """Return a function that makes a step of a function of a tensor and two random dimensions."""

    def make(x, random):
        return partial(function, a=random.randrange(x.dim()), b=random.randrange(x.dim()))

    return make


def fixed(function):
    """Return a function that makes a step that has no random arguments."""
    return lambda x, random: function


def expanded(x, a, b):
    return x.unsqueeze(a).expand(*x.shape[:a], 2, *x.shape[a:])


def half(x):
    return x.unflatten(-1, (2, x.shape[-1] // 2))


VIEWS = {  # {name: (weight, whether a step fits x, function of x and a random.Random that makes the step)}
    "empty tensor before": (2, always, of_dims(lambda x, a, b: empty_before(x, a))),
    "empty slice after": (2, always, of_dims(lambda x, a, b: torch.cat([x, x.narrow(a, 0, 0)], a))),
    "cat alone": (1, always, of_dims(lambda x, a, b: torch.cat([x], a))),
    "add zero": (1, always, fixed(lambda x: x + 0)),
    "times one": (1, always, fixed(lambda x: x * 1)),
    "over one": (1, always, fixed(lambda x: x / 1)),
    "to the same dtype": (1, always, fixed(lambda x: x.to(x.dtype))),
    "same view": (1, always, fixed(lambda x: x.reshape(x.shape))),
    "slice of all": (1, always, fixed(lambda x: x[:, 0:])),
    "there and back": (1, always, of_dims(lambda x, a, b: x.transpose(a, b).transpose(a, b))),
    "contiguous": (1, always, fixed(lambda x: x.contiguous())),
    "clone": (1, always, fixed(lambda x: x.clone())),
    "squeezed again": (1, always, of_dims(lambda x, a, b: x.unsqueeze(a).squeeze(a))),
    "transpose": (4, always, of_dims(lambda x, a, b: x.transpose(a, b))),
    "moved dimension": (3, always, of_dims(lambda x, a, b: x.movedim(a, b))),
    "copied transpose": (2, always, of_dims(lambda x, a, b: x.transpose(a, b).contiguous().transpose(a, b))),
    "flipped twice": (1, always, of_dims(lambda x, a, b: x.flip(a).flip(a))),
    "narrow": (1, lambda x: x.shape[-1] > 2, fixed(lambda x: x[..., 1:])),
    "every second": (1, lambda x: x.shape[-1] > 3, fixed(lambda x: x[..., ::2])),
    "expand": (1, lambda x: x.dim() < 4, of_dims(expanded)),
    "flatten": (1, lambda x: x.dim() > 2, fixed(lambda x: x.flatten(-2))),
    "unflatten": (1, lambda x: x.dim() < 4 and has_even_features(x), fixed(half)),
    "roll": (1, always, of_dims(lambda x, a, b: x.roll(b + 1, a))),
    "chunk and cat": (1, always, of_dims(lambda x, a, b: torch.cat(x.chunk(2, a), a))),
    "stack and take": (1, always, fixed(lambda x: torch.stack([x, x])[0])),
    "channels last": (2, is_image, fixed(lambda x: x.contiguous(memory_format=torch.channels_last))),
    "residual": (1, always, of_dims(lambda x, a, b: x + empty_before(x, a) * 0.5)),
}  # fmt: skip


KEPT = {"bits": EXACT_BITS}
ACTIVATIONS = "GELU SiLU Tanh Softplus Mish ELU Hardswish LeakyReLU Sigmoid".split()


def linear(x, random):
    return fewbit.nn.Linear(x.shape[-1], random.randint(2, 6), random.random() < 0.5, **KEPT)


def convolution(x, random):
    kind = fewbit.nn.Conv1d if is_sequence(x) else fewbit.nn.Conv2d
    size = random.choice([1, 1, 3])
    return kind(x.shape[1], random.randint(2, 4), size, padding=size // 2, **KEPT)


def layer_norm(x, random):
    dims = random.randint(1, min(2, x.dim() - 1))
    return fewbit.nn.LayerNorm(x.shape[-dims:], **KEPT)


def group_norm(x, random):
    return fewbit.nn.GroupNorm(random.choice([1, x.shape[1]]), x.shape[1], **KEPT)


def batch_norm(x, random):
    kind = fewbit.nn.BatchNorm2d if is_image(x) else fewbit.nn.BatchNorm1d
    return kind(x.shape[1], track_running_stats=random.random() < 0.5, **KEPT)


def instance_norm(x, random):
    kind = fewbit.nn.InstanceNorm1d if is_sequence(x) else fewbit.nn.InstanceNorm2d
    return kind(x.shape[1], affine=True, **KEPT)


def functional_activation(x, random):
    function, bits = random.choice([F.gelu, F.silu, F.tanh]), random.choice([1, 3])
    return lambda x: function(x, bits=bits)


def attention(x, random):
    is_causal = random.random() < 0.5
    a, b = random.sample(range(x.dim()), 2)

    def attend(x):
        key = empty_before(x.transpose(a, b).contiguous().transpose(a, b), -2)
        return F.scaled_dot_product_attention(x, key, x * 0.5, is_causal=is_causal, **KEPT)

    return attend


def gated(x, random):
    function = random.choice([F.swiglu, F.geglu, F.reglu])
    return lambda x: function(*x.chunk(2, -1), **KEPT)


def padded(x, random):
    mode = random.choice(["reflect", "replicate"])
    return lambda x: F.pad(x, (1, 1), mode)


def evaluated(x, random):
    layers = fewbit.nn.LayerNorm(x.shape[-1], **KEPT), fewbit.GELU(), fewbit.nn.Dropout(0.5)
    return random.choice(layers).eval()


def max_pool(x, random):
    return fewbit.nn.MaxPool1d(2) if is_sequence(x) else fewbit.nn.MaxPool2d(2, 1)


def average_pool(x, random):
    return fewbit.nn.AvgPool1d(2, 1) if is_sequence(x) else fewbit.nn.AvgPool2d(2)


LAYERS = {  # {name: (weight, whether a layer fits x, function of x and a random.Random that makes the layer)}
    "linear": (4, always, linear),
    "convolution": (3, has_positions, convolution),
    "layer norm": (2, always, layer_norm),
    "RMS norm": (1, always, lambda x, random: fewbit.nn.RMSNorm(x.shape[-1], **KEPT)),
    "group norm": (1, lambda x: x.dim() > 2, group_norm),
    "batch norm": (1, lambda x: x.dim() < 5 and x.numel() > x.shape[1], batch_norm),
    "instance norm": (1, lambda x: has_positions(x) and x[0, 0].numel() > 1, instance_norm),
    "activation": (4, always, lambda x, random: getattr(fewbit, random.choice(ACTIVATIONS))(bits=random.choice([2, 4]))),
    "functional activation": (1, always, functional_activation),
    "PReLU": (1, always, lambda x, random: fewbit.nn.PReLU(x.shape[1], **KEPT)),
    "softmax": (1, always, lambda x, random: fewbit.nn.Softmax(random.randrange(x.dim()), **KEPT)),
    "log-softmax": (1, always, lambda x, random: fewbit.nn.LogSoftmax(random.randrange(x.dim()), **KEPT)),
    "attention": (3, lambda x: x.dim() > 2, attention),
    "gated": (2, has_even_features, gated),
    "product": (1, always, of_dims(lambda x, a, b: F.mul(x * 1.5, empty_before(x.flip(a), a), **KEPT))),
    "product of matrices": (1, always, fixed(lambda x: F.matmul(x * 1.5, x.mT * 0.5, **KEPT))),
    "maximum pool": (1, can_be_pooled, max_pool),
    "average pool": (1, can_be_pooled, average_pool),
    "dropout without effect": (1, always, lambda x, random: fewbit.nn.Dropout(0.0)),
    "evaluated": (1, always, evaluated),
    "padded": (1, lambda x: is_sequence(x) and x.shape[2] > 1, padded),
}  # fmt: skip
