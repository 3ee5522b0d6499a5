"""The console: prints a line for each logged step, or on a terminal a table.

What it is: a plain line for log.txt, and for the console if that is not a terminal, so that scripts
can read it; and a formatter for terminals, which shows the same figures as the rows of a table in
80 columns, with a header from time to time instead of a name before each figure. In a narrower
terminal the least important columns are left out. Colours mark what needs attention:
warnings, a loss or norm that is not finite, and a long wait for data. They are left out if NO_COLOR
is set (no-color.org) or TERM is dumb.
What it costs: microseconds for each logged step.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

from titanlite.runtime.errors import printable

HEADER_EVERY = 20  # rows
# Rows after which a header is repeated if another message has interrupted the table
HEADER_AGAIN = 5
LONG_WAIT = 10.0  # percent of the time
BOLD = "\x1b[1m"
DIM = "\x1b[2m"
RED = "\x1b[1;31m"
YELLOW = "\x1b[33m"
END = "\x1b[0m"
WIDEST = 80  # characters of a row

# A row of metrics.jsonl, plus `eta` in seconds and `steps`, the number of steps of the run
Row = dict[str, Any]


def step_line(position: str, row: Row) -> str:
    """Formats the plain line of a logged step."""
    mfu = "n/a"
    if row["mfu"] is not None:
        mfu = f"{row['mfu']:.1f}%"
    loss = "n/a"  # a step without targets
    norm = "n/a"
    if row["loss"] is not None:
        loss = f"{row['loss']:.4f}"
        norm = f"{row['grad_norm']:.3f}"
    return (
        f"{position}  "
        f"loss {loss}  "
        f"grad_norm {norm}  "
        f"lr {row['lr']:.2e}  "
        f"tps {row['tps']:,.0f}  "
        f"tflops {row['tflops']:.3g}  "
        f"mfu {mfu}  "
        f"memory {row['memory_gib']:.2f}GiB  "
        f"epoch {row['data_percent'] / 100:.2f}  "
        f"wait {row['data_wait_percent']:.1f}%  "
        f"eta {remaining(row['eta'], duration)}"
    )


def duration(seconds: float) -> str:
    """Formats seconds: 1:05 for 65, 2:03:04 from an hour on, with days in front from a day on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{minutes}:{seconds:02}"
    if hours or days:
        clock = f"{hours}:{minutes:02}:{seconds:02}"
    if days:
        return f"{days} d {clock}"
    return clock


def short_duration(seconds: float) -> str:
    """Formats as `duration` does, or in days if that would be longer than 8 characters."""
    text = duration(seconds)
    if len(text) > 8:
        return f"{seconds / 86400:.1f}d"
    return text


def remaining(seconds: float | None, show: Callable[[float], str]) -> str:
    """Formats the remaining time; None, while only steps that compiled have been timed."""
    if seconds is None:
        return "compiling"
    return show(seconds)


def fixed(value: float | None, digits: int, width: int) -> str:
    """Formats a number with `digits` decimals, or fewer if they do not fit into `width`; None, an
    undefined one, is n/a.
    """
    if value is None:
        return "n/a"
    while digits >= 0:
        text = f"{value:,.{digits}f}"
        if len(text) <= width:
            return text
        digits -= 1
    if width >= 7:
        return f"{value:.1e}"
    return f"{value:.0e}"


def significant(value: float, width: int) -> str:
    """Formats a number with three significant digits, or as many as fit into the width."""
    for text in (f"{value:#.3g}".rstrip("."), f"{value:#.2g}"):
        if len(text) <= width:
            return text
    if abs(value) < 1:
        return f"{value:.0e}"
    return fixed(value, 3, width)


class Column(NamedTuple):
    """A column of the table. A narrow terminal keeps the columns of the highest `importance`."""

    title: str
    width: int
    importance: int
    cell: Callable[[Row], str]
    colour: Callable[[Row], str] = lambda row: ""


def red_unless_finite(key: str) -> Callable[[Row], str]:
    """Returns the colour function of a figure that must be finite where it is defined."""

    def colour(row: Row) -> str:
        if row[key] is None or math.isfinite(row[key]):
            return ""
        return RED

    return colour


def yellow_if_long(row: Row) -> str:
    """Returns the colour of the wait for data."""
    if row["data_wait_percent"] > LONG_WAIT:
        return YELLOW
    return ""


