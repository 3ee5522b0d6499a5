"""The text of `--help`: every key by section, with its type, default and help. Imports no torch."""

from __future__ import annotations

import itertools

from titanlite.config.keys import Key, all_keys, keys_of
from titanlite.config.load import flavors
from titanlite.config.mistakes import unknown_key, unknown_section
from titanlite.config.schema import sections
from titanlite.config.to_toml import toml_value
from titanlite.runtime.errors import ConfigError

HELP = ("-h", "--help")
USAGE = """usage: titanlite train [CONFIG] [--section.key=value ...]   (in a clone: ./run_train.sh)

  CONFIG                 a TOML file, a run's folder, or the name of a file in train_configs/
                         (default: debug)
                         flavors here: {flavors}
  --section.key=value    overrides a key; also `--section.key value`, and `--section.key` for true
  --help SECTION         lists the keys of a section, as in --help parallel
  --print-config         checks the configuration and prints it as TOML; trains nothing
  NGPU, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, LOG_RANK: see docs/running.md
"""


def help_text(argv: list[str]) -> str:
    """Lists every key by section, with its type, default and help; after `--help SECTION`, or
    `--help SECTION.KEY`, those of this section. Raises ConfigError if there is none.
    """
    lines = [USAGE.format(flavors=", ".join(flavors()))]
    shown = sections()
    for option, word in itertools.pairwise(argv):
        if option not in HELP or word.startswith("-"):
            continue
        section, dot, _ = word.partition(".")
        if dot and word not in all_keys():
            raise ConfigError(f"{option}: {unknown_key(word, all_keys())}")
        if section not in shown:
            allowed = ", ".join(shown)
            raise ConfigError(f"{option}: {unknown_section(section)}; allowed: {allowed}")
        lines = []
        shown = {section: shown[section]}
    for section, cls in shown.items():
        lines.append(f"[{section}]  {' '.join((cls.__doc__ or '').split())}")
        for key in keys_of(cls, f"{section}.").values():
            lines.append(f"  --{key.name}  {_kind(key)}  ({_default(key)})")
            lines.append(f"      {key.help}")
            if key.items and not key.is_list_of_strings:
                lines += _table_help(key.name, key.items)
        lines.append("")
    return "\n".join(lines)


def _table_help(name: str, cls: type) -> list[str]:
    """Lists the keys of an array of tables."""
    lines = [f"      only in a TOML file, as tables [[{name}]] with the keys"]
    for key in keys_of(cls).values():
        kind = "{ name = number }" if key.name == "weights" else _kind(key)
        lines.append(f"        {key.name}  {kind}  ({_default(key)}): {key.help}")
    return lines


def _default(key: Key) -> str:
    """Describes the value of a key that is not set."""
    if key.default is None:
        return "default the flavor's" if key.name.startswith("model.") else "no default"
    return f"default {toml_value(key.default)}"


def _kind(key: Key) -> str:
    """Describes the values that a key takes, in short."""
    if key.choices:
        return "|".join(str(choice) for choice in key.choices)
    if key.is_list_of_strings:
        return "[text,text,...]"
    if key.kind is list:
        return "tables"
    return "[number,number]" if key.kind is tuple else key.kind.__name__
