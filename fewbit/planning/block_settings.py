"""The settings of `fewbit.fit_`: what each block saves for the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fewbit.checkpointing import uncheckpoint_
from fewbit.compress.compress import compress_
from fewbit.compress.controller import Controller
from fewbit.config import DEFAULT_BITS
from fewbit.convert.chunked_loss import unchunk_loss_
from fewbit.planning.candidates import EXACT as EXACT_METHOD
from fewbit.planning.candidates import Candidate, Regions
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
"""The options of a block, the unchanged one first."""
OFFLOADED = (Option(None, True, 8, True), Option(4, True, 8, True), Option(4, True, 4, True))
"""Further options on a GPU."""
BITS_OF_REST = (None, 4, 2)
"""The bits of all layers outside of blocks."""


class Rest(NamedTuple):
    """One way in which the rest of the model can save what its backward pass needs.

    Attributes:
        bits: the bits of all layers outside of blocks; None if they are exact.
        head: the path of the linear layer whose loss is computed in chunks (`fewbit.chunk_loss_`), or None.
    """

    bits: int | None = None
    head: str | None = None

    @property
    def name(self) -> str:
        """A text for tables, such as `4 bits, loss in chunks`."""
        return Option(self.bits).name + ", loss in chunks" * (self.head is not None)


POLICY = "fit_"
"""The name of the curve of these settings in a plan."""


@dataclass(frozen=True)
class Settings:
    """The options of all blocks of a model.

    Attributes:
        blocks: {path of a block: its option}.
        rest: `bits` of `Rest`.
        head: `head` of `Rest`.
    """

    blocks: Mapping[str, Option]
    rest: int | None = None
    head: str | None = None

    @property
    def of_rest(self) -> Rest:
        """The option of the rest of the model."""
        return Rest(self.rest, self.head)

    @property
    def name(self) -> str:
        """A text for messages, such as `4 bits in blocks, the rest exact`."""
        options = list(dict.fromkeys(option.name for option in self.blocks.values()))
        if not options or options == [self.of_rest.name]:
            return self.of_rest.name
        return f"{' or '.join(options)} in blocks, the rest {self.of_rest.name}"

    @property
    def candidate(self) -> Candidate:
        """The candidate that applies the options."""
        regions: dict[tuple, list[str]] = {}
        for path, option in self.blocks.items():
            if option.is_recomputed:
                regions.setdefault((option.input_bits, option.offload), []).append(path)
        calls = tuple(Regions(bits, tuple(paths), off) for (bits, off), paths in regions.items())
        bits = {path: option.bits for path, option in self.blocks.items()}
        if self.rest is None and not any(bits.values()):
            return Candidate(POLICY, method=EXACT_METHOD, checkpoints=calls, head=self.head)
        usual = self.rest
        if usual is None:
            bits = {path: one for path, one in bits.items() if one is not None}
            usual = Counter(bits.values()).most_common(1)[0][0]
            bits = {"": None} | bits
        # Every block has an override, because the argument `bits` gives some tensors more bits.
        options = {"overrides": bits} if bits else {}
        return Candidate(POLICY, usual, options, checkpoints=calls, head=self.head)

    def apply(self, model: nn.Module, always: bool = False) -> Controller | None:
        """Undo earlier conversions and checkpoints of the model, and apply the options, in place. Return the controller, or None.

        With `always`, `compress_` is called even if it compresses nothing.
        """
        uncheckpoint_(model)
        unchunk_loss_(model)
        controller = self.candidate.apply(model)
        if controller is None and always:
            controller = compress_(model, DEFAULT_BITS, overrides={"": None}, verbose=False)
        return controller

    @property
    def code(self) -> str:
        """Python code that applies the options to `model`."""
        candidate = self.candidate
        calls = list(candidate.calls)
        if "" in candidate.options.get("overrides", ()):
            calls.insert(-1, "# '': the whole model, which stays exact but for the paths after it")
        return "\n".join(calls)

    def to_dict(self) -> dict:
        """Return plain JSON values."""
        blocks = {path: option._asdict() for path, option in self.blocks.items()}
        return {"blocks": blocks, "rest": self.rest, "head": self.head}

    @classmethod
    def from_dict(cls, values: Mapping) -> Settings:
        """Make settings from the result of `to_dict`."""
        return cls(
            {path: Option(**one) for path, one in values["blocks"].items()},
            values["rest"],
            values.get("head"),
        )


def everywhere(paths: Iterable[str], option: Option, rest: int | None = None) -> Settings:
    """Return settings in which all blocks have one option."""
    return Settings(dict.fromkeys(paths, option), rest)
