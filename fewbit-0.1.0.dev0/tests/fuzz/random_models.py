"""Random models: layers, functions and views of every kind in a row, the same for the same seed."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F

WIDTHS = (6, 8, 12)


class Model(nn.Module):
    """Steps that are run one after another on the first input; the others join on the way.

    seed: makes the whole model and, by `inputs`, what it is called with. Two of one seed are equal. is_exact: for the
    one that ours is compared with, which steers clear of defects of torch's batch and group norm.
    """

    def __init__(self, seed: int, is_exact: bool = False):
        super().__init__()
        self.seed, self.is_exact = seed, is_exact
        torch.manual_seed(seed)  # parts are made with
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.parts = nn.ModuleList()
        self.vectors = nn.ParameterList()
        self.names = []
        self.steps = []
        width = self.rng.choice(WIDTHS)
        kinds = {
            "vector": (width,),
            "tokens": (self.rng.choice((3, 5)), width),
            "sequence": (width, self.rng.choice((4, 7))),
            "image": (width, 4, self.rng.choice((4, 5))),
        }
        self.kind = self.rng.choice(list(kinds))
        self.shape = self.first = kinds[self.kind]
        for _ in range(self.rng.randint(2, 6)):
            self._add(self.rng.choice(ANYWHERE if self.rng.random() < 0.4 else BY_KIND[self.kind]))
        if not any(parameter.requires_grad for parameter in self.parameters()):
            self._add(scaled)
        self._settle()

    def _add(self, make) -> None:
        self.steps.append(make(self))
        self.names.append(make.__name__)

    def _settle(self) -> None:
        """Move parameters away from their defaults, freeze some, set some parts to eval mode, and choose a dtype."""
        rng = self.rng
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(self.normal(parameter.shape, 0.2))
            for part in self.parts:
                for name, buffer in part.named_buffers():
                    if name.endswith("running_var"):
                        buffer.copy_(1.0 + self.normal(buffer.shape, 0.2).abs())
        trained = list(self.parameters())
        for parameter in trained[1:]:
            parameter.requires_grad_(rng.random() < 0.85)
        for part in self.parts:
            part.train(rng.random() < 0.8 or isinstance(part, nn.GroupNorm))
        self.dtype = rng.choices((torch.float32, torch.float64, torch.bfloat16), (8, 2, 1))[0]
        self.to(self.dtype)

    # -- what steps are made with ---------------------------------------------------------------------

    def normal(self, shape, scale=1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def part(self, module: nn.Module) -> nn.Module:
        """Register the module as a part and return it; sometimes return an equal part that exists instead."""
        like = [part for part in self.parts if repr(part) == repr(module)]
        if like and self.rng.random() < 0.5:
            return like[0]
        self.parts.append(module)
        return module

    def vector(self, size: int, mean: float = 0.0):
        """Return a function that returns a vector of parameters: whole, a column of two, every third, or one expanded."""
        layout = self.rng.choice(("whole", "column", "stepped", "expanded"))
        shape = {"whole": (size,), "column": (size, 2), "stepped": (3 * size,), "expanded": (1,)}
        parameter = nn.Parameter(self.normal(shape[layout], 0.2) + mean)
        self.vectors.append(parameter)
        views = {
            "whole": lambda: parameter,
            "column": lambda: parameter[:, 1],
            "stepped": lambda: parameter[::3],
            "expanded": lambda: parameter.expand(size),
        }
        return views[layout]

    def matrix(self, rows: int, columns: int):
        """Return a function that returns a matrix of parameters, as it is or transposed."""
        is_transposed = self.rng.random() < 0.5
        shape = (columns, rows) if is_transposed else (rows, columns)
        parameter = nn.Parameter(self.normal(shape, 0.4))
        self.vectors.append(parameter)
        return parameter.t if is_transposed else lambda: parameter

    @property
    def channels(self) -> int:
        return self.shape[0] if self.kind in ("sequence", "image") else self.shape[-1]

    def as_torch_can(self, vector):
        """Return the vector, contiguous if the model is exact, because torch's 2-D batch norm is wrong with other vectors."""
        return vector.contiguous() if self.is_exact and vector is not None else vector

    # -- running ------------------------------------------------------------------------------------

    def inputs(self) -> list[torch.Tensor]:
        """Return new leaves or constants for a call, in a random layout and sometimes with an empty batch."""
        rng, generator = (
            random.Random(~self.seed),
            torch.Generator().manual_seed(~self.seed % 2**40),
        )
        count = 0 if rng.random() < 0.03 else rng.choice((5, 7, 8))
        made = []
        for number in range(2):
            x = torch.randn((count, *self.first), generator=generator).to(self.dtype)
            x = rng.choice(INPUTS)(x)
            made.append(x.requires_grad_(rng.random() < (0.5, 0.3)[number]))
        return made

    def forward(self, x, other):
        self.before = [other]
        for step in self.steps:
            kept = x
            x = step(x)
            if x.shape == kept.shape:
                self.before.append(kept)
        del self.before
        return x


