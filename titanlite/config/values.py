"""Checks a config value against its key's type, bounds and choices.

What it is: `convert` checks a value as TOML or JSON has it, `parse` reads the text of the command
line. Nothing is raised: a mistake is returned, so that all are reported together. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from titanlite.config.keys import Key
from titanlite.runtime.documents import parse_json

TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list of two numbers",
    list: "a list of tables, which only a TOML file can contain",
}
INTEGER = re.compile(r"\s*[+-]?[\d_]+\s*")
SURROGATE = re.compile("[\ud800-\udfff]")  # bytes that are not UTF-8 become these
LARGEST = 1 << 63  # TOML's integers have 64 bits


@dataclass(frozen=True)
class Mistake:
    """A mistake in a value, and the key at whose line it is reported."""

    section: str  # a section, or a table of an array, as data.sources[2]
    key: str  # a key in the section; empty: the header
    message: str


class Converted(NamedTuple):
    """A value in the type of its key, or the unchanged value and what was expected."""

    value: object
    expected: str  # empty: the value is valid


def convert(value: object, key: Key) -> Converted:
    """Checks a value; converts an integer to a float and a list of two to a tuple as needed."""
    expected = expected_type(key)
    if key.kind is tuple:
        return _convert_pair(value, key)
    if key.kind is int and isinstance(value, float):
        if not value.is_integer():
            return Converted(value, f"{expected} (1e9 is one)")
        value = int(value)
    if not _has_type(value, key.kind):
        return Converted(value, expected)
    if isinstance(value, str) and (SURROGATE.search(value) or "\0" in value):
        return Converted(value, "text in UTF-8, without NUL")
    if key.choices and value not in key.choices:
        return Converted(value, expected)
    if isinstance(value, (int, float)):
        allowed = _out_of_bounds(value, key)
        if allowed:
            return Converted(value, allowed)
    if key.kind is float and isinstance(value, (int, float)):
        return Converted(float(value), "")
    return Converted(value, "")


def expected_type(key: Key) -> str:
    """Describes the choices or the type of a key."""
    if key.is_list_of_strings:
        return "a list of strings"
    if key.choices:
        return "one of " + ", ".join(str(choice) for choice in key.choices)
    return TYPE_NAMES[key.kind]


def is_of_type(value: object, key: Key) -> bool:
    """Whether a value that any version of the program may have saved has the type of its key: its
    bounds and choices may have been others. Of a list of tables, only the list is checked.
    """
    if value is None:
        return key.default is None
    if key.words:  # such keys have been switches, or text, before
        return isinstance(value, (bool, str))
    if key.kind is tuple:
        return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    if key.kind is float:
        return _is_number(value)
    if key.is_list_of_strings:
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    return _has_type(value, key.kind)


def _is_number(value: object) -> bool:
    is_bool = isinstance(value, bool)  # which is an int in Python
    return isinstance(value, (int, float)) and not is_bool and math.isfinite(value)


def _convert_pair(value: object, key: Key) -> Converted:
    """Converts a list of two numbers to a tuple."""
    is_pair = isinstance(value, list) and len(value) == 2
    if not isinstance(value, list) or not is_pair:
        return Converted(value, TYPE_NAMES[tuple])
    if not all(_has_type(number, float) for number in value):
        return Converted(value, TYPE_NAMES[tuple])
    for number in value:
        allowed = _out_of_bounds(number, key)
        if allowed:
            return Converted(value, allowed)
    return Converted(tuple(float(number) for number in value), "")


def _has_type(value: object, declared: type) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python
        return declared is bool
    if declared is float:
        return isinstance(value, (int, float))
    return isinstance(value, declared)


def _out_of_bounds(number: float, key: Key) -> str:
    """Describes what is expected instead of a number out of bounds; empty if it is within them."""
    low = key.min
    high = key.max
    # `not >=` instead of `<`: NaN must fail both comparisons
    too_low = low is not None and not number >= low
    too_high = high is not None and not number <= high
    if too_low or too_high:
        bounds = []
        if low is not None:
            bounds.append(f"at least {low}")
        if high is not None:
            bounds.append(f"at most {high}")
        return f"{TYPE_NAMES[key.kind]}, {' and '.join(bounds)}"
    if isinstance(number, int) and abs(number) >= LARGEST:
        return f"{TYPE_NAMES[key.kind]} below 2**63"
    if key.kind is not int and not abs(number) < math.inf:
        return "a finite number"
    return ""


def parse(text: str, key: Key) -> object:
    """Parses a text on the command line; returns the text itself if the key's type does not fit."""
    if key.kind is list:
        return text  # `lists.py` reads it
    if key.kind is str:
        return text.lower() if text.lower() in key.words else text
    with contextlib.suppress(ValueError):  # `convert` then rejects the text
        if key.kind is int or key.kind is float:
            return int(text) if INTEGER.fullmatch(text) else float(text)
        value: object = parse_json(text.lower())
        return value
    return text
