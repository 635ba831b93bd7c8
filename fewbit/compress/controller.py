"""The controller: what `compress_` returns, and what the layers of a converted model share."""

from __future__ import annotations

import weakref

from torch import nn

from fewbit.compress.convert_report import Report
from fewbit.runtime.sharing import Session


class Controller:
    """Stands for one compressed model; nothing in the training loop needs it.

    report: what was converted. session: shared by the model's layers.
    """

    def __init__(self, model: nn.Module, report: Report, session: Session):
        self._model = weakref.ref(model)
        self.report = report
        self.session = session

    @property
    def model(self) -> nn.Module | None:
        """The compressed model, or None if it is gone."""
        return self._model()

    def __repr__(self) -> str:
        model = type(self.model).__name__ if self.model is not None else "a model that is gone"
        return f"Controller({model}, {len(self.report.converted)} modules converted)"
