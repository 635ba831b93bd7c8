"""The torch ops of the namespace `fewbit`: schema, implementation, fake, autograd and vmap of each.

`torch.compile`, `torch.export` and `torch.func` go through them; eager mode calls the same
implementations without the dispatcher. An encoding travels as text (`Encoding.text`), so that an
exported program needs nothing but these ops.

    encode(x, encoding, stride, seed) -> packed codes
    encode_kept(x, encoding, stride, seed) -> packed codes, and a 1 to multiply f(x) with
    decode_mul(grad, packed, encoding, stride) -> lut[code] * grad, with those strides
    pack(codes, bits) -> packed, unpack(packed, bits, n) -> codes

Every op that packs or unpacks in storage order takes the strides as an argument, and restrides its input to them,
because in a compiled graph a tensor's strides can differ from those at tracing time. The strides of a result never
depend on the strides of an input.

f itself is not among them: a compiler fuses torch's own function with its neighbors, and may recompute
it, which it could not do to an op that yields f(x) and codes at once (docs/decisions/0004).
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.fx.traceback
from torch.library import Library, register_autograd, register_fake, register_vmap
from torch.utils.checkpoint import CheckpointPolicy

from fewbit.errors import GradientError
from fewbit.runtime import backends
from fewbit.runtime.format import layout
from fewbit.runtime.format.buffers import FLOATING as FLOATING
from fewbit.runtime.format.encoding import Encoding, packed_words
from fewbit.runtime.interop.tensor_kinds import check_not_distributed
from fewbit.runtime.ops.torch_functions import CONTIGUOUS, FORWARD, IN_PLACE, OTHER_STRIDES

library = Library("fewbit", "DEF")
# With needs_exact_strides a compiler mostly passes inputs with the strides at tracing time, which saves a copy in the
# ops. The tag is no guarantee: Inductor preserves the strides that are left after it has removed no-ops.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define(schema, implementation):
    name = schema.partition("(")[0]
    library.define(schema, tags=_TAGS)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    return getattr(torch.ops.fewbit, name).default


# -- implementations, shared with eager ----------------------------------------------------------------------


def activation(x, function, parameters, encoding, seed, inplace):
    """Return f(x) and the packed codes of x. x may have any strides; f(x) has the strides of torch's result.

    With `inplace`, f(x) is written to x, which must not overlap itself.
    """
    backend, packed = backends.of(x), None
    source = x if x.is_contiguous() else layout.dense(x)
    stride = x.stride() if inplace else _result_stride(x, function)
    if stride is not None:
        out = source if inplace else x.new_empty_strided(x.shape, stride)
        packed = backend.forward(source, function, parameters, encoding, seed, out)
    if packed is None:
        packed = backend.encode(source, encoding, seed)
        if inplace and function in IN_PLACE:
            return IN_PLACE[function](x, *parameters), packed
        out = FORWARD[function](x, *parameters)
    if inplace and out is not x:
        out = x.copy_(out)
    return out, packed


def _result_stride(x, function):
    """Return the strides of torch's function of x, or None if torch has to be asked for them."""
    if function in CONTIGUOUS and not x.is_contiguous():
        return None
    if function in OTHER_STRIDES and not layout.is_regular(x):
        return None
    return layout.result_stride(x)


def activation_quantized(x, function, parameters, encoding, seed, quantizer):
    """f(x), the packed codes of x, and what the quantizer keeps of f(x), or None, in one pass.

    x: contiguous. None where the backend has no such pass.
    """
    stride = _result_stride(x, function)
    if stride is None:
        return None
    backend, out = backends.of(x), x.new_empty_strided(x.shape, stride)

    def run(*settings):
        return backend.forward_quantized(x, function, parameters, encoding, seed, out, *settings)

    made = quantizer.with_result(run, out)
    return None if made is None else (out, *made)


def encode(x, encoding, seed):
    """The packed codes of x, counted in storage order where x is dense, else in logical order."""
    return backends.of(x).encode(layout.dense(x), encoding, seed)


def decode_mul(grad, packed, encoding, stride):
    """lut[code] * grad; `stride`: those of the dense tensor whose codes were packed."""
    if grad.is_contiguous() and grad.stride() == stride:
        out = torch.empty_like(grad)
    else:
        if not layout.is_broadcast_scalar(grad):
            grad = layout.bring_to(grad, stride)
        out = torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)
    backends.of(grad).decode_mul(grad, packed, encoding, out)
    return out


