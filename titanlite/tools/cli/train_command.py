"""`titanlite train`: the command behind ./run_train.sh.

`--print-config` checks the configuration, prints all its keys as TOML, and trains nothing.
"""

from __future__ import annotations

import sys

from titanlite.config.budget import warmup_problem
from titanlite.config.help import HELP, help_text
from titanlite.config.load import load_config
from titanlite.config.to_toml import to_toml
from titanlite.tools.cli.launch import launch

PRINT_CONFIG = "--print-config"


def run(argv: list[str]) -> int:
    """Launches training with the config in `argv`; returns the exit code."""
    if set(HELP) & set(argv):
        print(help_text(argv))
        return 0
    if PRINT_CONFIG in argv:
        config = load_config([word for word in argv if word != PRINT_CONFIG])
        print(to_toml(config), end="")  # which `load_config` reads back to the same config
        problem = warmup_problem(config)
        if problem:
            print(f"warning: {problem}", file=sys.stderr)
        return 0
    return launch(argv)
