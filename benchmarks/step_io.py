"""Saves and loads a step folder without a run, as the checkpoint manager does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from titanlite.checkpoint.manifest import Manifest, RunMetadata
from titanlite.checkpoint.planner import PlacementLoadPlanner, PlacementSavePlanner
from titanlite.checkpoint.storage import StepReader, StepWriter
from titanlite.distributed.process_group import checkpoint_group

FACTS = RunMetadata({}, {"training": {"seq_len": 8192}}, "")


def save(
    folder: Path,
    step: int,
    state: dict[str, dict[str, Any]],
    planner: PlacementSavePlanner,
    files: dict[str, bytes] | None = None,
) -> None:
    """Saves the state as `step` in a `checkpoints` folder."""
    writer = StepWriter(folder, step, planner, files or {}, FACTS)
    dcp.save(state, storage_writer=writer, planner=planner, process_group=checkpoint_group())


def load(folder: Path, manifest: Manifest, state: dict[str, dict[str, Any]]) -> None:
    """Fills the tensors of the state from a step's folder."""
    reader = StepReader(folder, manifest)
    planner = PlacementLoadPlanner()
    dcp.load(state, storage_reader=reader, planner=planner, process_group=checkpoint_group())
