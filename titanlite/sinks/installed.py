"""Checks whether the libraries of `metrics.sinks` are installed. Imports no torch: the launcher
checks before torch is loaded.

Each is an extra of the package, because a run that writes metrics.jsonl alone needs none of them.
"""

from __future__ import annotations

import importlib.util

from titanlite.runtime.errors import ConfigError


def require_installed(sinks: tuple[str, ...]) -> None:
    """Raises ConfigError, with a pip command, if the library of a sink is not installed."""
    missing = [name for name in sinks if importlib.util.find_spec(name) is None]
    if missing:
        command = f"pip install {' '.join(missing)}"
        raise ConfigError(
            [f"metrics.sinks: {name} is not installed: {command}" for name in missing]
        )
