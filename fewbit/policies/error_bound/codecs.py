"""Slot codecs of the error-bound policy, for slots to which the group quantizer's bits are not suited."""

from __future__ import annotations

from dataclasses import dataclass, field

from fewbit.runtime.codecs import DEFAULT, codec
from fewbit.runtime.codecs.payload import exact


class ExactCodec:
    """A slot codec that saves the tensor as it is, as torch's own layer would. Of a part of a larger storage it saves a copy."""

    def quantize(self, x, seed):
        """Return a payload with the exact values."""
        return exact(x)


@dataclass
class PayloadStats:
    """The latest payload of one slot: bits per element, and the codec that made it. Both are None before the first."""

    bits: float | None = None
    codec: str | None = None


@dataclass(frozen=True)
class BoundedCodec:
    """A slot codec that saves tensors with a codec of `fewbit.runtime.codecs`, within a bound on the mean squared error.

    Args:
        name: the codec's name in `fewbit.runtime.codecs`.
        bound: dx*^2, the mean squared error of an element that is allowed.
        channels: dx*^2 of each channel, for tensors with as many channels; or None.
        stats: filled with each payload.
    """

    name: str
    bound: float
    channels: tuple[float, ...] | None = None
    stats: PayloadStats = field(default_factory=PayloadStats, compare=False, repr=False)

    def quantize(self, x, seed):
        """Return the payload of a tensor, and note its size in `stats`."""
        bound = self.bound
        if self.channels is not None and x.dim() > 1 and x.shape[1] == len(self.channels):
            bound = self.channels
        # The cosine transform needs images.
        fits = self.name != "jpeg" or x.dim() == 4
        payload = codec(self.name if fits else DEFAULT).compress(x, bound, seed)
        if x.numel():
            self.stats.bits = 8 * payload.nbytes / x.numel()
            self.stats.codec = payload.codec
        return payload
