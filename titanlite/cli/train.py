"""`titanlite train`: what ./run_train.sh calls."""

from __future__ import annotations

from titanlite.cli.launch import launch
from titanlite.cli.options import wants_help


def run(argv: list[str]) -> int:
    """Trains with the config that `argv` describes; returns the exit code."""
    return 0 if wants_help(argv) else launch(argv)
