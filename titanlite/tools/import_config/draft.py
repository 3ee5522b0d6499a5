"""A config of titanlite in the making, which the table of a format fills.

What it is: the foreign values by dotted name, our settings so far, and three lists of texts: what
the user must decide, what is not taken over, and what makes no file. A file is written only if the
last list is empty, so no default of ours stands in for a shape or a layout of the other program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titanlite.config.keys import Key, schema_keys
from titanlite.config.lists import read_list
from titanlite.config.values import convert, parse

UNRESOLVED = re.compile(r"\$[\w{(]")  # a variable of a script
REQUIRED = "(required)"  # a default: the program refuses a config without the field
AUTO = "auto"  # DeepSpeed: TrainingArguments has the value


@dataclass(frozen=True)
class Setting:
    """A key of ours with its value, and where that comes from."""

    key: str
    value: object
    origin: str
    written: object  # the value as TOML has it: tables are dicts


@dataclass
class Draft:
    """The foreign values of a config, and what has become of them."""

    entries: Mapping[str, object]
    defaults: Mapping[str, object]  # the program's, of all fields
    processes: int = 0  # of the foreign run; 0: not known
    settings: dict[str, Setting] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # what is not taken over
    decisions: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """The foreign value, or the program's default; text that is a number as a number.

        None if the file does not have it: a variable, or a value of another file.
        """
        value = self.entries.get(name, self.defaults[name])
        if value in (REQUIRED, AUTO) or is_unresolved(value):
            return None
        return as_number(value)

    def number(self, name: str) -> float:
        """The value as a number; 0 if the field has none. Another value makes no file."""
        value = self.value(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 53:
            return value
        if value is not None:
            self.refuse(name, value, "expected a number")
        return 0

    def count(self, name: str) -> int:
        """The value as a whole number; 0 if the field has none, or one that is not above 0."""
        number = self.number(name)
        if number != int(number):
            self.refuse(name, number, "expected a whole number")
        return max(0, int(number))

    def on(self, name: str) -> bool:
        """Whether the value switches something on."""
        return self.value(name) not in (None, False, 0, "", "no", "none", "false", "False", [], {})

    def origin(self, names: str) -> str:
        """Those of the fields that the file has, for a comment; or that they have defaults."""
        given = [name for name in names.split() if name in self.entries]
        return ", ".join(given) if given else f"default of {', '.join(names.split())}"

    def set(self, key: str, value: object, names: str) -> None:
        """Gives our key a value that comes from these fields; a wrong one makes no file."""
        declared = schema_keys()[key]
        if is_unresolved(value):
            self.decide(f"{key}: {self.origin(names)} = {value} there, which is not resolved")
            return
        converted, expected = convert(fit(value, declared), declared)
        if declared.kind is list:
            converted, mistakes = read_list(value, declared)
            expected = "; ".join(mistake.message for mistake in mistakes)
        if expected:
            self.refuse(names, value, f"{key}: expected {expected}")
        else:
            written = value if declared.kind is list else converted
            self.settings[key] = Setting(key, converted, self.origin(names), written)

    def get(self, key: str) -> Any:
        """The value of our key so far."""
        if key in self.settings:
            return self.settings[key].value
        return schema_keys()[key].default

    def decide(self, text: str) -> None:
        """Notes what the user has to decide."""
        self.decisions.append(text)

    def leave(self, names: str, value: object, reason: str) -> None:
        """Notes a foreign value that is not taken over."""
        self.left.append(f"{self.origin(names)} = {short(value)}: {reason}")

    def refuse(self, names: str, value: object, reason: str) -> None:
        """Notes a foreign value for which no file is written."""
        self.refusals.append(f"{self.origin(names)} = {short(value)}: {reason}")

    def changed(self) -> list[Setting]:
        """The settings that differ from our defaults, in the order of the schema."""
        ours = schema_keys()
        chosen = [self.settings[name] for name in ours if name in self.settings]
        return [setting for setting in chosen if setting.value != ours[setting.key].default]


def short(value: object) -> str:
    """A value for a message."""
    return str(value)[:80]


def is_unresolved(value: object) -> bool:
    """Whether a value contains a variable whose value the file does not say."""
    return isinstance(value, str) and UNRESOLVED.search(value) is not None


def as_number(value: object) -> object:
    """Text that is a number as the number: YAML 1.1 reads 1e-5 as text."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
    return value


def fit(value: object, key: Key) -> object:
    """The value in the type of our key, where it has the same meaning."""
    if isinstance(value, str):
        return parse(value, key)
    if key.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if key.kind is str and isinstance(value, bool):
        return str(value).lower()
    if key.kind is str and isinstance(value, (int, float)):
        return str(value)
    return value
