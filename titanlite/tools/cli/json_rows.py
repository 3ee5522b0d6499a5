"""Reads files of rows whole: the prompts of `titanlite generate`.

What it is: each line is a JSON object, or, in a file whose name ends with .txt, a text. One error
lists all wrong lines by number, before anything is computed. Lines end with a line feed; blank
lines are skipped. Training data, which may be of any size, is read by `tools/prepare/`.
What it costs: the file in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded

LARGEST = 1 << 28  # bytes of a file
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN = 6  # bad lines listed in an error


class JsonRow(NamedTuple):
    """A row, and the number of its line, from 1."""

    line: int
    values: dict[str, Any]


def read_rows(
    path: Path, problem_of: Callable[[dict[str, Any]], str], text_field: str = ""
) -> list[JsonRow]:
    """Reads the rows of a file, in its order.

    `problem_of` returns what is wrong with a row, or an empty text. `text_field`: the field that
    gets the line of a .txt file; empty: every file is JSON lines. Raises ConfigError.
    """
    try:
        content = read_bounded(path, LARGEST)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; expected a file of rows") from None
    plain = text_field != "" and path.suffix == ".txt"
    rows: list[JsonRow] = []
    problems: list[str] = []
    for number, line in enumerate(content.removeprefix(BYTE_ORDER_MARK).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = line.decode().removesuffix("\r")
            values = {text_field: text} if plain else json_object(text)
            problem = problem_of(values)
        except UnicodeDecodeError as error:
            problem = f"byte {error.start + 1} of the line is not UTF-8"
        except ValueError as error:
            problem = str(error)
        if problem:
            problems.append(f"{path}:{number}: {problem}")
        else:
            rows.append(JsonRow(number, values))
    raise_problems(problems)
    if not rows:
        raise ConfigError(f"{path}: has no rows")
    return rows


def raise_problems(problems: list[str]) -> None:
    """Raises ConfigError with the first problems of a file's lines, unless there are none."""
    if len(problems) > SHOWN:
        problems = [*problems[:SHOWN], f"and {len(problems) - SHOWN} more lines"]
    if problems:
        raise ConfigError(problems)


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError for anything else."""
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, at character {error.pos + 1}") from None
    except ValueError as error:  # also for huge numbers and deep nesting
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def text_problem(values: dict[str, Any], field: str) -> str:
    """Describes what is wrong with a field that must be a text; empty if nothing is."""
    if field not in values:
        return f"has no `{field}`; expected an object with that text"
    value = values[field]
    if not isinstance(value, str):
        return f"`{field}`: expected a text, found {type(value).__name__}"
    return ""
