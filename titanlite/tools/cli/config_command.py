"""`titanlite config`: checks a configuration and prints all its keys as TOML."""

from __future__ import annotations

from titanlite.config.load import load_config
from titanlite.config.to_toml import to_toml
from titanlite.tools.cli.options import wants_help


def run(argv: list[str]) -> int:
    """Prints TOML that `load_config` reads back to the same config."""
    if not wants_help(argv):
        print(to_toml(load_config(argv)), end="")
    return 0
