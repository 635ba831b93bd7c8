"""Entries "function", "op" and "codec": functions of fewbit.functional, torch ops and codecs on fixed inputs."""

from __future__ import annotations

from functools import partial

import torch

from recorded import api

SEED = 13
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
IMAGE, VOLUME, SIGNAL, ROWS = (3, 4, 9, 10), (2, 4, 4, 5, 6), (3, 4, 30), (6, 40)
HEADS = (2, 4, 7, 16)

ACTIVATIONS = {
    "celu": (0.6,),
    "elu": (1.7,),
    "gelu": ("tanh",),
    "gelu_10": (),
    "gelu_fast": (),
    "hardshrink": (0.3,),
    "hardsigmoid": (),
    "hardswish": (),
    "hardtanh": (-0.3, 2.0),
    "laplace": (),
    "leaky_relu": (0.2,),
    "logsigmoid": (),
    "mish": (),
    "quick_gelu": (),
    "relu": (),
    "relu6": (),
    "relu_squared": (),
    "rrelu": (0.2, 0.4, True),
    "selu": (),
    "sigmoid": (),
    "silu": (),
    "softplus": (2.5, 4.0),
    "softshrink": (1.25,),
    "softsign": (),
    "sqrtsoftplus": (),
    "tanh": (),
    "tanhshrink": (),
    "threshold": (0.1, 20.0),
}
"""Functions of one tensor and bits, with their other arguments."""

QUANTIZED = {
    "linear": ([ROWS, (7, 40), (7,)], {}),
    "bilinear": ([ROWS, (6, 30), (7, 40, 30), (7,)], {}),
    "conv1d": ([SIGNAL, (6, 4, 3), (6,)], {"padding": 1}),
    "conv2d": ([IMAGE, (6, 4, 3, 2)], {"stride": 2}),
    "conv3d": ([VOLUME, (6, 4, 2, 2, 2), (6,)], {}),
    "conv_transpose1d": ([SIGNAL, (4, 6, 3)], {"stride": 2}),
    "conv_transpose2d": ([IMAGE, (4, 6, 3, 3), (6,)], {"output_padding": 1, "stride": 2}),
    "conv_transpose3d": ([VOLUME, (4, 2, 2, 2, 2)], {}),
    "layer_norm": ([ROWS, (40,), (40,)], {"normalized_shape": (40,)}),
    "rms_norm": ([ROWS, (40,)], {"normalized_shape": (40,)}),
    "group_norm": ([IMAGE, (4,), (4,)], {"num_groups": 2}),
    "instance_norm": ([IMAGE], {}),
    "prelu": ([IMAGE, (4,)], {}),
    "softmax": ([IMAGE], {"dim": 1}),
    "log_softmax": ([IMAGE], {"dim": -1}),
    "matmul": ([(3, 6, 40), (3, 40, 7)], {}),
    "mul": ([IMAGE, (4, 1, 10)], {}),
    "swiglu": ([ROWS, ROWS], {}),
    "geglu": ([ROWS, ROWS], {}),
    "reglu": ([ROWS, ROWS], {}),
    "glu": ([ROWS], {}),
    "scaled_dot_product_attention": ([HEADS, HEADS, HEADS], {"is_causal": True}),
}
"""Functions of tensors of these shapes and bits, with their other arguments by name."""

NORMS = ("layer_norm", "rms_norm", "group_norm", "instance_norm")
EXACT = {
    "dropout": (ROWS, {"p": 0.3}),
    "dropout1d": (SIGNAL, {"p": 0.3}),
    "dropout2d": (IMAGE, {"p": 0.3}),
    "dropout3d": (VOLUME, {"p": 0.3}),
    "alpha_dropout": (ROWS, {"p": 0.3, "training": True}),
    "feature_alpha_dropout": (IMAGE, {"p": 0.3, "training": True}),
    "interpolate": (IMAGE, {"scale_factor": 2, "mode": "bilinear"}),
    "pad": (IMAGE, {"pad": (1, 2, 2, 1), "mode": "reflect"}),
    "identity": (ROWS, {}),
    "max_pool1d": (SIGNAL, {"kernel_size": 3}),
    "max_pool2d": (IMAGE, {"kernel_size": 3, "stride": 2, "return_indices": True}),
    "max_pool3d": (VOLUME, {"kernel_size": 2}),
    "avg_pool1d": (SIGNAL, {"kernel_size": 3}),
    "avg_pool2d": (IMAGE, {"kernel_size": 3, "divisor_override": 5}),
    "avg_pool3d": (VOLUME, {"kernel_size": 2}),
    "adaptive_max_pool1d": (SIGNAL, {"output_size": 7}),
    "adaptive_max_pool2d": (IMAGE, {"output_size": (3, 4)}),
    "adaptive_max_pool3d": (VOLUME, {"output_size": 2}),
    "adaptive_avg_pool1d": (SIGNAL, {"output_size": 7}),
    "adaptive_avg_pool2d": (IMAGE, {"output_size": (3, 4)}),
    "adaptive_avg_pool3d": (VOLUME, {"output_size": 2}),
}
"""Functions of one tensor whose gradients are exact."""


