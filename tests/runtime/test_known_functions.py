"""Compression of what autograd Functions of flash-linear-attention, mamba_ssm and causal_conv1d save.

The libraries need a GPU, so stand-ins have their names, arguments and saved tensors. A stand-in computes a step after the other,
and its backward pass differentiates these steps at the saved tensors.

One Function of flash-linear-attention also runs as it is, in Triton's interpreter, if the packages flash-linear-attention and triton
are installed. The interpreter cannot run the library's other kernels: they call methods of the counters of loops, which are Python's
integers there (triton 3.8, flash-linear-attention 0.6). mamba_ssm and causal_conv1d are written in CUDA.
"""

import copy
from importlib.util import find_spec

import pytest
import torch
from composed import Composed
from expectation import drawn, signed_z
from fresh_process import run
from layers import relative
from samples import normal
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import fewbit

B, T, H, K = 2, 24, 2, 16


def linear_attention(q, k, v, g):
    """Return the result of linear attention with a decay exp(g) for each step and head; q, k, v (B, T, H, K)."""
    state, results = 0, []
    for step in range(T):
        product = k[:, step, :, :, None] * v[:, step, :, None]
        state = state * g[:, step, :, None, None].exp() + product
        results.append((q[:, step, :, :, None] * state).sum(-2))
    return torch.stack(results, 1)


def delta_rule(q, k, v, g, beta):
    """Return the result of the gated delta rule, which replaces what the state has stored under a key."""
    state, results = 0, []
    for step in range(T):
        key, old = k[:, step, :, :, None], state * g[:, step, :, None, None].exp()
        known = (key * old).sum(-2) if step else 0
        new = beta[:, step, :, None] * (v[:, step] - known)
        state = old + key * new[..., None, :]
        results.append((q[:, step, :, :, None] * state).sum(-2))
    return torch.stack(results, 1)


def selective_scan(u, delta, a, b, c):
    """Return the result of Mamba's scan; u and delta (B, D, T), a (D, N), b and c (B, N, T)."""
    state, results = 0, []
    for step in range(T):
        d = delta[:, :, step, None]
        state = state * (d * a).exp() + d * b[:, None, :, step] * u[:, :, step, None]
        results.append((state * c[:, None, :, step]).sum(-1))
    return torch.stack(results, -1)


def convolution(x, weight, activation):
    y = F.conv1d(x, weight[:, None], padding=weight.shape[1] - 1, groups=len(weight))[..., :T]
    return F.silu(y) if activation else y


def stand_in(name, compute, places, count, **attributes):
    """Return an autograd Function.

    Args:
        name: its name, with the module.
        compute: the function that it computes.
        places: the position of each argument among the saved tensors.
        count: the number of saved tensors. The others are None, as optional arguments that are not given.
        attributes: what it writes into `ctx`.
    """

    def forward(ctx, *inputs):
        saved = [None] * count
        for place, x in zip(places, inputs, strict=True):
            saved[place] = x
        ctx.save_for_backward(*saved)
        vars(ctx).update(attributes)
        return compute(*inputs)

    def backward(ctx, grad):
        saved = ctx.saved_tensors
        leaves = [saved[place].detach().requires_grad_() for place in places]
        with torch.enable_grad():
            return torch.autograd.grad(compute(*leaves), leaves, grad)

    module, _, short = name.rpartition(".")
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(short, (Function,), {**methods, "__module__": module, "__qualname__": short})