def columns(row: Row) -> list[Column]:
    """Builds all columns; up to 99,999 steps they take at most 80 characters with the spaces."""
    title = f"step/{row['steps']}"
    speed = Column("TFLOPS", 6, 3, lambda row: significant(row["tflops"], 6))
    if row["mfu"] is not None:
        speed = Column("MFU", 6, 3, lambda row: f"{row['mfu']:.1f}%")
    return [
        Column(title, max(9, len(title)), 9, lambda row: str(row["step"])),
        Column("loss", 8, 8, lambda row: fixed(row["loss"], 4, 8), red_unless_finite("loss")),
        Column(
            "grad_norm",
            9,
            5,
            lambda row: fixed(row["grad_norm"], 3, 9),
            red_unless_finite("grad_norm"),
        ),
        Column("lr", 8, 4, lambda row: f"{row['lr']:.2e}"),
        Column("tps", 7, 6, lambda row: fixed(row["tps"], 0, 7)),
        speed,
        Column("GiB", 5, 2, lambda row: fixed(row["memory_gib"], 2, 5)),
        Column("epoch", 5, 1, lambda row: fixed(row["data_percent"] / 100, 2, 5)),
        Column("wait", 4, 0, lambda row: f"{row['data_wait_percent']:.0f}%", yellow_if_long),
        Column("eta", 9, 7, lambda row: remaining(row["eta"], short_duration)),
    ]


def fitting(columns: list[Column], width: int) -> list[Column]:
    """Selects the most important columns that fit into `width` characters.

    Step and loss are always among them.
    """

    def total_width() -> int:
        return sum(column.width + 1 for column in columns) - 1

    while len(columns) > 2 and total_width() > width:
        least = min(column.importance for column in columns)
        columns = [column for column in columns if column.importance > least]
    return columns


class TableFormatter(logging.Formatter):
    """Formats records for a terminal: records with a `row` or a `validation` as rows of a table,
    others as they are.
    """

    def __init__(self, prefix: str) -> None:
        """`prefix` comes before every line."""
        super().__init__(f"{prefix}%(message)s")
        self.prefix = prefix
        dumb = os.environ.get("TERM", "dumb") == "dumb"
        self.coloured = not os.environ.get("NO_COLOR") and not dumb
        self._titles: list[str] = []  # titles in the last header
        self._rows = HEADER_EVERY  # rows since the last header
        self._interrupted = False

    def format(self, record: logging.LogRecord) -> str:
        row = getattr(record, "row", None)
        if row is not None:
            return self._step(row)
        validation = getattr(record, "validation", None)
        if validation is not None:
            self._rows += 1
            return self.prefix + self._paint(validation_row(self._width, *validation), BOLD)
        self._interrupted = True
        text = super().format(record)
        if record.levelno >= logging.ERROR:
            return self._paint(text, RED)
        if record.levelno >= logging.WARNING:
            return self._paint(text, YELLOW)
        return text

    @property
    def _width(self) -> int:
        """Returns the characters of a row, without the prefix."""
        terminal = shutil.get_terminal_size().columns
        return min(WIDEST, max(24, terminal - len(self.prefix)))

    def _step(self, row: Row) -> str:
        shown = fitting(columns(row), self._width)
        cells = [
            self._paint(column.cell(row).rjust(column.width), column.colour(row))
            for column in shown
        ]
        titles = [column.title.rjust(column.width) for column in shown]
        lines = [self.prefix + " ".join(cells)]
        again = self._interrupted and self._rows >= HEADER_AGAIN
        if titles != self._titles or self._rows >= HEADER_EVERY or again:
            header = self._paint(" ".join(titles), DIM)
            lines.insert(0, self.prefix + header)
            self._titles = titles
            self._rows = 0
            self._interrupted = False
        self._rows += 1
        return "\n".join(lines)

    def _paint(self, text: str, colour: str) -> str:
        if colour and self.coloured:
            return f"{colour}{text}{END}"
        return text


def validation_row(
    width: int, step: int, num_steps: int, name: str, values: dict[str, float]
) -> str:
    """Formats a row with the validation loss in the column of the losses.

    The row is cut to `width` characters.
    """
    step_width = max(9, len(f"step/{num_steps}"))
    loss = next(value for key, value in values.items() if key.endswith("loss"))
    text = f"{step:>{step_width}} {fixed(loss, 4, 8):>8}  validation {printable(name)[:24]}"
    if "ema_loss" in values:
        text += "  averaged weights"
    for key, title, digits in (("bits_per_byte", "bits/byte", 3), ("perplexity", "perplexity", 1)):
        if key in values:
            longer = f"{text}  {title} {fixed(values[key], digits, 6)}"
            if len(longer) <= width:
                text = longer
    return text[:width]
