"""The class that `compress_` gives an LSTM if it is to compress what torch's operations save."""

from __future__ import annotations

import torch
from torch import nn

from fewbit.nn.base import Guarded
from fewbit.runtime.interop.one_dnn import without_one_dnn


class StepwiseLSTM(Guarded, nn.LSTM):
    """An LSTM that runs one operation after the other on the CPU, so that the tensors that they save can be compressed.

    On the CPU, torch's LSTM is usually one operation of oneDNN, which saves an opaque buffer.
    """

    @staticmethod
    def runs_stepwise_on(device: torch.device) -> bool:
        """Return whether the LSTM runs one operation after the other on this device."""
        return device.type == "cpu"

    def forward(self, input, hx=None):
        """Compute torch.nn.LSTM."""
        data = getattr(input, "data", input)  # a packed sequence has its tensor in `data`
        is_stepwise = self.runs_stepwise_on(data.device)
        if not (self.training and torch.is_grad_enabled() and is_stepwise):
            return super().forward(input, hx)
        with without_one_dnn():
            return super().forward(input, hx)
