"""Writes a `Config` as TOML, for the file in each run folder: the inverse of `load.py`.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from titanlite.config.schema import Config, sections


def toml_value(value: object) -> str:
    """Writes a value in TOML; strings, numbers and lists look as in JSON."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # (name, value) pairs
        pairs = [f"{toml_value(name)} = {toml_value(entry)}" for name, entry in value]
        return "{ " + ", ".join(pairs) + " }"
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # the only control character that JSON does not escape


def to_toml(config: Config) -> str:
    """Writes the resolved config as TOML, which `load_config` reads back to the same `Config`."""
    blocks: list[str] = []
    for name in sections():
        blocks += _blocks(name, getattr(config, name))
    return "\n".join(blocks)


def _blocks(name: str, section: Any) -> list[str]:
    """Writes a section, and after it its arrays of tables."""
    lines = [f"[{name}]\n"]
    tables: list[str] = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value is None:  # absent
            continue
        # With epochs, the number of steps is unknown until the data is read
        if (name, field.name) == ("training", "steps") and section.epochs:
            continue
        if (name, field.name) == ("schedule", "warmup_steps") and section.warmup_ratio:
            continue
        if field.metadata["items"] in (None, str):
            lines.append(f"{field.name} = {toml_value(value)}\n")
        else:
            for table in value:
                tables += _blocks(f"[{name}.{field.name}]", table)
    return ["".join(lines), *tables]
