"""How far predicted times are off, by GPU and kind of layout.

What it is: the form of the table in `fitted.py`, which `benchmarks/plan_rows.py` writes: for each
GPU with enough published measurements the rates that were fitted to half of them, and the errors on
the other half. A layout is of the kind of the axis that costs it most: pp, else tp or cp, else data
parallel. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("data parallel", "tp or cp", "pp")
MIN_ROWS = 3  # of a kind; with fewer the error of all kinds is shown


@dataclass(frozen=True)
class Error:
    """|predicted / measured - 1| of tokens per second, on rows that were not used in the fit."""

    median: float
    p90: float  # nine of ten rows are at most so far off
    rows: int


@dataclass(frozen=True)
class Fitted:
    """What is known about the speed of a GPU."""

    rates: tuple[float, float, float, float]  # of `step_time.Rates`
    rows: int
    error: Error
    by_kind: Mapping[str, Error]
    constant_mfu: float  # the median of the fitted half
    constant_error: Error  # of this one MFU for all layouts

    def error_of(self, kind: str) -> tuple[str, Error]:
        """A label and the error of this kind of layouts, or of all if the kind has few rows."""
        found = self.by_kind.get(kind)
        if found is None or found.rows < MIN_ROWS:
            return "all layouts", self.error
        return f"layouts with {kind}", found

    @property
    def constant_is_better(self) -> bool:
        return self.constant_error.median < self.error.median


def kind_of(degrees: Mapping[str, int]) -> str:
    """The kind of a layout."""
    if degrees["pp"] > 1:
        return KINDS[2]
    if degrees["tp"] * degrees["cp"] > 1:
        return KINDS[1]
    return KINDS[0]
