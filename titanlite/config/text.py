"""A `Config` as text: `--help`, and the TOML file in each run folder.

What it is: the inverse of `load.py`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from titanlite.config.load import flavors, type_of
from titanlite.config.schema import Config, sections

USAGE = """usage: titanlite train [CONFIG] [--section.key=value ...]      (./run_train.sh in a clone)

  CONFIG                 a TOML file, or the name of one in train_configs/ (default: debug)
                         flavors here: {flavors}
  --section.key=value    overrides a key; also `--section.key value`, and `--section.key` for true
  NGPU, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, LOG_RANK: environment variables, see README.md
"""


def help_text() -> str:
    """Every key by section, with its type, default and help."""
    lines = [USAGE.format(flavors=", ".join(flavors()))]
    for section, cls in sections().items():
        lines.append(f"[{section}]  {(cls.__doc__ or '').strip()}")
        for f in dataclasses.fields(cls):
            declared = type_of(f"{section}.{f.name}")
            name = "[number,number]" if declared is tuple else getattr(declared, "__name__", "")
            kind = "|".join(map(str, f.metadata["choices"])) or name
            lines.append(f"  --{section}.{f.name}  {kind}  (default {_toml(f.default)})\n      {f.metadata['help']}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """A value in TOML; JSON writes strings, numbers and lists the same way."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # the only control character that JSON does not escape


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML, which `load_config` reads back to the same `Config`."""
    blocks = []
    for section in sections():
        entries = dataclasses.asdict(getattr(config, section))
        blocks.append(f"[{section}]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in entries.items()))
    return "\n".join(blocks)