def new_seed(x) -> torch.Tensor:
    """A seed for one draw per element: one int64 on x's device, from torch's generator."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=x.device)


# -- ops -----------------------------------------------------------------------------------------------------


def _encode(x, encoding, stride, seed=None):
    return backends.of(x).encode(layout.told(x, stride), Encoding.parse(encoding), seed)


def _decode_mul(grad, packed, encoding, stride):
    if layout.is_broadcast_scalar(grad):
        layout.check_stride(grad.shape, stride)
    else:
        grad = layout.told(grad, stride)
    return decode_mul(grad, packed, Encoding.parse(encoding), tuple(stride))


encode_op = define(
    "encode(Tensor x, str encoding, SymInt[] stride, Tensor? seed=None) -> Tensor", _encode
)
encode_kept_op = define(
    "encode_kept(Tensor x, str encoding, SymInt[] stride, Tensor? seed=None) -> (Tensor, Tensor)",
    lambda x, *how: (_encode(x, *how), x.new_ones(())),
)
decode_mul_op = define(
    "decode_mul(Tensor grad, Tensor packed, str encoding, SymInt[] stride) -> Tensor", _decode_mul
)
pack_op = define(
    "pack(Tensor codes, int bits) -> Tensor",
    lambda codes, bits: backends.of(codes).pack(codes.contiguous().view(-1), bits),
)
unpack_op = define(
    "unpack(Tensor packed, int bits, SymInt n) -> Tensor",
    lambda packed, bits, n: backends.of(packed).unpack(packed, bits, n),
)


@register_fake("fewbit::encode")
def _(x, encoding, stride, seed=None):
    return x.new_empty(packed_words(x.numel(), Encoding.parse(encoding).bits), dtype=torch.int32)


@register_fake("fewbit::encode_kept")
def _(x, encoding, stride, seed=None):
    return encode_op(x, encoding, stride, seed), x.new_empty(())


@register_fake("fewbit::decode_mul")
def _(grad, packed, encoding, stride):
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)


@register_fake("fewbit::pack")
def _(codes, bits):
    return codes.new_empty(packed_words(codes.numel(), bits), dtype=torch.int32)


@register_fake("fewbit::unpack")
def _(packed, bits, n):
    return packed.new_empty(n, dtype=torch.uint8)


# -- autograd ------------------------------------------------------------------------------------------------

NO_SECOND_DERIVATIVE = (
    "a layer or activation of fewbit has no second derivative: too little of its input is kept; "
    "use torch's own where you differentiate twice"
)


NO_FORWARD_MODE = (
    "a few-bit activation has no forward-mode derivative; use torch's own function there"
)


@contextmanager
def keep_when_partitioned():
    """What is traced inside is marked to be saved, not recomputed, by the compiler's partitioner.

    With an `activation_memory_budget` below 1 it would recompute the codes, which are the smallest tensors
    around, from the largest. In a checkpointed region all is recomputed, as was asked for.
    """
    meta = torch.fx.traceback.current_meta
    if "recompute" in meta:
        yield
        return
    try:
        meta["recompute"] = CheckpointPolicy.MUST_SAVE
        yield
    finally:
        meta.pop("recompute", None)


def _refuse(ctx, grad):
    raise GradientError(NO_SECOND_DERIVATIVE)


def keep_results(op) -> None:
    """Registers what autograd does with an op: nothing to differentiate, only something to keep."""

    def call(*arguments):
        check_not_distributed(*arguments)
        with torch._C._AutoDispatchBelowAutograd(), keep_when_partitioned():
            return op(*arguments)

    library.impl(op.name(), call, "Autograd")


keep_results(encode_kept_op)
register_autograd(decode_mul_op, _refuse, setup_context=lambda ctx, inputs, output: None)


# -- vmap ----------------------------------------------------------------------------------------------------


def _each_example(op):
    """The vmap rule that runs `op` example by example: words of a packed tensor never mix examples."""

    def rule(info, in_dims, *arguments):
        batched = [
            argument.unbind(dim) if isinstance(dim, int) else [argument] * info.batch_size
            for argument, dim in zip(arguments, _flat(in_dims), strict=True)
        ]
        results = [op(*example) for example in zip(*batched, strict=True)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return rule


def _flat(in_dims):
    """One entry an argument: a list argument has a list of Nones, which says no more than None."""
    return [None if isinstance(dim, list | tuple) else dim for dim in in_dims]


for _op in (encode_op, encode_kept_op, decode_mul_op):
    register_vmap(_op, _each_example(_op))
