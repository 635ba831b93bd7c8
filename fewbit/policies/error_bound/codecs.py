"""What keeps variables for the error-bound policy where the group quantizer's own bits do not: exactly, or by a codec."""

from __future__ import annotations

from dataclasses import dataclass, field

from fewbit.runtime.codecs import DEFAULT, codec
from fewbit.runtime.codecs.payload import exact


class Exactly:
    """The tensor as it is, as torch's own layer would; of a part of a larger storage a copy."""

    def quantize(self, x, seed):
        return exact(x)


@dataclass
class Latest:
    """Of the latest payload of one variable: bits an element, and what made it (`Payload.codec`); None before the first."""

    bits: float | None = None
    kept: str | None = None


@dataclass(frozen=True)
class CodecKeeper:
    """A codec's payload within a bound.

    bound: dx*^2, of the squared error of an element. channels: that of each channel, where x has as many; or None. latest:
    is told of each payload.
    """

    name: str
    bound: float
    channels: tuple[float, ...] | None = None
    latest: Latest = field(default_factory=Latest, compare=False, repr=False)

    def quantize(self, x, seed):
        bound = self.bound
        if self.channels is not None and x.dim() > 1 and x.shape[1] == len(self.channels):
            bound = self.channels
        # (Of what is not made of images the cosine transform makes nothing.)
        fits = self.name != "jpeg" or x.dim() == 4
        payload = codec(self.name if fits else DEFAULT).compress(x, bound, seed)
        if x.numel():
            self.latest.bits = 8 * payload.nbytes / x.numel()
            self.latest.kept = payload.codec
        return payload
