"""`titanlite config`: checks a configuration and prints all its keys as TOML."""

from __future__ import annotations

from titanlite.cli.options import wants_help
from titanlite.config.load import load_config
from titanlite.config.text import to_toml


def run(argv: list[str]) -> int:
    """Prints TOML that `load_config` reads back to the same config."""
    if not wants_help(argv):
        print(to_toml(load_config(argv)), end="")
    return 0
