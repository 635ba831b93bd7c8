"""A plugin that compresses the model that Axolotl trains, by a `FewbitCallback` of its trainer."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator
from torch import nn

from fewbit.compress.compress import compress_
from fewbit.config import plain_arguments
from fewbit.errors import InputError
from fewbit.integrations.transformers import FewbitCallback

__all__ = ["FewbitArgs", "FewbitPlugin"]

_OF_THE_MODEL = ("include", "exclude", "overrides", "offload", "verbose")
"""The arguments of `compress_` that need the model, or change the process."""


class FewbitArgs(BaseModel):
    """The keys that the plugin adds to Axolotl's configuration.

    Attributes:
        fewbit: {name of an argument of `fewbit.compress_`: its value}, such as `{"bits": 2}`. Configuration objects are mappings, such
            as `{"kind": "adaptive", "average": 2.5}` for `bits`. Without the key, the model is not compressed.
    """

    fewbit: dict[str, Any] | None = None

    @field_validator("fewbit")
    @classmethod
    def check(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Raise an error for arguments that `compress_` cannot use."""
        if value is not None:
            settings = {name: one for name, one in value.items() if name not in _OF_THE_MODEL}
            try:
                compress_(nn.Identity(), **settings, verbose=False)
            except TypeError as error:  # pydantic reports only errors that are a ValueError
                raise InputError(f"fewbit: {error}") from None
        return value


class FewbitPlugin(BasePlugin):
    """Compresses the model that Axolotl trains: `plugins: [fewbit.integrations.axolotl.FewbitPlugin]`."""

    def get_input_args(self) -> str:
        return f"{FewbitArgs.__module__}.{FewbitArgs.__qualname__}"

    def add_callbacks_pre_trainer(self, cfg, model) -> list:
        return [] if cfg.fewbit is None else [FewbitCallback(**plain_arguments(cfg.fewbit))]
