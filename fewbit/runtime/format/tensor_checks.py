"""Checks of the tensors that backends get, the same as those of the compiled kernels (csrc/bindings/entry.h).

They raise ValueError.
"""

from __future__ import annotations

import torch

from fewbit.config import ROTATED, UNIFORM
from fewbit.runtime.format import groups, layout
from fewbit.runtime.format.encoding import packed_words

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_dense(tensor: torch.Tensor) -> None:
    """Check that a tensor is dense."""
    if not layout.is_dense(tensor):
        raise ValueError(
            f"expected a dense tensor, got strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}"
        )


def seed_on(device: torch.device, seed: int | torch.Tensor) -> torch.Tensor:
    """Return a seed as a tensor on a device, (1,) int64."""
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.full((1,), seed, dtype=torch.int64, device=device)


class ArgumentChecks:
    """The checks of the tensors in a call of one function of a backend, whose device must be that of `like`."""

    def __init__(self, name: str, like: torch.Tensor):
        self.name = name
        self.device = like.device

    def check(self, name: str, tensor, count: int, dtype, is_least: bool = False) -> None:
        """Check that a tensor is dense, on the right device, and of this dtype and count, or more if `is_least`."""
        if tensor is not None:
            check_dense(tensor)
            enough = tensor.numel() >= count if is_least else tensor.numel() == count
            if enough and tensor.dtype == dtype and tensor.device == self.device:
                return
        more = " or more" if is_least else ""
        expected = f"{count} {_name(dtype)}{more}{_place(self.device)}"
        raise ValueError(f"{self.name}: {name}: expected {expected}, got {_described(tensor)}")

    def check_numbers(self, name: str, tensor) -> None:
        if tensor.dtype not in FLOATING:
            raise ValueError(
                f"{self.name}: {name}: expected float32, float64, float16 or bfloat16, got {_described(tensor)}"
            )
        self.check(name, tensor, tensor.numel(), tensor.dtype)

    def check_seed(self, seed, is_drawn: bool = True) -> None:
        if is_drawn:
            self.check("seed", seed, 1, torch.int64)
        elif seed is not None:
            raise ValueError(
                f"{self.name}: seed: expected none, as the table is not unbiased, got {_described(seed)}"
            )

    def check_packed(self, packed, n: int, bits: int) -> None:
        check_bits(bits)
        self.check("packed", packed, packed_words(n, bits), torch.int32)

    def check_copy(self, packed, ranges, bits, group_size, shape, widths, kind=UNIFORM) -> None:
        """Check that packed codes and ranges have the sizes that a tensor of the given shape needs.

        With `widths`, (N,) uint8 or None, they may be larger, and `bits` has no meaning.
        """
        samples, features = groups.samples_of(shape)
        if ranges.dim() != 2 or ranges.shape[1] != 2:
            raise ValueError(
                f"{self.name}: ranges: expected 2 columns, got shape {tuple(ranges.shape)}"
            )
        if widths is None:
            check_bits(bits)
            words = packed_words(samples * features, bits)
            rows = groups.group_count(samples, features, group_size)
        else:
            words, rows = self.check_widths(widths, samples, features, group_size)
        rows += groups.seed_rows(kind)
        is_mixed = widths is not None
        self.check("packed", packed, words, torch.int32, is_mixed)
        self.check("ranges", ranges, 2 * rows, torch.bfloat16, is_mixed)

    def check_mask(self, mask, n: int, affine, kind: str) -> None:
        """Check that `mask` has 1 bit for each of n elements, of no uniform copy, without affine map."""
        if affine is not None:
            raise ValueError(f"{self.name}: scale, shift: expected none with a mask, got one")
        if kind == UNIFORM:
            raise ValueError(
                f"{self.name}: mask: expected None for uniform copies, got {_described(mask)}"
            )
        self.check("mask", mask, packed_words(n, 1), torch.int32)

    def check_channels(self, channels, n: int, kind: str) -> None:
        """Check that `channels` has two bfloat16 numbers for each channel of a rotated copy."""
        count = channels.numel() // 2
        self.check("channels", channels, 2 * count, torch.bfloat16)
        if kind != ROTATED:
            raise ValueError(
                f"{self.name}: channels: expected None unless the copy is rotated, got {_described(channels)}"
            )
        if n and (count < 1 or n % count):
            raise ValueError(
                f"{self.name}: channels: expected entries * inner to divide the number of elements, {n}, got {count} * 1"
            )

    def check_widths(self, widths, samples: int, features: int, group_size: int) -> tuple[int, int]:
        """Return the number of int32 words that samples of these widths need, and the number of groups."""
        self.check("widths", widths, samples, torch.uint8)
        widths = widths.tolist()
        for bits in widths:
            check_bits(bits)
        counts = [widths.count(bits) for bits in range(1, 9)]
        rows = sum(groups.group_count(count, features, group_size) for count in counts)
        return groups.mixed_words(widths, features), rows

    def check_grid(self, grid, bits: int) -> None:
        check_bits(bits)
        if grid.dim() != 2 or len(grid) != 7:
            raise ValueError(
                f"{self.name}: grid: expected 7 rows of float32, got {_described(grid)}"
            )
        self.check("grid", grid, grid.numel(), torch.float32)


def check_bits(bits: int) -> None:
    """Check that `bits` is from 1 to 8."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits: expected 1 to 8, got {bits}")


def _described(tensor) -> str:
    if tensor is None:
        return "none"
    return f"{tensor.numel()} {_name(tensor.dtype)}{_place(tensor.device)}"


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(device) -> str:
    return " on the CPU" if device.type == "cpu" else f" on {device}"
