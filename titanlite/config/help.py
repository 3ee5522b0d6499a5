"""The text of `--help`: every key by section, with its type, default and help. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from titanlite.config.load import flavors, type_of
from titanlite.config.schema import sections
from titanlite.config.to_toml import toml_value

USAGE = """usage: titanlite train [CONFIG] [--section.key=value ...]      (./run_train.sh in a clone)

  CONFIG                 a TOML file, or the name of one in train_configs/ (default: debug)
                         flavors here: {flavors}
  --section.key=value    overrides a key; also `--section.key value`, and `--section.key` for true
  NGPU, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, LOG_RANK: environment variables, see docs/running.md
"""


def help_text() -> str:
    """Every key by section, with its type, default and help."""
    lines = [USAGE.format(flavors=", ".join(flavors()))]
    for section, cls in sections().items():
        lines.append(f"[{section}]  {(cls.__doc__ or '').strip()}")
        for f in dataclasses.fields(cls):
            name = f"{section}.{f.name}"
            default = toml_value(f.default)
            lines.append(
                f"  --{name}  {_kind(type_of(name), f)}  (default {default})\n      {f.metadata['help']}"
            )
            if type_of(name) is list and f.metadata["items"] is not str:
                lines += _table_help(name, f.metadata["items"])
        lines.append("")
    return "\n".join(lines)


def _table_help(name: str, cls: type) -> list[str]:
    """The keys of an array of tables."""
    lines = [f"      only in a TOML file, as tables [[{name}]] with the keys"]
    for f in dataclasses.fields(cls):
        kind = "{ name = number }" if f.name == "weights" else _kind(get_type_hints(cls)[f.name], f)
        lines.append(
            f"        {f.name}  {kind}  (default {toml_value(f.default)}): {f.metadata['help']}"
        )
    return lines


def _kind(declared: Any, f: dataclasses.Field[Any]) -> str:
    names = {
        tuple: "[number,number]",
        list: "[text,text,...]" if f.metadata["items"] is str else "tables",
    }
    return (
        "|".join(map(str, f.metadata["choices"])) or names.get(declared) or str(declared.__name__)
    )
