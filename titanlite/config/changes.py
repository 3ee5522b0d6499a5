"""Reads values that change during a run, as in `16 from step 101, 64 by 8 from 4e9 tokens`.

What it is: the reader of `training.batch_ramp` and `schedule.milestones`.
Why it is here: such a list is one key with one line, which can also be set on the command line.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from titanlite.runtime.errors import ConfigError

NUMBER = r"(?:\d+(?:_\d+)*(?:\.\d+)?(?:e[+-]?\d{1,3})?)"
ENTRY = re.compile(
    rf"({NUMBER})(?: +by +({NUMBER}))? +from +(?:step +({NUMBER})|({NUMBER}) +tokens)"
)
MOST = 1 << 62


class Change(NamedTuple):
    """A value from some step on."""

    value: float
    increment: float  # the value grows in parts of this size; 0: at once
    step: int  # the first step with it, at least 2; 0 if it is given in tokens
    tokens: int  # the number of training tokens before it, more than 0; 0 if it is given as a step


def read_changes(key: str, text: str, example: str, increments: bool = False) -> list[Change]:
    """Parses the entries of the text, which is the value of `key`.

    Raises ConfigError with every entry that is wrong.
    """
    problems = []
    changes = []
    for part in text.split(","):
        entry = part.strip()
        change = _read_change(entry, increments)
        if change is None:
            problems.append(
                f"{key} = {text!r}: found {entry!r}; expected entries as in `{example}`"
            )
        elif change.step < 2 and not change.tokens:
            problems.append(
                f"{key} = {text!r}: {entry!r} is not after the first step; expected step 2 or later"
            )
        else:
            changes.append(change)
    if problems:
        raise ConfigError(problems)
    return changes


def _read_change(entry: str, increments: bool) -> Change | None:
    """Parses an entry; None if it is invalid, or has `by` where `increments` are not allowed."""
    match = ENTRY.fullmatch(entry)
    if not match:
        return None
    numbers = [float(number or 0) for number in match.groups()]
    value, increment, step, tokens = numbers
    if not step.is_integer() or not tokens.is_integer() or max(numbers) >= MOST:
        return None
    if match[2] and not (increments and increment):
        return None
    return Change(value, increment, int(step), int(tokens))


@functools.lru_cache(maxsize=8)
def milestones(text: str) -> tuple[Change, ...]:
    """Parses `schedule.milestones`. Cached, because each step reads it."""
    return tuple(
        read_changes("schedule.milestones", text, "0.316 from step 8001, 0.1 from 2e9 tokens")
    )
