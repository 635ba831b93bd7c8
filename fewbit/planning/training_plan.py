"""The result of `fewbit.plan`: the measured candidates and the recommended one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from fewbit.planning.candidates import Candidate
from fewbit.planning.plan_figure import draw_plan
from fewbit.render.formats import amount, digits, unit_of
from fewbit.render.result import finite
from fewbit.render.saved_results import Document
from fewbit.render.view import Column, View
from fewbit.schema import PLAN
from fewbit.sizes import counted

ERRORS = ("error", "error_error", "variance", "variance_error", "bias")
"""The fields of `Planned` that are errors."""
NOISY = 2.0
"""The ratio of the longest to the shortest exact pass from which times are called unreliable."""
UNSURE = 0.2
"""The relative standard error of an error above which notes ask for more batches."""


@dataclass(frozen=True)
class Planned:
    """One candidate with its measurements.

    g is the exact gradient of a batch, and g^ the gradient with the candidate. Errors are sums over all parameters, averaged over batches
    and draws of the rounding.

    Attributes:
        candidate: The setting that was measured.
        saved_bytes: The bytes that one forward saves for backward, as `fewbit.saved_bytes` counts them.
        error: |g^ - g|^2, including bias.
        error_error: The standard error of `error`, NaN if not known.
        variance: The variance of g^ over draws, which is one part of `error`.
        variance_error: The standard error of `variance`, NaN if not known.
        bias: An estimate of |E g^ - g|^2, the other part of `error`, with E the mean over draws. It may be negative.
        seconds: The median time of a forward and backward pass, in turns with the other candidates, in seconds.
        seconds_least: The shortest time of a pass.
        seconds_most: The longest time of a pass.
    """

    candidate: Candidate
    saved_bytes: int
    error: float
    error_error: float
    variance: float
    variance_error: float
    bias: float
    seconds: float
    seconds_least: float
    seconds_most: float

    @property
    def policy(self) -> str:
        """The `policy` of the candidate."""
        return self.candidate.policy

    @property
    def label(self) -> str:
        """The `label` of the candidate."""
        return self.candidate.label


@dataclass(frozen=True, repr=False)
class TrainingPlan(Document):
    """The saved bytes, the gradient error and the time of each candidate, and which candidate is recommended.

    Attributes:
        model: The class name of the model.
        device: The device of the model.
        batches: The number of batches.
        batch_size: The number of samples in a batch.
        draws: The number of passes with independent rounding for each candidate and batch.
        share: The largest error with which a candidate may be recommended, as a multiple of `sampling`.
        exact_bytes: The bytes that the model saves without compression.
        exact_seconds: The median time of a forward and backward pass without compression, in seconds.
        exact_seconds_least: The shortest of these times.
        exact_seconds_most: The longest of these times.
        compiled_bytes: `exact_bytes` with torch.compile, or None if no candidate compiles.
        compiled_seconds: `exact_seconds` with torch.compile, or None.
        gradient: The mean of |g|^2 over the batches, with the exact gradient g of a batch.
        sampling: The variance of g between minibatches.
        sampling_error: The standard error of `sampling`, NaN if not known.
        sampled: A text that says from what `sampling` was measured.
        rows: The candidates in the given order.
    """

    _schema = PLAN

    model: str
    device: str
    batches: int
    batch_size: int
    draws: int
    share: float
    exact_bytes: int
    exact_seconds: float
    exact_seconds_least: float
    exact_seconds_most: float
    compiled_bytes: int | None
    compiled_seconds: float | None
    gradient: float
    sampling: float
    sampling_error: float
    sampled: str
    rows: tuple[Planned, ...]

    @property
    def limit(self) -> float:
        """The largest error with which a candidate may be recommended: `share` * `sampling`."""
        return self.share * self.sampling

    @property
    def recommended(self) -> Planned | None:
        """The candidate with the fewest `saved_bytes`, fewer than the exact model's, with an error of at most `limit`, or None."""
        fitting = [
            row
            for row in self.rows
            if row.error <= self.limit and row.saved_bytes < self.exact_bytes
        ]
        return min(fitting, key=lambda row: (row.saved_bytes, row.error), default=None)

    @property
    def closest(self) -> Planned:
        """The candidate with the smallest error, of those with fewer `saved_bytes` than the exact model if there are any."""
        known = [row for row in self.rows if math.isfinite(row.error)] or self.rows
        saving = [row for row in known if row.saved_bytes < self.exact_bytes] or known
        return min(saving, key=lambda row: (row.error, row.saved_bytes))

    def to_dict(self) -> dict:
        """Return plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        rows = [_row(row) for row in self.rows]
        return finite({"schema": PLAN} | values | {"rows": rows})

    @classmethod
    def _of_document(cls, document: dict) -> TrainingPlan:
        rows = [
            {**_values(Planned, row), "candidate": Candidate.from_dict(row["candidate"])}
            for row in document["rows"]
        ]
        return cls(**{**_values(cls, document), "rows": tuple(Planned(**row) for row in rows)})

    def records(self) -> list[dict]:
        """Return a dict for each candidate."""
        return [
            {
                "policy": row.policy,
                "setting": row.label,
                "saved_bytes": row.saved_bytes,
                "bytes_ratio": self.exact_bytes / row.saved_bytes if row.saved_bytes else None,
                **{name: getattr(row, name) for name in ERRORS},
                "relative_error": row.error / self.gradient,
                "error_of_sampling": row.error / self.sampling if self.sampling else None,
                "variance_of_sampling": row.variance / self.sampling if self.sampling else None,
                "seconds": row.seconds,
                "time_ratio": self._time(row),
                "time_least": row.seconds_least / self.exact_seconds,
                "time_most": row.seconds_most / self.exact_seconds,
                "recommended": row is self.recommended,
            }
            for row in self.rows
        ]

    @property
    def title(self) -> str:
        chosen, best = self.recommended, self.closest
        exact = amount(self.exact_bytes)
        if chosen is not None:
            less = self.exact_bytes / chosen.saved_bytes if chosen.saved_bytes else math.inf
            return (
                f"{self.model}: {_name(chosen)} saves {amount(chosen.saved_bytes)} in place of "
                f"{exact}, {less:.3g} times less; its error is {_percent(chosen.error, self.sampling) or 0} "
                f"of the variance between minibatches, its passes take {self._time(chosen):.2f} times as long "
                f"({self._range(chosen.seconds_least, chosen.seconds_most)})"
            )
        if best.saved_bytes >= self.exact_bytes:
            return f"{self.model}: no setting saves less than the {exact} of the exact model"
        share = _percent(best.error, self.sampling)
        how = f"{share} of it" if share else f"an error of {digits(best.error)}"
        return (
            f"{self.model}: no setting keeps its error within {digits(100 * self.share)}% of the variance between "
            f"minibatches; {_name(best)} comes closest, with {how}"
        )

    @property
    def unit(self) -> tuple[str, int]:
        return unit_of(self.exact_bytes)

    def _time(self, row: Planned) -> float:
        return row.seconds / self.exact_seconds

    def _range(self, least: float, most: float) -> str:
        return f"{least / self.exact_seconds:.3g} to {most / self.exact_seconds:.3g}"

    def view(self) -> View:
        chosen, unit = self.recommended, self.unit

        def setting(row: Planned) -> str:
            return row.label + "*" * (row is chosen)

        def spread(row: Planned) -> str:
            return _percent(min(row.error_error, 9.99 * row.error), row.error)

        def random(row: Planned) -> str:
            return _percent(min(max(row.variance, 0.0), row.error), row.error)

        def time(row: Planned) -> str:
            ratio = self._time(row)
            return f"{ratio:.4g}" if ratio >= 100 else f"{ratio:.2f}"

        def passes(row: Planned) -> str:
            return self._range(row.seconds_least, row.seconds_most)

        exact_passes = self._range(self.exact_seconds_least, self.exact_seconds_most)
        policy = _column(
            "policy", lambda row: row.policy, "exact", kind="name", least=14, once=True
        )
        has_policies = any(row.policy for row in self.rows)
        of_exact = "" if has_policies else "exact"
        columns = (
            *([policy] if has_policies else []),
            _column("setting", setting, of_exact, kind="name", least=19),
            _column(
                unit[0], lambda row: amount(row.saved_bytes, unit), amount(self.exact_bytes, unit)
            ),
            _column("less", lambda row: _times(self.exact_bytes, row.saved_bytes), drop=4),
            _column("error", lambda row: digits(row.error)),
            _column("±", spread, drop=3),
            _column("random", random, drop=2),
            _column("noise", lambda row: _percent(row.error, self.sampling)),
            _column("time", time, "1.00", drop=5),
            _column("passes", passes, exact_passes, drop=1),
        )
        rows = [None, *self.rows]
        code = "" if chosen is None else chosen.candidate.call
        return View(self.title, columns, rows, self._notes(), figure=self.plot, code=code)

    def _notes(self) -> list[str]:
        batches = f"{counted(self.batches, 'batch')} of {self.batch_size}"
        spread = "between batches" if self.batches > 1 else "of draws alone, as there is one batch"
        unsure = any(row.error_error > UNSURE * row.error for row in self.rows)
        by_chance = "; by chance it came out above the error, and is shown as 100%"
        is_above = any(row.variance > 1.005 * row.error for row in self.rows)
        chosen = "*: " if self.recommended is not None else "to be recommended: "
        passes = counted(self.batches * (self.draws - 1), "pass")
        spread_of_noise = _percent(self.sampling_error, self.sampling)
        noise = digits(self.sampling) + (f" ± {spread_of_noise}" if spread_of_noise else "")
        is_one_pair = self.batches > 1 and not math.isfinite(self.sampling_error)
        unknown = ", a single pair: only 4 batches or more show how exact this variance is"
        is_noisy = self.exact_seconds_most > NOISY * self.exact_seconds_least
        compiled = []
        if self.compiled_bytes is not None:
            compiled = [
                "compile: the error is the distance from the gradient of torch.compile's exact code, which saves "
                f"{amount(self.compiled_bytes)} and takes {self.compiled_seconds / self.exact_seconds:.2f} of the time"
            ]
        return [
            f"{self.unit[0]}: saved for the backward pass, metered",
            f"error: squared distance from the exact gradient, bias included (the squared gradient is "
            f"{digits(self.gradient)}), of {batches}, {self.draws} draws each; ±: its standard error, {spread}",
            f"random: the part of the error by which draws differ, an estimate{by_chance * is_above}",
            f"noise: the error over the variance between minibatches, which is {noise}, from {self.sampled}{unknown * is_one_pair}",
            f"{chosen}the fewest bytes with an error of at most {digits(100 * self.share)}% of that variance",
            *(["errors differ much between these batches: give more of them"] if unsure else []),
            f"time: median of {passes}, forward and backward, over that of exact ones, "
            f"{_seconds(self.exact_seconds)}, here ({self.device}); passes: the shortest to the longest. "
            "Bits that adapt take longer in the few steps that observe",
            *(
                [
                    "exact passes differ much in time, as if other programs ran: do not trust the times"
                ]
                if is_noisy
                else []
            ),
            *compiled,
        ]

    def _draw(self, figure) -> None:
        draw_plan(figure, self)


def _column(title: str, cell: Callable[[Planned], str], exact: str = "", **options) -> Column:
    return Column(title, lambda row: exact if row is None else cell(row), **options)


def _name(row: Planned) -> str:
    return f"{row.policy} at {row.label}" if row.policy else row.label


def _times(whole: int, part: int) -> str:
    if not part:
        return ""
    ratio = whole / part
    if ratio >= 1000:
        return ">999x"
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x" if ratio >= 0.01 else "<.01x"


def _percent(part: float, whole: float) -> str:
    if not (math.isfinite(part) and math.isfinite(whole) and whole > 0):
        return ""
    percent = 100 * part / whole
    if percent >= 10:
        return f"{percent:.0f}%" if percent < 1e5 else f"{percent:.0e}%"
    return f"{percent:.2g}%" if percent >= 1e-2 or not percent else "<.01%"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _row(planned: Planned) -> dict:
    values = {field.name: getattr(planned, field.name) for field in fields(planned)}
    return values | {"candidate": planned.candidate.to_dict()}


def _values(cls, document: dict) -> dict:
    values = {field.name: document[field.name] for field in fields(cls)}
    for field in fields(cls):
        if field.type == "int":
            values[field.name] = int(values[field.name])
        if field.type == "float" and values[field.name] is None:
            values[field.name] = math.nan
    return values