def entries():
    """Yield (key, function that returns the answers)."""
    yield "functions", lambda: {"names": " ".join(api.function_names())}
    for name, arguments in ACTIVATIONS.items():
        for bits in (1, 2, 3, 5):
            given = {"bits": bits}
            yield f"function/{name}/{bits} bits", partial(_run, name, [ROWS], given, arguments)
        yield f"function/{name}/own table", partial(_with_table, name, arguments)
        yield from _in_dtypes(name, [ROWS], {}, arguments)
        yield (
            f"function/{name}/channels last",
            partial(_run, name, [IMAGE], {}, arguments, last=True),
        )
    for name, (shapes, options) in QUANTIZED.items():
        more = [{"bits": 1}, {"bits": 3}, {"bits": 4, "group_size": 32}]
        more += [{"copies": 2}] if name in NORMS else []
        for own in more:
            told = ", ".join(f"{option}={value}" for option, value in own.items())
            yield f"function/{name}/{told}", partial(_run, name, shapes, options | own)
        yield from _in_dtypes(name, shapes, options)
        if len(shapes[0]) == 4:
            yield f"function/{name}/channels last", partial(_run, name, shapes, options, last=True)
    for name, (shape, options) in EXACT.items():
        yield from _in_dtypes(name, [shape], options)
        if len(shape) == 4:
            yield f"function/{name}/channels last", partial(_run, name, [shape], options, last=True)
    yield "function/batch_norm", _batch_norm
    yield "function/embedding", _embedding
    yield "function/pointwise", partial(_run, "pointwise", [ROWS], {"bits": 2}, (torch.atan,))
    yield "function/scaled_dot_product_attention/mask and dropout", _masked_attention
    yield "function/second derivative", _second_derivative
    for name, dtype in DTYPES.items():
        yield f"op/activations, {name}", partial(_ops, dtype)
        for bits in (1, 3, 8):
            yield f"op/quantize, {bits} bits, {name}", partial(_quantizer, dtype, bits)
    yield "op/integers", _integers
    for name in ("quant", "quant+zvc", "error-bounded", "jpeg"):
        for bound in (0.0, 1e-4, 1e-2, 1.0):
            yield f"codec/{name}/bound {bound}", partial(_coded, name, bound)
        yield f"codec/{name}/by channel", partial(_coded, name, torch.logspace(-4, 0, 4))
        yield f"codec/{name}/bfloat16", partial(_coded, name, 1e-2, torch.bfloat16)


def _in_dtypes(name, shapes, options, arguments=()):
    for dtype in DTYPES:
        given = name, shapes, options, arguments, DTYPES[dtype]
        yield f"function/{name}/{dtype}", partial(_run, *given)
    empty = [(0, *shapes[0][1:]), *shapes[1:]]
    if name in ("swiglu", "geglu", "reglu", "scaled_dot_product_attention", "bilinear", "matmul"):
        empty = [(0, *shape[1:]) if shape[0] == shapes[0][0] else shape for shape in shapes]
    yield f"function/{name}/batch of 0", partial(_run, name, empty, options, arguments)


def _run(name, shapes, options, arguments=(), dtype=torch.float32, last=False) -> dict:
    torch.manual_seed(SEED)
    inputs = [_normal(shape, dtype, last) for shape in shapes]

    def function(first, *others):
        if name in NORMS:
            vectors = dict(zip(("weight", "bias"), others, strict=False))
            return api.function(name)(first, **options, **vectors)
        return api.function(name)(first, *others, *arguments, **options)

    return _differentiated(function, inputs)


def _normal(shape, dtype, last=False):
    x = torch.randn(shape, dtype=torch.float64).mul(2).to(dtype)
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.requires_grad_()


