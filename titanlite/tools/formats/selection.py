"""Selects the weights of a checkpoint that are opened.

It imports no torch, because commands read their options before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The weights to open at a path, and their model's shape if the files do not state it."""

    step: int | None = None  # one of a run's checkpoints; None: the newest
    weights: str = "model"  # of a run: its own, or "ema", their average
    model: str = ""  # a flavor or a model.json, for files without the model's shape
    adapter: Path | None = None  # a run with adapters or PEFT's folder, to add to the weights


NEWEST = Selection()
