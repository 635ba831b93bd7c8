"""The settings of `fewbit.fit_`: they say what each block saves for the backward pass, and are applied to a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fewbit.checkpointing import checkpoint_, uncheckpoint_
from fewbit.compiler.compiling import undo_compile
from fewbit.compress.compress import compress_
from fewbit.compress.controller import Controller
from fewbit.config import DEFAULT_BITS
from fewbit.convert.swap import restore_
from fewbit.sizes import counted


class Option(NamedTuple):
    """One way in which a block can save what its backward pass needs.

    Attributes:
        bits: the bits per element of the tensors that the block's layers save; None if they are exact.
        is_recomputed: whether the block is a checkpointed region, which saves its inputs only.
        input_bits: the bits per element of these inputs; None if they are exact.
        offload: whether these inputs are on the host until the backward pass.
    """

    bits: int | None = None
    is_recomputed: bool = False
    input_bits: int | None = None
    offload: bool = False

    @property
    def name(self) -> str:
        """A text for tables, such as `4 bits` or `recompute, input 8 bits`."""
        kept = "exact" if self.bits is None else counted(self.bits, "bit")
        if not self.is_recomputed:
            return kept
        texts = ["recompute"]
        if self.input_bits is not None:
            texts.append(f"input {counted(self.input_bits, 'bit')}" + self.offload * " on host")
        if self.bits is not None:
            texts.append(kept)
        return ", ".join(texts)


EXACT = Option()
RECOMPUTED = Option(None, True)
OPTIONS = (
    EXACT,
    *(Option(bits) for bits in (8, 4, 3, 2)),
    RECOMPUTED,
    Option(None, True, 8),
    Option(4, True),
    Option(4, True, 8),
    Option(2, True, 8),
)
"""The options of a block. The first is that of a block that fewbit does not change."""
OFFLOADED = (Option(None, True, 8, True), Option(4, True, 8, True), Option(4, True, 4, True))
"""Further options of a block on a GPU."""
REST = (None, 4, 2)
"""The options for the rest of the model: the bits of all layers outside of blocks; None if they are exact."""


@dataclass(frozen=True)
class Settings:
    """The options of all blocks of a model.

    Attributes:
        blocks: {path of a block: its option}.
        rest: the bits of all layers outside of blocks; None if they are exact.
    """

    blocks: Mapping[str, Option]
    rest: int | None = None

    def apply(self, model: nn.Module, always: bool = False) -> Controller | None:
        """Undo earlier conversions and checkpoints of the model, and apply the options, in place.

        Args:
            model: the model.
            always: whether to call `compress_` even if it compresses nothing.

        Returns:
            The controller of `compress_`; None if it is not called.
        """
        undo_compile(model)
        uncheckpoint_(model)
        restore_(model)
        for arguments, paths in self._regions().items():
            bits, offload = arguments
            checkpoint_(model, bits, include=paths, offload=offload)
        overrides = self._overrides()
        if overrides is None:
            if not always:
                return None
            overrides = {"": None}
        return compress_(model, self.rest or DEFAULT_BITS, overrides=overrides, verbose=False)

    def _regions(self) -> dict[tuple, list[str]]:
        """Return {(bits, offload): paths} of the calls of `checkpoint_`."""
        found: dict[tuple, list[str]] = {}
        for path, option in self.blocks.items():
            if option.is_recomputed:
                found.setdefault((option.input_bits, option.offload), []).append(path)
        return found

    def _overrides(self) -> dict[str, int | None] | None:
        """Return the argument `overrides` of `compress_`; None if nothing is compressed."""
        bits = {path: option.bits for path, option in self.blocks.items()}
        if self.rest is None and not any(bits.values()):
            return None
        whole = {"": None} if self.rest is None else {}
        return whole | {path: one for path, one in bits.items() if one != self.rest}

    @property
    def code(self) -> str:
        """Python code that applies the options to a model named `model`, in plain calls of fewbit."""
        lines = []
        for (bits, offload), paths in self._regions().items():
            rest = ", offload=True" * offload
            lines.append(f"fewbit.checkpoint_(model, {bits}, include={paths}{rest})")
        overrides = self._overrides()
        if overrides is not None:
            by_bits: dict[int | None, list[str]] = {}
            for path, bits in overrides.items():
                by_bits.setdefault(bits, []).append(path)
            texts = [
                f"{paths[0]!r}: {bits}" if len(paths) == 1 else f"**dict.fromkeys({paths}, {bits})"
                for bits, paths in by_bits.items()
            ]
            given = f", overrides={{{', '.join(texts)}}}" if texts else ""
            lines.append(f"fewbit.compress_(model, {self.rest or DEFAULT_BITS}{given})")
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """Return the settings as plain JSON values."""
        blocks = {path: option._asdict() for path, option in self.blocks.items()}
        return {"blocks": blocks, "rest": self.rest}

    @classmethod
    def from_dict(cls, values: Mapping) -> Settings:
        """Make settings from the values that `to_dict` returned."""
        return cls({path: Option(**one) for path, one in values["blocks"].items()}, values["rest"])


def everywhere(paths: Iterable[str], option: Option, rest: int | None = None) -> Settings:
    """Return settings in which all blocks have one option."""
    return Settings(dict.fromkeys(paths, option), rest)
