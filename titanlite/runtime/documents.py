"""Parses JSON and TOML within limits: the one place where text of a file becomes Python values.

What it is: `json` and `tomllib`, whose result has only integers of 64 bits and at most `DEEPEST`
levels. Everything wrong is a ValueError, also nesting on which a parser would recurse. A larger
integer is an error in TOML; in JSON it becomes a float, since transformers writes 10^30 where it
means "no limit".
Why it is here: both parsers accept integers of thousands of digits, in TOML also hexadecimal ones
that Python then refuses to print. The time and memory of `tomllib` grow with the square of the
parts of a dotted key: 64 kB take 4 GB, so the parts are counted before it runs.
What it costs: a tenth of a microsecond per integer, and for TOML half of the time again. Files are
read by `read_bounded`, which limits their bytes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from titanlite.runtime.files import read_bounded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEEPEST = 64  # levels of lists and tables, and parts of a TOML key
LARGEST = 1 << 63  # every integer is below it, and not below -LARGEST
MOST_TOML = 1 << 18  # bytes: 256 kB of the slowest valid lines take 3 s
INTEGER = "an integer of more than 64 bits"
DEEP = f"values nested more than {DEEPEST} levels deep"
# Strings and comments, then what can be between the parts of a key. Each alternative matches
# without its end too, so that no character is looked at twice.
TOML_TOKENS = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*(?:"{3,5}|\Z)'
    r"|'''(?:[^']|'{1,2}(?!'))*(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\.)*"?'
    r"|'[^'\n]*'?"
    r"|\#[^\n]*"
    r"|(?P<between>[\w \t-]+)"
    r"|(?P<dot>\.)"
    r"|(?P<other>[^\"'#\w \t.-]+)",
    re.DOTALL,
)


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(DEEP) from None
    _require_bounded(value)
    return value


def _json_integer(digits: str) -> int | float:
    if len(digits) > 20:
        return float(digits)
    number = int(digits)
    return number if -LARGEST <= number < LARGEST else float(number)


_DECODER = json.JSONDecoder(parse_int=_json_integer)


def read_json(path: Path, most: int = 1 << 24) -> Any:
    """Reads a JSON file of at most `most` bytes. Raises OSError or ValueError."""
    return parse_json(read_bounded(path, most))


def read_toml(path: Path, most: int = MOST_TOML) -> dict[str, Any]:
    """Reads a TOML file of at most `most` bytes. Raises OSError or ValueError."""
    return parse_toml(read_bounded(path, most).decode("utf-8-sig"))


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises ValueError."""
    if len(text) > MOST_TOML:
        raise ValueError(f"{len(text)} characters of TOML; expected at most {MOST_TOML}")
    dots = 0
    for token in TOML_TOKENS.finditer(text):
        if token["dot"]:
            dots += 1
        elif token["other"]:
            dots = 0
        if dots > DEEPEST:
            raise ValueError(f"a key of more than {DEEPEST} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(DEEP) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # Python's limit of an integer's digits, or an impossible date
        raise ValueError(INTEGER if "digits" in str(error) else str(error)) from None
    _require_bounded(table)
    return table


def _require_bounded(value: object) -> None:
    """Raises ValueError if an integer is too large or a value is nested too deeply."""
    level = [value]
    depth = 0
    while level:
        inner: list[object] = []
        for item in level:
            kind = type(item)
            if kind is int:
                if not -LARGEST <= item < LARGEST:  # type: ignore[operator]
                    raise ValueError(INTEGER)
            elif kind is dict or kind is list:
                if depth == DEEPEST:
                    raise ValueError(DEEP)
                values: Any = item.values() if kind is dict else item  # type: ignore[attr-defined]
                inner += values
        level = inner
        depth += 1
