"""A `Config` as TOML, as in the file in each run folder: the inverse of `load.py`.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from titanlite.config.schema import Config, sections


def toml_value(value: Any) -> str:
    """A value in TOML; JSON writes strings, numbers and lists the same way."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # (name, value) pairs
        return (
            "{ "
            + ", ".join(f"{toml_value(name)} = {toml_value(entry)}" for name, entry in value)
            + " }"
        )
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # the only control character that JSON does not escape


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML, which `load_config` reads back to the same `Config`."""
    return "\n".join(
        block for section in sections() for block in _blocks(section, getattr(config, section))
    )


def _blocks(name: str, section: Any) -> list[str]:
    """A section, and after it its arrays of tables."""
    # Whether tables
    keys = {f.name: f.metadata["items"] not in (None, str) for f in dataclasses.fields(section)}
    lines = [f"{key} = {toml_value(getattr(section, key))}\n" for key in keys if not keys[key]]
    tables = [
        (f"[{name}.{key}]", table) for key in keys if keys[key] for table in getattr(section, key)
    ]
    return [
        f"[{name}]\n" + "".join(lines),
        *(block for title, table in tables for block in _blocks(title, table)),
    ]