SIZE = (B, T, H, K)
KEYS = (lambda x: F.normalize(x, dim=-1), SIZE)
VALUES, GATES, RATES = (torch.clone, SIZE), (F.logsigmoid, (B, T, H)), (torch.sigmoid, (B, T, H))
DIM, STATES = 48, 24
SCAN = [
    (torch.clone, (B, DIM, T)), (F.softplus, (B, DIM, T)), (lambda x: -x.abs(), (DIM, STATES)), (torch.clone, (B, STATES, T)),
    (torch.clone, (B, STATES, T)),
]  # fmt: skip
FLA, MAMBA = "fla.ops", "mamba_ssm.ops"
ATTENTION = [KEYS, KEYS, VALUES, GATES]
DELTA = [KEYS, KEYS, VALUES, GATES, RATES]
KNOWN = {
    f"{FLA}.simple_gla.chunk.ChunkSimpleGLAFunction": (linear_attention, ATTENTION, (0, 1, 2, 3), 7, (0, 1, 2)),
    f"{FLA}.gla.chunk.ChunkGLAFunction": (linear_attention, ATTENTION, (0, 1, 2, 3), 8, (0, 1, 2)),
    f"{FLA}.common.fused_chunk.FusedChunkFunction": (linear_attention, ATTENTION, (0, 1, 2, 3), 6, (0, 1, 2)),
    f"{FLA}.common.fused_recurrent.FusedRecurrentFunction": (linear_attention, ATTENTION, (0, 1, 2, 3), 9, (0, 1, 2)),
    f"{FLA}.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction": (delta_rule, DELTA, (0, 2, 4, 5, 7), 15, (0, 2)),
    f"{FLA}.delta_rule.chunk.ChunkDeltaRuleFunction": (
        lambda q, k, v, beta: delta_rule(q, k, v, torch.zeros(B, T, H), beta), [KEYS, KEYS, VALUES, RATES], (0, 2, 4, 5), 10, (0, 2),
    ),
    f"{FLA}.kda.chunk.ChunkKDAFunction": (delta_rule, DELTA, (0, 2, 4, 5, 8), 23, (0, 2)),
    f"{MAMBA}.selective_scan_interface.SelectiveScanFn": (selective_scan, SCAN, (0, 1, 2, 3, 4), 9, (0, 3, 4)),
    f"{MAMBA}.triton.ssd_combined.MambaChunkScanCombinedFn": (selective_scan, SCAN, (1, 2, 4, 5, 6), 12, (0, 3, 4)),
    "causal_conv1d.causal_conv1d_interface.CausalConv1dFn": (
        lambda x, weight: convolution(x, weight, False), [(torch.clone, (B, DIM, T)), (torch.clone, (DIM, 4))], (0, 1), 5, (0,),
    ),
}  # fmt: skip
"""{name: (what it computes, its inputs, their places among the saved tensors, the number of these, the inputs that are quantized)}.

An input is a function of a parameter, and its shape."""


INNER = f"{MAMBA}.selective_scan_interface.MambaInnerFn"
RANK, WIDTH = 6, 32
INNER_INPUTS = [  # the input, the weights of the convolution, of B and C, of step sizes and of the last layer, and the rates
    (torch.clone, (B, 2 * DIM, T)), (torch.clone, (DIM, 4)), (lambda x: 0.2 * x, (RANK + 2 * STATES, DIM)),
    (lambda x: 0.2 * x, (DIM, RANK)), (torch.clone, (WIDTH, DIM)), (lambda x: -x.abs(), (DIM, STATES)),
]  # fmt: skip


