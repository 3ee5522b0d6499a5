"""What the schema declares about each key, as one object: type, default, help, bounds and choices.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from titanlite.config.schema import sections


@dataclass(frozen=True)
class Key:
    """A key of a section or of an array of tables."""

    name: str  # training.steps, or without the section for a key of a table
    # bool, int, float, str, tuple (a pair of numbers; the weights of a phase) or list
    kind: type
    default: object  # None: absent, as a key of [model] that has the flavor's value
    help: str
    min: float | None
    max: float | None
    choices: tuple[object, ...]
    items: type | None  # of a list: str, or the dataclass of its tables
    resume: str = "any"  # whether a resumed run may have another value: see `schema.Resume`

    @property
    def is_list_of_strings(self) -> bool:
        return self.items is str

    @property
    def words(self) -> tuple[object, ...]:
        """The values of a key that can be given without a value, as `--compile.loss`."""
        if "true" in self.choices:
            return self.choices
        return ("true", "false") if self.kind is bool else ()


def keys_of(cls: type, prefix: str = "") -> dict[str, Key]:
    """The keys that a dataclass of the schema declares, by name."""
    hints = get_type_hints(cls)
    keys = {}
    for field in dataclasses.fields(cls):
        declared = hints[field.name]
        if field.default is None:  # int | None -> int
            (declared,) = (kind for kind in get_args(declared) if kind is not NoneType)
        # tuple[float, float] -> tuple
        declared = getattr(declared, "__origin__", declared)
        if field.metadata["items"]:
            declared = list
        name = prefix + field.name
        keys[name] = Key(name, declared, field.default, **field.metadata)
    return keys


@functools.cache
def schema_keys() -> dict[str, Key]:
    """All keys by name, in the order of `--help`."""
    keys: dict[str, Key] = {}
    for section, cls in sections().items():
        keys |= keys_of(cls, f"{section}.")
    return keys


def all_keys() -> list[str]:
    """The names of all keys, in the order of `--help`."""
    return list(schema_keys())


def setting(config: Any, name: str) -> Any:
    """The value of a key, as `training.steps`, in a config."""
    section, _, entry = name.partition(".")
    return getattr(getattr(config, section), entry)