INPUTS = (
    lambda x: x,
    lambda x: x,
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    lambda x: x.repeat_interleave(2, 0)[::2],
    lambda x: x[:1].expand(x.shape) if len(x) else x,
)

# -- pointwise functions, as modules, functions and methods ------------------------------------------------
# Softsign is not among them: beyond its table's domain its derivative is not constant.

MODULES = (
    nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.SELU, nn.Mish,
    nn.Hardswish, nn.Tanhshrink, nn.LogSigmoid, nn.CELU,
)  # fmt: skip
FUNCTIONS = (
    F.relu, F.leaky_relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.elu, F.selu, F.mish,
    F.hardswish, F.tanhshrink, F.logsigmoid, F.celu, torch.Tensor.relu, torch.Tensor.sigmoid,
    torch.Tensor.tanh,
)  # fmt: skip


def activation(m):
    return m.part(m.rng.choice(MODULES)())


def function(m):
    return m.rng.choice(FUNCTIONS)


def in_place(m):
    scale = m.vector(1, 1.0)
    act = m.part(m.rng.choice((nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.ELU))(inplace=True))
    return lambda x: act(x + 0.1 * scale())


def prelu(m):
    if m.rng.random() < 0.5 or m.kind == "tokens":
        return m.part(nn.PReLU())
    weight = m.vector(m.channels, 0.2)
    return lambda x: F.prelu(x, weight())


# -- views and joints -------------------------------------------------------------------------------------


def there_and_back(m):
    """Run another step on a view, and undo the view."""
    act = m.rng.choice((*FUNCTIONS[:4], torch.Tensor.contiguous))
    a, b = m.rng.choice(((0, -1), (1, -1), (0, 1)))
    return lambda x: act(x.transpose(a, b)).transpose(a, b)


def nothing_appended(m):
    dim = m.rng.choice((0, -1))
    return lambda x: torch.cat([x.narrow(dim, 0, 0), x, x.new_empty(0)], dim)


def halves(m):
    act = m.rng.choice(FUNCTIONS)

    def step(x):
        first, *others = x.chunk(2, -1)
        return torch.cat([act(first), *others], -1)

    return step


def residual(m):
    act = m.rng.choice(FUNCTIONS)
    return lambda x: x + 0.5 * act(x)


def joined(m):
    """Return the sum with an earlier value, or with another input."""
    which = m.rng.random()

    def step(x):
        like = [part for part in m.before if part.shape == x.shape]
        return x + like[int(which * len(like))] if like else x

    return step


def product(m):
    """Make the product of two values that layers made."""
    layer = scaled(m)
    return lambda x: torch.tanh(x) * layer(x)


def scaled(m):
    weight, bias = m.vector(m.shape[-1], 1.0), m.vector(m.shape[-1])
    return lambda x: x * weight() + bias()


def laid_out(m):
    return m.rng.choice(
        (
            lambda x: x.contiguous(),
            lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
            lambda x: x.flatten(1).view(x.shape),
            lambda x: x.unsqueeze(0).squeeze(0),
            lambda x: x.clone(memory_format=torch.contiguous_format),
            lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
        )
    )


def no_dropout(m):
    return m.part(nn.Dropout(0.0))


# -- layers -----------------------------------------------------------------------------------------------


def with_width(m, out):
    shape = (*m.shape[:-1], out)
    m.shape = shape


def linear(m):
    wide, out = m.shape[-1], m.rng.choice(WIDTHS)
    with_width(m, out)
    if m.rng.random() < 0.5:
        return m.part(nn.Linear(wide, out, bias=m.rng.random() < 0.7))
    weight = m.matrix(out, wide)
    bias = m.vector(out) if m.rng.random() < 0.7 else lambda: None
    return lambda x: F.linear(x, weight(), bias())


def product_of_matrices(m):
    wide, out = m.shape[-1], m.rng.choice(WIDTHS)
    with_width(m, out)
    weight = m.matrix(wide, out)
    return lambda x: torch.matmul(x, 1.0 * weight())


def some_vectors(m, size):
    """Return weight and bias, either of which may be missing."""
    both = [m.vector(size, 1.0), m.vector(size)]
    missing = m.rng.choice((None, None, None, 0, 1))
    if missing is not None:
        both[missing] = lambda: None
    return both


def layer_norm(m):
    size = m.shape[-1]
    if m.rng.random() < 0.5:
        return m.part(nn.LayerNorm(size))
    weight, bias = some_vectors(m, size)
    return lambda x: F.layer_norm(x, (size,), weight(), bias())


def rms_norm(m):
    size = m.shape[-1]
    if m.rng.random() < 0.5:
        return m.part(nn.RMSNorm(size, eps=1e-5))
    weight = m.vector(size, 1.0)
    return lambda x: F.rms_norm(x, (size,), weight(), 1e-5)


