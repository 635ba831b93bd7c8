"""Multi-head attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as torch_functional

from fewbit import functional as F
from fewbit.functional.attention.attention import How, attention
from fewbit.nn.base import Quantized
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.saving_function import is_differentiated

__all__ = ["MultiheadAttention"]


class MultiheadAttention(Quantized, nn.MultiheadAttention):
    """A torch.nn.MultiheadAttention that saves q, k and v, and the inputs of all projections, quantized.

    torch computes the input projections in one matrix product if query, key and value are one tensor, in two if key and
    value are; each saves one input. q, k and v are saved as in `fewbit.functional.scaled_dot_product_attention`.

    Attributes:
        quantizer: made from the arguments `bits` and `group_size`; quantizes the inputs of the projections.
        attention_quantizer: quantizes q, k and v. If it is None, `quantizer` does.
    """

    attention_quantizer: Quantizer | None = None

    def extra_repr(self) -> str:
        own = self.attention_quantizer
        return super().extra_repr() + (f", attention_bits={own.mean_bits:g}" if own else "")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        inputs = query, key, value, attn_mask, key_padding_mask
        unusual = any(x is not None and (x.is_nested or not _is_ordinary(x)) for x in inputs)
        if unusual or not self.training or not is_differentiated(*inputs, *self.parameters()):
            return self._exact(query, key, value, *masks)
        if not (self.batch_first and query.dim() == 3):
            return self._attend(query, key, value, *masks)
        # Inputs that are one tensor must stay one tensor, so that one product projects them.
        if query is key and key is value:
            query = key = value = query.transpose(1, 0)
        elif key is value:
            query, key = query.transpose(1, 0), key.transpose(1, 0)
            value = key
        else:
            query, key, value = (x.transpose(1, 0) for x in (query, key, value))
        y, weights = self._attend(query, key, value, *masks)
        return y.transpose(1, 0), weights

    def _attend(
        self,
        query,
        key,
        value,
        key_padding_mask,
        need_weights,
        attn_mask,
        average_attn_weights,
        is_causal,
    ):
        """Compute torch.nn.functional.multi_head_attention_forward. Dimension 0 is the sequence."""
        is_batched = torch_functional._mha_shape_check(
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        key_padding_mask = torch_functional._canonical_mask(
            mask=key_padding_mask,
            mask_name="key_padding_mask",
            other_type=torch_functional._none_or_dtype(attn_mask),
            other_name="attn_mask",
            target_type=query.dtype,
        )
        attn_mask = torch_functional._canonical_mask(
            mask=attn_mask,
            mask_name="attn_mask",
            other_type=None,
            other_name="",
            target_type=query.dtype,
            check_other=False,
        )
        if not is_batched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "Need attn_mask if specifying the is_causal hint. "
                "You may use the Transformer module method "
                "`generate_square_subsequent_mask` to create this mask."
            )
        if key_padding_mask is None and not need_weights and is_causal:
            attn_mask = None
        elif key_padding_mask is not None:
            is_causal = False
        self._check_sizes(query, key, value)
        length, batch, _ = query.shape
        heads = batch * self.num_heads

        q, k, v = self._projected(query, key, value)
        attn_mask = _three_dimensional(attn_mask, heads, length, key.shape[0])
        masks = attn_mask, key_padding_mask
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.repeat(1, batch, 1)])
            v = torch.cat([v, self.bias_v.repeat(1, batch, 1)])
            masks = _extended(*masks)
        q, k, v = (x.view(x.shape[0], heads, self.head_dim).transpose(0, 1) for x in (q, k, v))
        if self.add_zero_attn:
            zeros = torch.zeros((heads, 1, self.head_dim), dtype=k.dtype, device=k.device)
            k, v = torch.cat([k, zeros], dim=1), torch.cat([v, zeros], dim=1)
            masks = _extended(*masks)
        mask, padding = masks
        if padding is not None:
            padding = _checked(padding, batch, k.shape[1]).view(batch, 1, 1, k.shape[1])

        # `attention` saves the two masks and adds them itself, because their sum is larger than both together.
        weights = None
        if need_weights:
            if padding is not None:
                padding = padding.expand(-1, self.num_heads, -1, -1).reshape(heads, 1, -1)
            masks = (padding, None) if mask is None else (mask, padding)
            how = How(self.dropout, weighed=True)
            y, weights = attention(q, k, v, *masks, how, self.attention_quantizer or self.quantizer)
            y = y.transpose(0, 1).reshape(length * batch, self.embed_dim)
            weights = weights.view(batch, self.num_heads, length, k.shape[1])
            if average_attn_weights:
                weights = weights.mean(dim=1)
        else:
            if mask is not None and mask.shape[0] == 1:
                mask = mask.unsqueeze(0)
            elif mask is not None:
                mask = mask.unflatten(0, (batch, self.num_heads))
            masks = (padding, None) if mask is None else (mask, padding)
            how = How(self.dropout, is_causal)
            q, k, v = (x.unflatten(0, (batch, self.num_heads)) for x in (q, k, v))
            y = attention(q, k, v, *masks, how, self.attention_quantizer or self.quantizer)
            y = y.permute(2, 0, 1, 3).reshape(batch * length, self.embed_dim)
        y = self._linear(y, self.out_proj.weight, self.out_proj.bias)
        y = y.view(length, batch, y.shape[1])
        if is_batched:
            return y, weights
        return y.squeeze(1), None if weights is None else weights.squeeze(0)

    def _check_sizes(self, query, key, value) -> None:
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(
                f"was expecting embedding dimension of {self.embed_dim}, but got {query.shape[-1]}"
            )
        if not self._qkv_same_embed_dim and key.shape[:2] != value.shape[:2]:
            raise AssertionError(
                f"key's sequence and batch dims {key.shape[:2]} do not match value's "
                f"{value.shape[:2]}"
            )
        if self._qkv_same_embed_dim and key.shape != value.shape:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")

    def _linear(self, x, weight, bias):
        return F.linear(x, weight, bias, quantizer=self.quantizer)

    def _projected(self, query, key, value):
        size, bias = self.embed_dim, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif key is not value:
            weights = self.in_proj_weight.chunk(3)
        elif query is key:
            return _parts(self._linear(query, self.in_proj_weight, bias), 3)
        else:
            first, others = self.in_proj_weight.split([size, 2 * size])
            biases = (None, None) if bias is None else bias.split([size, 2 * size])
            q = self._linear(query, first, biases[0])
            return q, *_parts(self._linear(key, others, biases[1]), 2)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(map(self._linear, (query, key, value), weights, biases))


def _is_ordinary(x) -> bool:
    return type(x) in (Tensor, nn.Parameter, FakeTensor)


def _parts(projected, count: int):
    """Split the last dimension into `count` contiguous tensors, as torch does."""
    parts = projected.unflatten(-1, (count, projected.shape[-1] // count))
    return parts.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous().unbind(0)


def _three_dimensional(mask, heads, length, keys):
    if mask is None or mask.dim() not in (2, 3):
        return mask  # torch's own check has raised for other dimensions
    expected = (length, keys) if mask.dim() == 2 else (heads, length, keys)
    if mask.shape != expected:
        raise RuntimeError(
            f"The shape of the {mask.dim()}D attn_mask is {mask.shape}, but should be {expected}."
        )
    return mask.unsqueeze(0) if mask.dim() == 2 else mask


def _extended(*masks):
    return tuple(None if mask is None else torch_functional.pad(mask, (0, 1)) for mask in masks)


def _checked(padding, batch, keys):
    if padding.shape != (batch, keys):
        raise AssertionError(
            f"expecting key_padding_mask shape of {(batch, keys)}, but got {tuple(padding.shape)}"
        )
    return padding
