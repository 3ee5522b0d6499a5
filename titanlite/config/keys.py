"""The schema's declaration of each key as an object: type, default, help, bounds and choices.

It also has the settings that a checkpoint and the resumed run must share, unless
`checkpoint.accept` names them. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from titanlite.config.mistakes import suggestion
from titanlite.config.schema import CheckpointConfig, Resume, sections


@dataclass(frozen=True)
class Key:
    """A key of a section or of an array of tables."""

    name: str  # as training.steps; without the section for a key of a table
    # bool, int, float, str, tuple (a pair of numbers; the weights of a phase) or list
    kind: type
    default: object  # None: absent, and the value is another key's or the flavor's
    help: str
    min: float | None
    max: float | None
    choices: tuple[object, ...]
    items: type | None  # for a list: str, or the dataclass of its tables
    resume: Resume  # whether a resumed run may have another value

    @property
    def is_list_of_strings(self) -> bool:
        return self.items is str

    @property
    def words(self) -> tuple[object, ...]:
        """The allowed words of a key that may stand without a value, as in `--compile.loss`."""
        if "true" in self.choices:
            return self.choices
        return ("true", "false") if self.kind is bool else ()


def keys_of(cls: type, prefix: str = "") -> dict[str, Key]:
    """Reads the keys that a dataclass of the schema declares, by name."""
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
    """Returns all keys by name, in the order of `--help`."""
    keys: dict[str, Key] = {}
    for section, cls in sections().items():
        keys |= keys_of(cls, f"{section}.")
    return keys


def all_keys() -> list[str]:
    """Lists the names of all keys, in the order of `--help`."""
    return list(schema_keys())


def setting(config: Any, name: str) -> Any:
    """Returns the value of a key such as `training.steps` in a config."""
    section, _, entry = name.partition(".")
    return getattr(getattr(config, section), entry)


# `data` stands for the sources: their names, weights, texts and validation texts
ACCEPTABLE = ("data", *(name for name, key in schema_keys().items() if key.resume == "same"))


def accept_problems(section: CheckpointConfig) -> Iterator[str]:
    """Yields a message for each name in `checkpoint.accept` that is not allowed there."""
    for accepted in section.accepted:
        if accepted in ACCEPTABLE:
            continue
        hint = suggestion(accepted, list(ACCEPTABLE))
        if accepted.startswith("data.source"):  # an error's name for a source
            hint = "; did you mean data?"
        yield f"checkpoint.accept: {accepted}: expected some of {', '.join(ACCEPTABLE)}{hint}"
