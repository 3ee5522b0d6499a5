"""The console: one line for each logged step, and on a terminal a table.

What it is: the plain line, which goes to log.txt and wherever the console is not a terminal, so
that scripts can read it; and a formatter for terminals, which shows the same figures as the rows of
a table in 80 columns, with a header from time to time instead of a name before each figure. In a
narrower terminal the least important columns are left out. Colours mark what needs attention:
warnings, a loss or norm that is not finite, and a long wait for data. They are left out if NO_COLOR
is set (no-color.org) or TERM is dumb.
What it costs: microseconds for each logged step. It is imported at the first log, or at the start
on a terminal.
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
# That of metrics.jsonl, with `eta` in seconds and `steps`, the number of steps of the run
Row = dict[str, Any]


def step_line(position: str, row: Row) -> str:
    """The plain line of a logged step."""
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1f}%"
    return (
        f"{position}  loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"tps {row['tps']:,.0f}  tflops {row['tflops']:.3g}  mfu {mfu}  memory {row['memory_gib']:.2f}GiB  "
        f"data {row['data_percent']:.1f}%  wait {row['data_wait_percent']:.1f}%  eta {duration(row['eta'])}"
    )


def duration(seconds: float) -> str:
    """1:05 for 65 seconds, 2:03:04 beyond an hour, with days in front beyond a day."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def short_duration(seconds: float) -> str:
    """The same, or days if it would be longer than 8 characters."""
    text = duration(seconds)
    return text if len(text) <= 8 else f"{seconds / 86400:.1f}d"


def short(value: float, digits: int, width: int) -> str:
    """The number with `digits` decimals, fewer if they do not fit into `width`."""
    for fewer in range(digits, -1, -1):
        text = f"{value:,.{fewer}f}"
        if len(text) <= width:
            return text
    return f"{value:.1e}" if width >= 7 else f"{value:.0e}"


def significant(value: float, width: int) -> str:
    """Three digits, also of a small number, or as many as fit into the width."""
    texts = (f"{value:#.3g}".rstrip("."), f"{value:#.2g}")
    least = f"{value:.0e}" if abs(value) < 1 else short(value, 3, width)
    return next((text for text in texts if len(text) <= width), least)


class Column(NamedTuple):
    """A column of the table. `importance`: those of the highest stay in a narrow terminal."""

    title: str
    width: int
    importance: int
    cell: Callable[[Row], str]
    colour: Callable[[Row], str] = lambda row: ""


def _alarm(key: str) -> Callable[[Row], str]:
    return lambda row: "" if math.isfinite(row[key]) else RED


def columns(row: Row) -> list[Column]:
    """All columns, at most 80 characters wide with the spaces between them up to 99,999 steps."""
    title = f"step/{row['steps']}"
    if row["mfu"] is None:
        speed = Column("TFLOPS", 6, 3, lambda row: significant(row["tflops"], 6))
    else:
        speed = Column("MFU", 6, 3, lambda row: f"{row['mfu']:.1f}%")
    return [
        Column(title, max(9, len(title)), 9, lambda row: str(row["step"])),
        Column("loss", 8, 8, lambda row: short(row["loss"], 4, 8), _alarm("loss")),
        Column("grad_norm", 9, 5, lambda row: short(row["grad_norm"], 3, 9), _alarm("grad_norm")),
        Column("lr", 8, 4, lambda row: f"{row['lr']:.2e}"),
        Column("tps", 7, 6, lambda row: short(row["tps"], 0, 7)),
        speed,
        Column("GiB", 5, 2, lambda row: short(row["memory_gib"], 2, 5)),
        Column("data", 6, 1, lambda row: short(row["data_percent"], 1, 5) + "%"),
        Column(
            "wait",
            4,
            0,
            lambda row: f"{row['data_wait_percent']:.0f}%",
            lambda row: YELLOW if row["data_wait_percent"] > LONG_WAIT else "",
        ),
        Column("eta", 8, 7, lambda row: short_duration(row["eta"])),
    ]


def fitting(found: list[Column], room: int) -> list[Column]:
    """The most important of these columns that fit into so many characters, and at least step and
    loss.
    """
    while len(found) > 2 and sum(column.width + 1 for column in found) - 1 > room:
        found = [column for column in found if column.importance > min(c.importance for c in found)]
    return found


class TableFormatter(logging.Formatter):
    """Formats records for a terminal: those with a `row` or a `validation` as rows of a table,
    others as they are.
    """

    def __init__(self, prefix: str) -> None:
        """`prefix` comes before every line."""
        super().__init__(f"{prefix}%(message)s")
        self.prefix = prefix
        self.coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        self._shown: list[str] = []  # titles of the last header
        self._rows = HEADER_EVERY  # since then
        self._interrupted = False

    def format(self, record: logging.LogRecord) -> str:
        row = getattr(record, "row", None)
        if row:
            return self._step(row)
        found = getattr(record, "validation", None)
        if found:
            self._rows += 1
            return self._line(self._paint(validation_row(min(80, self._room), *found), BOLD))
        self._interrupted = True
        colour = (
            RED
            if record.levelno >= logging.ERROR
            else YELLOW
            if record.levelno >= logging.WARNING
            else ""
        )
        return self._paint(super().format(record), colour)

    @property
    def _room(self) -> int:
        return max(24, shutil.get_terminal_size().columns - len(self.prefix))

    def _step(self, row: Row) -> str:
        shown = fitting(columns(row), min(80, self._room))
        cells = [self._paint(c.cell(row).rjust(c.width), c.colour(row)) for c in shown]
        titles = [column.title.rjust(column.width) for column in shown]
        lines = [self._line(" ".join(cells))]
        again = self._interrupted and self._rows >= HEADER_AGAIN
        if titles != self._shown or self._rows >= HEADER_EVERY or again:
            lines.insert(0, self._line(self._paint(" ".join(titles), DIM)))
            self._shown = titles
            self._rows = 0
            self._interrupted = False
        self._rows += 1
        return "\n".join(lines)

    def _line(self, text: str) -> str:
        return self.prefix + text

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{END}" if colour and self.coloured else text


def validation_row(room: int, step: int, steps: int, name: str, values: dict[str, float]) -> str:
    """A row in which the loss is in the column of the losses; as much of it as fits into `room`
    characters.
    """
    width = max(9, len(f"step/{steps}"))
    loss = next(value for key, value in values.items() if key.endswith("loss"))
    text = f"{step:>{width}} {short(loss, 4, 8):>8}  validation {printable(name)[:24]}"
    text += "  averaged weights" if "ema_loss" in values else ""
    for key, title, digits in (("bits_per_byte", "bits/byte", 3), ("perplexity", "perplexity", 1)):
        if (
            key in values
            and len(more := f"{text}  {title} {short(values[key], digits, 6)}") <= room
        ):
            text = more
    return text[:room]
