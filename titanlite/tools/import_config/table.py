"""The tables of fields: what each field of another trainer becomes here.

What it is: a `Row` for each field that the other program reads, with the value that the program
takes where a config is silent. A row is one of four kinds: its value is copied to a key of ours,
or converted by a table or a function; it changes nothing at the values in `same` and is named in
the output at others; or other values make no file (`refuse`).
Why it is here: a field that is passed over in silence trains another model than the user asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titanlite.tools.import_config.draft import REQUIRED, Draft

ANY = "(any)"  # in `same`: no value changes anything


@dataclass(frozen=True)
class Row:
    """A field of another program, and what becomes of it."""

    theirs: str  # with its tables, as zero_optimization.stage
    ours: str = ""  # our keys, with spaces between them
    default: object = None  # the program's value where a config is silent
    note: str = ""  # how it is converted, or why it is not taken over
    values: Mapping[object, object] | None = None  # theirs -> ours; others make no file
    apply: Callable[[Draft], None] | None = None  # runs once for all of its rows
    same: tuple[object, ...] = ()  # values that change nothing here
    refuse: bool = False  # values that are not in `same` make no file


@dataclass(frozen=True)
class Format:
    """A trainer whose configs can be imported."""

    name: str  # of the option --format
    title: str
    version: str  # whose fields and defaults were read
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()  # what the program computes differently whatever its fields say
    whole: tuple[str, ...] = ()  # tables that one row reads


def by(
    apply: Callable[[Draft], None], ours: str, note: str, fields: str, under: str = ""
) -> list[Row]:
    """Rows of fields that one function reads together."""
    return [
        Row(name, ours, values[0], note, apply=apply)
        for name, values in read_fields(fields, under).items()
    ]


def leave(reason: str, fields: str, under: str = "") -> list[Row]:
    """Rows of fields that change nothing at these values, and are named in the output at others."""
    return [
        Row(name, "", same[0], reason, same=same)
        for name, same in read_fields(fields, under).items()
    ]


def must(reason: str, fields: str, under: str = "") -> list[Row]:
    """Rows of fields that change nothing at these values; others make no file."""
    return [
        Row(name, "", same[0], reason, same=same, refuse=True)
        for name, same in read_fields(fields, under).items()
    ]


def read_fields(text: str, under: str = "") -> dict[str, tuple[object, ...]]:
    """The values of each field: `a=1 b c=false|true` is 1, null, and false or true.

    The first value is the program's default. `under` is the table of all the fields.
    """
    fields = {}
    for word in text.split():
        name, _, values = word.partition("=")
        fields[under + name] = tuple(_read_value(value) for value in values.split("|"))
    return fields


def _read_value(text: str) -> object:
    """A value as JSON has it, a word of this module, or text."""
    words = {"": None, "required": REQUIRED, "any": ANY}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
