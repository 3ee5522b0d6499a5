"""`titanlite train`: the command behind ./run_train.sh."""

from __future__ import annotations

from titanlite.tools.cli.launch import launch
from titanlite.tools.cli.options import wants_help


def run(argv: list[str]) -> int:
    """Launches training with the config in `argv`; returns the exit code."""
    return 0 if wants_help(argv) else launch(argv)
