"""Settings that name files which a run needs only under a condition.

Imports no torch, so the launcher finds a wrong path before it prepares data.
"""

from __future__ import annotations

from pathlib import Path

from titanlite.config.mistakes import hub_advice
from titanlite.config.schema import Config
from titanlite.runtime.errors import ConfigError


def require_initial_load(config: Config) -> None:
    """Raises ConfigError if the weights that a run begins with are not there.

    A run that has a checkpoint needs them only under adapters.
    """
    path = config.checkpoint.initial_load
    if config.lora.rank > 0 and not path:
        raise ConfigError(
            f"lora.rank = {config.lora.rank}: adapters are added to a trained model; expected its "
            "path in checkpoint.initial_load"
        )
    saved = Path(config.run.folder, config.run.name, "checkpoints").glob("step-*")
    is_needed = config.lora.rank > 0 or not any(saved)
    if path and is_needed and not Path(path).exists():
        raise ConfigError(
            f"checkpoint.initial_load = {path!r}: no such file or folder{hub_advice(path)}"
        )
