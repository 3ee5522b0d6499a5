"""Saves and loads states without a run, as the manager of checkpoints does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model_builder import build_stages, full

from titanlite.checkpoint.manifest import Manifest, RunMetadata
from titanlite.checkpoint.planner import PlacementLoadPlanner, PlacementSavePlanner
from titanlite.checkpoint.state import ModelState, OptimizerState
from titanlite.checkpoint.storage import StepReader, StepWriter, loading, saving
from titanlite.config.schema import EmaConfig, OptimizerConfig
from titanlite.data.rows import Batch
from titanlite.distributed.process_group import checkpoint_group
from titanlite.model.flavors import LlamaConfig
from titanlite.optim.ema import WeightEMA
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.stages import Stages


@contextmanager
def alone() -> Iterator[None]:
    """Silences the warning of DCP that there is no process group."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def write_step(
    folder: Path,
    step: int,
    state: dict[str, dict[str, Any]],
    files: dict[str, bytes],
    facts: RunMetadata,
    failure: Exception | None = None,
) -> Manifest | None:
    """Saves a step; returns its manifest on rank 0."""
    planner = PlacementSavePlanner()
    writer = StepWriter(folder, step, planner, files, facts, failure)
    with alone(), saving(step, folder):
        dcp.save(state, storage_writer=writer, planner=planner, process_group=checkpoint_group())
    return writer.manifest


def read_step(folder: Path, manifest: Manifest, state: dict[str, dict[str, Any]]) -> None:
    """Loads a step into the tensors of the state."""
    reader = StepReader(folder, manifest)
    with alone(), loading(folder):
        dcp.load(
            state,
            storage_reader=reader,
            planner=PlacementLoadPlanner(),
            process_group=checkpoint_group(),
        )


TOKENS = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(3))


def build(
    parallel: dict, seed: int, llama: LlamaConfig, name: str
) -> tuple[Stages, torch.optim.Optimizer, dict]:
    """Builds a model in some layout over all ranks, and its states. `name` is the optimizer's."""
    stages = build_stages(parallel, seed, llama)
    optimizer = build_optimizer(stages.model_parts, OptimizerConfig(name))
    states = {
        "model": ModelState(stages.model_parts),
        "optimizer": OptimizerState(stages.model_parts, optimizer),
        "ema": WeightEMA(EmaConfig(decay=0.9), stages.model_parts, optimizer),
    }
    return stages, optimizer, states


def everything(
    stages: Stages, optimizer: torch.optim.Optimizer, ema: WeightEMA
) -> dict[str, torch.Tensor]:
    """Whole weights, moments and averages of all parameters that this rank has a part of."""
    named = [pair for part in stages.model_parts for pair in part.named_parameters()]
    found: list[tuple[str, torch.Tensor]] = list(named)
    for name, average in zip(ema.names, ema.averages, strict=True):
        found.append((f"{name}.average", average))
    for name, parameter in named:
        for key, value in optimizer.state[parameter].items():
            found.append((f"{name}.{key}", value))
    # One rank may have both copies of a tied embedding, which must be equal
    return of_all_ranks([{name: full(value).detach().clone()} for name, value in found])


def save_after_a_step(
    folder: Path, parallel: dict, llama: LlamaConfig, name: str = "adamw"
) -> dict[str, torch.Tensor]:
    stages, optimizer, states = build(parallel, 0, llama, name)
    stages.forward_backward(Batch(TOKENS[:, :-1], TOKENS[:, 1:]), torch.tensor(32))
    states["ema"].start()
    optimizer.step()
    states["ema"].update()
    optimizer.zero_grad()
    state = {name: part.state_dict() for name, part in states.items()}
    write_step(folder, 1, state, {"note.txt": b"hello"}, RunMetadata({}, {}, ""))
    return everything(stages, optimizer, states["ema"])


def of_all_ranks(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Merges what the ranks have; where two have a tensor, it must be equal."""
    merged: dict[str, torch.Tensor] = {}
    for mine in found:
        for name, value in mine.items():
            assert torch.equal(merged.setdefault(name, value), value), name
    return merged