def mamba_inner(count):
    """Return a stand-in for a version of MambaInnerFn, which computes the convolution and step sizes again in the backward pass."""
    norms, rest = {16: (0, 0), 18: (0, 2), 19: (3, 0)}.get(count, (0, count - 16))

    def forward(ctx, xz, w, in_weight, delta_weight, out_weight, a):
        x, z = xz.chunk(2, 1)
        u = convolution(x, w, True)
        low = in_weight @ u
        delta = F.softplus(delta_weight @ low[:, :RANK])
        b, c = (each.contiguous() for each in low[:, RANK:].chunk(2, 1))
        y = selective_scan(u, delta, a, b, c)
        weights = in_weight, delta_weight, out_weight
        ctx.save_for_backward(
            xz,
            w,
            None,
            low,
            *weights,
            None,
            None,
            a,
            b,
            c,
            *[None] * (3 + norms),
            y,
            *[None] * rest,
        )
        return (out_weight @ (y * F.silu(z))).transpose(1, 2)

    def backward(ctx, grad):
        xz, w, _, low, in_weight, delta_weight, out_weight, _, _, a, b, c = ctx.saved_tensors[:12]
        y, (x, z) = ctx.saved_tensors[15 + norms], xz.chunk(2, 1)
        grad = grad.transpose(1, 2)
        of_result = out_weight.t() @ grad
        leaves = [each.detach().requires_grad_() for each in (x, w, z, low, delta_weight, a, b, c)]
        with torch.enable_grad():
            x, w, z, low, delta_weight, a, b, c = leaves
            u = convolution(x, w, True)
            again = u.detach().requires_grad_()
            delta = F.softplus(delta_weight @ low[:, :RANK])
            scanned, gated = selective_scan(again, delta, a, b, c), y * F.silu(z)
        (of_z,) = torch.autograd.grad(gated, z, of_result)
        wanted = [again, low, delta_weight, a, b, c]
        of_scan = of_result * F.silu(z).detach()
        of_u, of_low, of_delta, of_a, *of_matrices = torch.autograd.grad(scanned, wanted, of_scan)
        rows = torch.cat([of_low[:, :RANK], *of_matrices], 1)
        of_x, of_w = torch.autograd.grad(u, [x, w], of_u + in_weight.t() @ rows)
        of_in = torch.einsum("nrt,ndt->rd", rows, again.detach())
        of_out = torch.einsum("net,ndt->ed", grad, gated.detach())
        return torch.cat([of_x, of_z], 1), of_w, of_in, of_delta, of_out, of_a

    module, _, short = INNER.rpartition(".")
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(short, (Function,), {**methods, "__module__": module, "__qualname__": short})


class Inner:
    """Mamba's layer without an autograd Function of its own."""

    @staticmethod
    def apply(xz, w, in_weight, delta_weight, out_weight, a):
        """Return the result of the layer, with torch's own gradients."""
        x, z = xz.chunk(2, 1)
        u = convolution(x, w, True)
        low = in_weight @ u
        delta, (b, c) = F.softplus(delta_weight @ low[:, :RANK]), low[:, RANK:].chunk(2, 1)
        return (out_weight @ (selective_scan(u, delta, a, b, c) * F.silu(z))).transpose(1, 2)


def of_function(function, inputs):
    """Return a network that applies an autograd Function to functions of its parameters."""

    def forward(own, x):
        made = [
            make(x * parameter)
            for (make, _), parameter in zip(inputs, own.parameters(), strict=True)
        ]
        return function.apply(*made)

    parameters = {
        f"p{number}": nn.Parameter(normal(shape, seed=number, scale=1.0))
        for number, (_, shape) in enumerate(inputs)
    }
    return Composed(forward, **parameters)


def model(name, count=None, activation=False):
    compute, inputs, places, usual, linear = KNOWN[name]
    if activation:
        compute = lambda x, weight: convolution(x, weight, True)  # noqa: E731
    function = stand_in(name, compute, places, count or usual, activation=activation)
    return of_function(function, inputs), linear


def gradients(net):
    y = net(torch.ones(()))
    weights = normal(tuple(y.shape), seed=99, scale=1.0)
    return torch.autograd.grad((y * weights).sum(), [*net.parameters()])


def compressed(net, bits):
    net = copy.deepcopy(net)
    layers = {"everything": True, "functional": False}
    fewbit.compress_(net, bits, layers=layers, verbose=False)
    return net


def packed(net):
    """Return the bytes of codes that the Function saves."""
    return sum(
        entry.bytes
        for entry in fewbit.saved_bytes(net, torch.ones(())).entries
        if entry.kind == "packed"
    )


