"""Products that are no layers: `einsum`, `baddbmm`, `addcmul` and `grouped_mm`, whose factors are saved quantized.

Each gradient is linear in the other factor, and the factors are rounded independently, so all gradients are exact in
expectation. A factor that is a parameter, or a view of one, is saved unquantized.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fewbit.functional.products import in_shapes, is_in_memory, is_quantized_product
from fewbit.runtime.interop.autocast import with_torch_casts
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.tensor_kinds import is_batched
from fewbit.runtime.parallel.shards import is_distributed
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.softmax_copies import quantize_factor
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

_grouped_mm = torch_functional.grouped_mm


def einsum(equation, *operands, quantizer: Quantizer) -> Tensor:
    """Compute torch.einsum and save both factors quantized.

    torch's own function runs unless there are two operands whose indices are letters after which the equation has "->",
    each index of an operand is in the other operand or in the result, and no index is twice in an operand.
    """
    factors = operands_of(operands)
    if len(factors) == 2 and all(isinstance(factor, Tensor) for factor in factors):
        terms = _terms(equation, *factors)
        if terms is not None and takes_einsum(*factors):
            return _Einsum.apply(*factors, *terms, quantizer)
    return torch.einsum(equation, *operands)


def takes_einsum(a: Tensor, b: Tensor) -> bool:
    """Return whether `einsum` quantizes a factor: one of a product of results, or the constant of a linear layer."""
    if _is_quantized(a, b):
        return True
    constant, parameter = (a, b) if b.requires_grad else (b, a)
    is_linear = is_in_memory(parameter) and parameter.is_floating_point()
    return is_linear and not constant.requires_grad and is_differentiated(parameter, constant)


def operands_of(operands) -> tuple:
    """Return the operands of einsum, which may be in one list or tuple."""
    is_one = len(operands) == 1 and isinstance(operands[0], list | tuple)
    return tuple(operands[0]) if is_one else tuple(operands)


def baddbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    quantizer: Quantizer,
) -> Tensor:
    """Compute torch.baddbmm, and save the factors batch1 and batch2 quantized."""
    if not _is_quantized(batch1, batch2):
        return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
    factors = {"beta": beta, "alpha": alpha}
    return _PlusProduct.apply(input, batch1, batch2, torch.baddbmm, factors, quantizer)


def addcmul(
    input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1, quantizer: Quantizer
) -> Tensor:
    """Compute torch.addcmul, and save the factors tensor1 and tensor2 quantized."""
    if not _is_quantized(tensor1, tensor2):
        return torch.addcmul(input, tensor1, tensor2, value=value)
    return _PlusProduct.apply(input, tensor1, tensor2, torch.addcmul, {"value": value}, quantizer)


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantizer: Quantizer,
) -> Tensor:
    """Compute torch.nn.functional.grouped_mm, as in a mixture of experts, and save the rows quantized.

    torch's own function runs for other shapes than these, for a bias and for a dtype of the result.

    Args:
        mat_a: (rows, inner).
        mat_b: (groups, inner, columns).
        offs: the ends of the groups of rows, (groups,), int32.
    """
    is_grouped = mat_a.dim() == 2 and mat_b.dim() == 3 and offs is not None
    if not (is_grouped and bias is None and out_dtype is None) or not _is_quantized(mat_a, mat_b):
        return _grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    return _GroupedMm.apply(mat_a, mat_b, offs, quantizer)


def _is_quantized(a: Tensor, b: Tensor) -> bool:
    return not is_distributed(a) and is_quantized_product(a, b)


def _terms(equation, a: Tensor, b: Tensor) -> tuple[str, str, str] | None:
    """Return the indices of both operands and of the result, or None if the gradients are no such products."""
    if not isinstance(equation, str) or equation.count("->") != 1 or equation.count(",") != 1:
        return None
    operands, result = equation.replace(" ", "").split("->")
    first, second = operands.split(",")
    for own, other in ((first, second), (second, first)):
        if not own.isalpha() or len(set(own)) < len(own) or set(own) - {*other, *result}:
            return None
    if len(first) != a.dim() or len(second) != b.dim():
        return None
    sizes = dict(zip(first, a.shape, strict=True))
    # A dimension of 1 element broadcasts.
    has_same = all(
        sizes.get(name, size) == size for name, size in zip(second, b.shape, strict=True)
    )
    return (first, second, result) if has_same else None


def _product(first: str, second: str, result: str, a: Tensor, b: Tensor) -> Tensor:
    """Return torch.einsum(f"{first},{second}->{result}", a, b). `a` may be a batch, in which torch has no einsum."""
    if not is_batched(a):
        return torch.einsum(f"{first},{second}->{result}", a, b)
    sizes = dict(zip(first + second, (*a.shape, *b.shape), strict=True))
    in_all = [name for name in first if name in second and name in result]
    inner = [name for name in first if name in second and name not in result]
    rows = [name for name in first if name not in second]
    columns = [name for name in second if name not in first]

    def matrices(x, names, *parts):
        x = x.permute([names.index(name) for part in parts for name in part])
        return x.reshape([prod(sizes[name] for name in part) for part in parts])

    y = matrices(a, first, in_all, rows, inner) @ matrices(b, second, in_all, inner, columns)
    order = in_all + rows + columns
    y = y.reshape([sizes[name] for name in order])
    return y.permute([order.index(name) for name in result])


def _keep(ctx, y: Tensor, a: Tensor, b: Tensor, quantizer: Quantizer, **others) -> Tensor:
    """Keep the factors a and b, and others."""
    first = copies.unquantized(a) if _is_parameter(a) else quantize_factor(quantizer, a)
    if _is_parameter(b):
        second = copies.unquantized(b)
    elif not _is_parameter(a) and b.untyped_storage()._cdata == a.untyped_storage()._cdata:
        second = quantizer.quantize_independent(b, a)
    else:
        second = quantize_factor(quantizer, b)
    return copies.keep(ctx, y, **others, a=first, b=second)


def _is_parameter(x: Tensor) -> bool:
    return x.requires_grad and is_in_memory(x)


class _Einsum(SavingFunction):
    @staticmethod
    def forward(ctx, a, b, of_a, of_b, of_y, quantizer):
        ctx.terms = of_a, of_b, of_y
        # A view that a Function returns could not be changed in place.
        y = with_torch_casts(torch.einsum, f"{of_a},{of_b}->{of_y}", a, b).data
        return _keep(ctx, y, a, b, quantizer)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        a, b = kept.values("a", grad.dtype), kept.values("b", grad.dtype)
        of_a, of_b, of_y = ctx.terms
        needs_a, needs_b, *_ = ctx.needs_input_grad
        grad_a = _product(of_y, of_b, of_a, grad, b) if needs_a else None
        grad_b = _product(of_y, of_a, of_b, grad, a) if needs_b else None
        return grad_a, grad_b, None, None, None, None


class _PlusProduct(SavingFunction):
    """Computes torch.baddbmm or torch.addcmul, x plus the product of two matrices, or of elements, each times a factor."""

    @staticmethod
    def forward(ctx, x, a, b, function, factors, quantizer):
        ctx.inputs = [(each.shape, each.dtype) for each in (x, a, b)]
        ctx.function, ctx.factors = function, factors
        y = with_torch_casts(function, x, a, b, **factors)
        return _keep(ctx, y, a, b, quantizer)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        a, b = kept.values("a", grad.dtype), kept.values("b", grad.dtype)
        if ctx.function is torch.addcmul:
            of_product = ctx.factors["value"] * grad
            grads = grad, of_product * b, of_product * a
        else:
            of_product = ctx.factors["alpha"] * grad
            grads = of_product @ b.transpose(-2, -1), a.transpose(-2, -1) @ of_product
            grads = ctx.factors["beta"] * grad, *grads
        return *in_shapes(grads, ctx.inputs), None, None, None


class _GroupedMm(SavingFunction):
    @staticmethod
    def forward(ctx, a, b, offs, quantizer):
        y = _grouped_mm(a, b, offs=offs)
        # The elements of a column, and not those of a row, follow each other in memory.
        ctx.is_transposed = b.stride(-2) == 1
        return _keep(ctx, y, a, b, quantizer, offs=offs)

    @staticmethod
    def backward(ctx, grad):
        kept = copies.Kept(ctx)
        a, b = kept.values("a", grad.dtype), kept.values("b", grad.dtype)
        offs = kept.tensor("offs")
        grad = grad.contiguous()  # kernels on a GPU demand it
        grad_a = _grouped_mm(grad, b.transpose(-2, -1), offs=offs)
        # The gradient of the matrices has the strides of the matrices.
        first, second = (grad, a) if ctx.is_transposed else (a, grad)
        grad_b = _grouped_mm(first.transpose(-2, -1), second, offs=offs)
        return grad_a, grad_b.transpose(-2, -1) if ctx.is_transposed else grad_b, None, None
