"""The codecs with which the error-bound policy saves some tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from fewbit.runtime.codecs import DEFAULT, codec
from fewbit.runtime.codecs.payload import exact


class ExactCodec:
    """A codec that saves the tensor unchanged, but copies a part of a larger storage."""

    def quantize(self, x, seed):
        """Return x itself as a codec's result."""
        return exact(x)


@dataclass
class PayloadStats:
    """The bits per element of a slot's latest tensor, and the name of the codec that saved it."""

    bits: float | None = None
    codec: str | None = None


@dataclass(frozen=True)
class BoundedCodec:
    """A codec of `fewbit.runtime.codecs` that saves tensors within a `bound` on the mean squared error.

    `channels` has bounds of the channels (dimension 1), which replace `bound` for a tensor with as many channels.
    """

    name: str
    bound: float
    channels: tuple[float, ...] | None = None
    stats: PayloadStats = field(default_factory=PayloadStats, compare=False, repr=False)

    def quantize(self, x, seed):
        """Return x compressed, and write its size into `stats`."""
        bound = self.bound
        if self.channels is not None and x.dim() > 1 and x.shape[1] == len(self.channels):
            bound = self.channels
        # The cosine transform needs images, (N, C, H, W).
        fits = self.name != "jpeg" or x.dim() == 4
        payload = codec(self.name if fits else DEFAULT).compress(x, bound, seed)
        if x.numel():
            self.stats.bits = 8 * payload.nbytes / x.numel()
            self.stats.codec = payload.codec
        return payload
