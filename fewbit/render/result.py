"""The base class of results, with the ways to show and to write a result."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path

from fewbit.errors import FewbitError
from fewbit.files import write_atomic
from fewbit.render import figures, html, terminal
from fewbit.render.view import View


class Result:
    """A result that can be shown in a terminal and in a notebook, and written as CSV, JSON and HTML.

    A subclass defines `records()` and `view()`, `document()` if the JSON has more than the records, and `_draw()` for a picture.
    """

    def records(self) -> list[dict]:
        """Return a dict of plain values for each row, not rounded."""
        raise NotImplementedError

    def view(self) -> View:
        """Return the `View`, which describes what is shown."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """The first line of what is shown."""
        return self.view().title

    def document(self) -> dict | list:
        """Return what `to_json` writes."""
        return self.records()

    def __rich_console__(self, console, options):
        yield self.view()

    def __str__(self) -> str:
        try:
            return terminal.plain(self, terminal.plain_width())
        except ModuleNotFoundError:  # rich is not installed
            return f"{self.title}\n{self.to_csv()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.block(self.view())

    def to_html(self, path: str | os.PathLike | None = None, force: bool = False) -> str:
        """Return a whole HTML document, and write it to `path` if given, as `to_csv`."""
        return _written(html.page(self.view()), path, force)

    def to_csv(self, path: str | os.PathLike | None = None, force: bool = False) -> str:
        """Return the records as CSV text, and write the text to `path` if given.

        Args:
            path: The file to write, if any.
            force: Whether to replace the file if it exists.

        Raises:
            OutputExistsError: The file exists and `force` is false.
        """
        buffer, records = io.StringIO(), self.records()
        writer = csv.DictWriter(buffer, records[0] if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return _written(buffer.getvalue(), path, force)

    def to_json(self, path: str | os.PathLike | None = None, force: bool = False) -> str:
        """Return `document()` as JSON text, with null for infinity and NaN, and write it to `path` if given, as `to_csv`."""
        text = json.dumps(finite(self.document()), indent=1, allow_nan=False) + "\n"
        return _written(text, path, force)

    def save(self, path: str | os.PathLike, force: bool = False) -> None:
        """Write the result as CSV, HTML, PNG or SVG according to the file name's ending, else as JSON, with the errors of `to_csv` and `plot`."""
        ending = Path(path).suffix.lower()
        if ending in (".png", ".svg"):
            self.plot(path, force=force)
        else:
            writers = {".csv": self.to_csv, ".html": self.to_html}
            writers.get(ending, self.to_json)(path, force)

    def plot(self, path: str | os.PathLike | None = None, force: bool = False):
        """Draw the picture of the result, and write it to `path` if given. Return the matplotlib Figure.

        Args:
            path: The file to write, if any. Its name ends in .png or .svg.
            force: Whether to replace the file if it exists.

        Raises:
            FewbitError: The result has no picture, the file name has another ending, or matplotlib is not installed.
            OutputExistsError: The file exists and `force` is false.
        """
        return figures.draw(self._draw, path, force)

    def _draw(self, figure) -> None:
        """Draw the picture into an empty figure."""
        raise FewbitError(f"expected a result that has a picture, got {type(self).__name__}")


def _written(text: str, path, force: bool) -> str:
    if path is not None:
        write_atomic(path, text, force=force)
    return text


def finite(value):
    """Return plain values with None for infinity and NaN, which JSON lacks, and lists for tuples."""
    if isinstance(value, dict):
        return {key: finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
