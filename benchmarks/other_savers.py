"""Saves with other programs' checkpointers, with DCP's planner and with PlacementSavePlanner.

    python benchmarks/other_savers.py

What it is: two processes train a small model under FSDP2 for two steps and save after each with the
program's own functions: torchtitan's CheckpointManager in its three modes (in the last one, another
process saves), with its optimizers, schedule and data loader, and accelerate's functions for FSDP2.
The program loads the last save into a model of another seed, and every value of the state is
compared bit by bit.
What it costs: two minutes on two free cores, and it needs a package index: torchtitan is installed
in an environment of its own, as `interop.py` does. Without CUDA, torchtitan's last mode stages
without pinned memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interop import environment
from torch import Tensor, nn
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from titanlite.checkpoint.planner import PlacementSavePlanner

PACKAGES = (
    "torchtitan==0.3.0",
    "spmd_types==0.2.3",
    "torchdata==0.11.0",
    "tyro==1.0.17",
    "docstring-parser==0.18.0",
    "typeguard==4.6.1",
)
CASES = [f"torchtitan {mode}" for mode in ("disabled", "async", "async_with_pinned_mem")]
CASES.append("accelerate")
PLANNERS = ["DCP's", "PlacementSavePlanner"]


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder) / "environment", PACKAGES)
        for case, planner in itertools.product(CASES, PLANNERS):
            target = Path(folder) / f"{case}, {planner}"
            target.mkdir()
            launch = [str(python), "-m", "torch.distributed.run", "--nproc-per-node=2", __file__]
            variables = os.environ | {"PYTHONPATH": str(report.ROOT), "OMP_NUM_THREADS": "1"}
            command = [*launch, case, planner, str(target)]
            done = subprocess.run(command, capture_output=True, text=True, env=variables)
            answers = [json.loads(path.read_text()) for path in sorted(target.glob("*.json"))]
            if len(answers) < 2:
                print(done.stderr[-3000:], file=sys.stderr)
                answers = ["failed"]
            results[f"{case}, {planner}"] = answers[0] if len(set(answers)) == 1 else str(answers)
            print(case, planner, results[f"{case}, {planner}"], file=sys.stderr)
    body = ["| saved by | " + " | ".join(PLANNERS) + " |", "|---|---|---|"]
    for case in CASES:
        cells = [results[f"{case}, {planner}"] for planner in PLANNERS]
        body.append(f"| {case} | " + " | ".join(cells) + " |")
    report.write("other_savers", "Other programs' checkpoints by two planners", body, results)


class Numbers(IterableDataset[Tensor]):
    """Batches whose position is saved."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            yield torch.full((2, 8), float(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def sharded_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    fully_shard(model)
    return model


def copied(*states: dict[str, Any]) -> list[Any]:
    """Returns this rank's parts of all values, as numbers."""
    values = []
    for name, value in sorted(itertools.chain(*(state.items() for state in states))):
        local = value.to_local() if isinstance(value, DTensor) else value
        values.append((name, local.tolist() if isinstance(local, Tensor) else local))
    return values


def compared(saved: list[Any], before: list[Any], loaded: list[Any]) -> str:
    """Says whether the values are as saved, after the load and not before it."""
    assert before != saved
    return f"{len(saved)} values, equal" if loaded == saved else "OTHER VALUES"


def torchtitan(mode: str, folder: Path) -> str:
    # Kernels in triton, which is not installed on a CPU
    absent = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[absent] = MagicMock(name=absent)
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    def build(seed: int) -> tuple[Any, ...]:
        model = sharded_model(seed)
        optimizers = default_adamw(3e-3).build(model_parts=[model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        schedulers = schedule.build(optimizers=optimizers, training_steps=10)
        loader = ParallelAwareDataloader(
            Numbers(), dist.get_rank(), dist.get_world_size(), batch_size=None
        )
        manager = CheckpointManager(
            CheckpointManager.Config(enable=True, interval=1, async_mode=mode),
            dataloader=loader,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )
        if not torch.cuda.is_available():
            options = StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False)
            manager.stager = DefaultStager(options)
        return model, optimizers, schedulers, loader, manager

    *parts, manager = build(0)
    model, optimizers, schedulers, loader = parts
    batches = iter(loader)
    for step in (1, 2):
        model(next(batches)).sum().backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        manager.save(step)
        manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    saved = copied(*(part.state_dict() for part in parts))
    *parts, manager = build(1)
    before = copied(*(part.state_dict() for part in parts))
    manager.load()
    return compared(saved, before, copied(*(part.state_dict() for part in parts)))


def accelerate(folder: Path) -> str:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, utils

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")

    def build(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sharded_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def values() -> list[Any]:
        moments = optimizer.state_dict()["state"]
        named = ({f"{i}.{k}": v for k, v in moment.items()} for i, moment in moments.items())
        return copied(model.state_dict(), *named)

    model, optimizer = build(0, steps=2)
    utils.save_fsdp_model(plugin, accelerator, model, folder)
    utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    saved = values()
    model, optimizer = build(1, steps=1)
    before = values()
    utils.load_fsdp_model(plugin, accelerator, model, folder)
    utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    return compared(saved, before, values())


def save_and_load(case: str, planner: str, folder: Path) -> None:
    """Runs a case on this rank and writes the answer into the folder."""
    dist.init_process_group("gloo")
    if planner != PLANNERS[0]:
        # The lines of docs/checkpoints.md
        ours = PlacementSavePlanner()
        dcp.save = functools.partial(dcp.save, planner=ours)
        dcp.async_save = functools.partial(dcp.async_save, planner=ours)
        default_planner.DefaultSavePlanner = PlacementSavePlanner  # type: ignore[misc, assignment]
    program, _, mode = case.partition(" ")
    answer = accelerate(folder) if program == "accelerate" else torchtitan(mode, folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(answer))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the process of torchtitan's last mode is a child of this one


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        save_and_load(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