def _differentiated(function, inputs) -> dict:
    """Return the value, the gradient of each input and the bytes that the forward keeps."""
    y = function(*inputs)
    parts = y if isinstance(y, tuple) else (y,)
    found = {f"value {i}": part for i, part in enumerate(parts)}
    y = parts[0]
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y.dtype).view(y.shape))
    for i, tensor in enumerate(inputs):
        found[f"gradient {i}"] = tensor.grad
    found["bytes"] = api.saved(function, *inputs)["total"]
    return found


def _with_table(name, arguments):
    """A table of another design in place of the default one."""
    table = {"gelu": "gelu_tanh"}.get(name, name)
    names = {"celu": ["alpha"], "elu": ["alpha"], "leaky_relu": ["negative_slope"]}.get(name)
    if arguments and names is None and name != "gelu":
        return {}
    parameters = dict(zip(names, arguments, strict=True)) if names else None
    given = api.loaded(table, 2, objective="unbiased", parameters=parameters)
    return _run(name, [ROWS], {"table": given}, arguments)


def _batch_norm():
    torch.manual_seed(SEED)
    inputs = [_normal(shape, torch.float32) for shape in (IMAGE, (4,), (4,))]
    mean, variance = torch.zeros(4), torch.ones(4)

    def function(x, weight, bias):
        return api.function("batch_norm")(x, mean, variance, weight, bias, True, bits=3)

    return _differentiated(function, inputs) | {"mean": mean, "variance": variance}


def _embedding():
    torch.manual_seed(SEED)
    tokens = torch.randint(50, (4, 9))
    return _differentiated(
        lambda weight: api.function("embedding")(tokens, weight, 3),
        [_normal((50, 8), torch.float32)],
    )


def _masked_attention():
    torch.manual_seed(SEED)
    inputs = [_normal(HEADS, torch.float32) for _ in range(3)]
    mask = torch.rand(7, 7) > 0.3

    def function(q, k, v):
        attend = api.function("scaled_dot_product_attention")
        return attend(q, k, v, mask, 0.1, bits=4)

    return _differentiated(function, inputs) | {"next draw": torch.rand(1)}


def _second_derivative():
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    (gradient,) = torch.autograd.grad(api.function("gelu")(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    return {"second": second}


# -- ops ---------------------------------------------------------------------------------------------------


def _ops(dtype):
    torch.manual_seed(SEED)
    x = _normal((5, 31), dtype).detach()
    gradient = _normal((5, 31), dtype).detach()
    found = {}
    drawn = {"objective": "unbiased"}
    for name, options, seed in (("gelu", {}, None), ("silu", drawn, torch.tensor([3]))):
        text = api.encoding_of(api.loaded(name, 3, **options))
        packed = api.op("encode")(x, text, [31, 1], seed)
        kept, one = api.op("encode kept")(x.t(), text, [1, 31], seed)
        product = api.op("decode and multiply")(gradient, packed, text, [31, 1])
        found |= {f"{name} packed": packed, f"{name} kept": kept, f"{name} one": one}
        found[f"{name} product"] = product
    return found


def _quantizer(dtype, bits):
    torch.manual_seed(SEED)
    x = _normal((5, 7, 43), dtype).detach()
    found = {}
    for group_size in (32, 256):
        for is_float32 in (False, True):
            settings = torch.tensor([5]), bits, group_size, is_float32
            packed, ranges, _ = api.op("quantize")(x, [301, 43, 1], *settings)
            layout = [5, 7, 43], [301, 43, 1], dtype
            values = api.op("dequantize")(packed, ranges, bits, group_size, *layout)
            name = f"groups of {group_size}, {'float32' if is_float32 else 'bfloat16'}"
            found |= {f"{name} packed": packed, f"{name} ranges": ranges, f"{name} values": values}
    return found


def _integers():
    codes = torch.arange(70, dtype=torch.uint8) % 8
    packed = api.op("pack")(codes, 3)
    kept, one = api.op("pack kept")(codes.long().view(7, 10), 3, 8, [10, 1])
    narrow, _ = api.op("narrow kept")(codes.long(), torch.int16)
    unpacked = api.op("unpack")(packed, 3, 70)
    return {"packed": packed, "kept": kept, "one": one, "narrow": narrow, "unpacked": unpacked}


def _coded(name, bound, dtype=torch.float32):
    torch.manual_seed(SEED)
    x = torch.randn(4, 4, 16, 16).cumsum(-1).relu().to(dtype)
    size, values = api.coded(name, x, bound, 5)
    return {"bytes": size, "values": values}