def batch_norm(m):
    channels = m.channels
    if m.rng.random() < 0.5:
        dims = {"vector": 1, "sequence": 1, "image": 2}[m.kind]
        return m.part(getattr(nn, f"BatchNorm{dims}d")(channels, affine=m.rng.random() < 0.8))
    weight, bias = some_vectors(m, channels)
    return lambda x: F.batch_norm(
        x, None, None, m.as_torch_can(weight()), m.as_torch_can(bias()), True
    )


def group_norm(m):
    channels = m.channels
    groups = 2 if channels < 12 else 3
    if m.rng.random() < 0.4:
        layer = m.part(nn.GroupNorm(groups, channels))
        if m.is_exact:
            return lambda x: written_out_group_norm(x, groups, layer.weight, layer.bias)
        return layer
    weight, bias = some_vectors(m, channels)
    norm = written_out_group_norm if m.is_exact else F.group_norm
    return lambda x: norm(x, groups, weight(), bias())


def written_out_group_norm(x, groups, weight, bias):
    """Compute group norm. torch's reads past its storage, needs a weight, and fails without the input's gradient."""
    grouped = x.reshape(len(x), groups, x.shape[1:].numel() // groups)
    variance, mean = torch.var_mean(
        grouped.to(torch.promote_types(x.dtype, torch.float32)), -1, False, keepdim=True
    )
    y = ((grouped - mean) * torch.rsqrt(variance + 1e-5)).view(x.shape)
    channels = 1, -1, *[1] * (x.dim() - 2)
    y = y if weight is None else y * weight.reshape(channels)
    y = y if bias is None else y + bias.reshape(channels)
    return y.to(x.dtype).contiguous(memory_format=suggest_memory_format(x))


def instance_norm(m):
    if m.rng.random() < 0.5:
        dims = {"sequence": 1, "image": 2}[m.kind]
        return m.part(getattr(nn, f"InstanceNorm{dims}d")(m.channels, affine=m.rng.random() < 0.7))
    weight, bias = some_vectors(m, m.channels)
    return lambda x: F.instance_norm(x, None, None, weight(), bias())


def softmax(m):
    dim = m.rng.choice((-1, 1))
    use = m.rng.choice((F.softmax, F.log_softmax))
    return lambda x: 3.0 * use(x, dim=dim)


def convolution(m):
    dims = len(m.shape) - 1
    out = m.rng.choice(WIDTHS)
    kind = m.rng.choice(("Conv", "Conv", "ConvTranspose"))
    layer = getattr(nn, f"{kind}{dims}d")(
        m.channels, out, 3, padding=1, groups=m.rng.choice((1, 1, 2)), bias=m.rng.random() < 0.7
    )
    m.shape = (out, *m.shape[1:])
    return m.part(layer)


def pooling(m):
    dims = len(m.shape) - 1
    name = m.rng.choice(("MaxPool", "AvgPool"))
    return m.part(getattr(nn, f"{name}{dims}d")(3, stride=1, padding=1))


def padded(m):
    m.shape = (*m.shape[:-1], m.shape[-1] + 1)
    mode = m.rng.choice(("constant", "reflect", "replicate"))
    full = (1, 0, 0, 0) if len(m.shape) == 3 else (1, 0)
    return lambda x: F.pad(x, full, mode)


def channels_last(m):
    return lambda x: x.contiguous(memory_format=torch.channels_last)


def attention(m):
    size = m.shape[-1]
    if m.rng.random() < 0.5:
        layer = m.part(nn.MultiheadAttention(size, 2, batch_first=True))
        need_weights = m.rng.random() < 0.5
        return lambda x: layer(x, x, x, need_weights=need_weights)[0]
    q, k = m.matrix(size, size), m.matrix(size, size)

    def step(x):
        key = torch.cat([x.new_empty(0), F.linear(x, k())], -2)  # as caches of keys do
        return F.scaled_dot_product_attention(F.linear(x, q()), key, x)

    return step


def encoder(m):
    size = m.shape[-1]
    return m.part(
        nn.TransformerEncoderLayer(size, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
    )


ANYWHERE = (
    activation, function, in_place, prelu, there_and_back, nothing_appended, halves, residual, joined,
    product, scaled, laid_out, no_dropout, linear, softmax, layer_norm,
)  # fmt: skip
BY_KIND = {
    "vector": (linear, linear, layer_norm, rms_norm, batch_norm, group_norm, product_of_matrices),
    "tokens": (linear, linear, layer_norm, rms_norm, attention, encoder, product_of_matrices),
    "sequence": (convolution, convolution, batch_norm, group_norm, instance_norm, pooling, padded),
    "image": (
        convolution, convolution, batch_norm, group_norm, instance_norm, pooling, padded, channels_last,
    ),
}  # fmt: skip