def codes(name, bits=8):
    """Return the bytes of the codes of all inputs that are quantized."""
    _, inputs, _, _, linear = KNOWN[name]
    return sum(torch.Size(inputs[place][1]).numel() * bits // 8 for place in linear)


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_known_function_saves(name):
    net, _ = model(name)
    few = compressed(net, 8)
    found, exact = gradients(few), gradients(net)
    for ours, theirs in zip(found, exact, strict=True):
        assert relative(ours, theirs) < 0.03
    assert any(not torch.equal(*pair) for pair in zip(found, exact, strict=True))
    other, _ = model(name, KNOWN[name][3] + 30)  # a version that is not known
    assert packed(few) - packed(compressed(other, 8)) >= codes(name)
    assert packed(compressed(other, 8)) < packed(few)


def test_the_input_of_a_convolution_with_an_activation_stays_exact():
    net, _ = model("causal_conv1d.causal_conv1d_interface.CausalConv1dFn", activation=True)
    assert all(map(torch.equal, gradients(compressed(net, 2)), gradients(net)))


def test_positions_that_the_user_names_come_first():
    name = f"{FLA}.simple_gla.chunk.ChunkSimpleGLAFunction"
    net, _ = model(name)
    function = stand_in(name, linear_attention, (0, 1, 2, 3), 7)  # the user's import
    few = copy.deepcopy(net)
    layers = {"everything": True, "functional": False, "autograd_functions": {function: [2]}}
    fewbit.compress_(few, 8, layers=layers, verbose=False)
    assert packed(compressed(net, 8)) - packed(few) >= 2 * codes(name) // 3


@pytest.mark.parametrize(("count", "sizes"), [(16, 3), (18, 3), (19, 1), (17, 0)])
def test_what_mambas_layer_saves(count, sizes):
    """With norms of B and C, only the scan's result is quantized; in a version that is not known, nothing."""
    net = of_function(mamba_inner(count), INNER_INPUTS)
    exact = of_function(Inner, INNER_INPUTS)
    for ours, theirs in zip(gradients(net), gradients(exact), strict=True):
        assert relative(ours, theirs) < 1e-5
    few = compressed(net, 8)
    found = gradients(few)
    for ours, theirs in zip(found, gradients(net), strict=True):
        assert relative(ours, theirs) < 0.03
    numbers = B * T * (DIM * (sizes > 0) + 2 * STATES * (sizes > 1))
    others = packed(compressed(of_function(mamba_inner(30), INNER_INPUTS), 8))
    assert packed(few) - others >= numbers
    assert (packed(few) == others) == (sizes == 0)


FLASH = """
import os
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
import triton
from triton.backends.compiler import GPUTarget


class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cpu", 0, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_benchmarker = staticmethod(lambda: lambda call, quantiles, **_: [1.0] * len(quantiles))


triton.runtime.driver.set_active(Driver())  # there is none for the CPU, and autotuners ask for one
import torch
from fla.ops.simple_gla import fused_recurrent_simple_gla
import fewbit

torch.manual_seed(0)
inputs = [torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3)]
gates = torch.randn(1, 40, 2, requires_grad=True)


class Net(torch.nn.Module):
    def forward(self, q, k, v, gates):
        y, _ = fused_recurrent_simple_gla(q * 1, k * 1, v * 1, torch.nn.functional.logsigmoid(gates))
        return y.square().sum()


def gradients(net):
    return torch.autograd.grad(net(*inputs, gates), [*inputs, gates])


net = Net()
exact, usual = gradients(net), fewbit.saved_bytes(net, *inputs, gates)
fewbit.compress_(net, 8, layers={"everything": True, "functional": False}, verbose=False)
few, less = gradients(net), fewbit.saved_bytes(net, *inputs, gates)
assert all(0 < (a - b).norm() / b.norm() < 0.03 for a, b in zip(few, exact)), (few, exact)
packed = sum(entry.bytes for entry in less.entries if entry.kind == "packed")
assert packed >= 3 * 40 * 2 * 16, less
print("fine")
"""


@pytest.mark.processes
def test_flash_linear_attention_in_tritons_interpreter():
    if not (find_spec("fla") and find_spec("triton")):
        pytest.skip("flash-linear-attention and triton are not installed")
    assert run(FLASH).split()[-1] == "fine"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KNOWN, INNER])
def test_the_mean_of_gradients_is_exact(name):
    """Copies are uniform here, because those of rotated copies have a small bias of their own."""
    net = of_function(mamba_inner(18), INNER_INPUTS) if name == INNER else model(name)[0]
    exact = gradients(net)
    few = copy.deepcopy(net)
    layers = {"everything": True, "functional": False, "quantizer": "uniform"}
    fewbit.compress_(few, 3, layers=layers, verbose=False)
    torch.manual_seed(0)
    for found, true in zip(drawn(lambda: gradients(few), 150), exact, strict=True):
        assert max(map(abs, signed_z(found, true, 1e-6))) < 4.5
