"""Training runs on the ranks of the pool, and what they wrote."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import train


def train_run(arguments: list[str]) -> int:
    """Runs train.py with these arguments on this rank; returns the exit code.

    An unexpected error is raised.
    """
    from titanlite.config.load import load_config
    from titanlite.runtime.errors import ConfigError

    try:
        return train.main(load_config(arguments))
    except ConfigError as error:
        raise AssertionError(f"ConfigError: {error}") from error


def train_until(step: int, arguments: list[str]) -> int:
    """Runs train.py; rank 0 is sent SIGTERM when it begins the step after `step`."""
    import torch.distributed as dist

    from titanlite.data.stream import TrainStream

    original = TrainStream.next_step
    steps = iter(range(1, 1_000_000))

    def next_step(stream):
        if next(steps) == step and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(stream)

    TrainStream.next_step = next_step
    try:
        return train_run(arguments)
    finally:
        TrainStream.next_step = original


def samples_of_a_run(arguments: list[str], stop_after: int) -> tuple[list[int], list[int]]:
    """The numbers of the samples this rank trains on, and the exit code in a list."""
    from titanlite.data.order import Samples

    seen: list[int] = []
    original = Samples.pick

    def pick(samples, sample):
        seen.append(sample)
        return original(samples, sample)

    Samples.pick = pick
    try:
        return seen, [train_until(stop_after, arguments)]
    finally:
        Samples.pick = original


def rows(folder: Path) -> list[dict]:
    """The objects of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """step -> (loss, gradient norm). A step that was logged twice is an error."""
    steps = [row for row in rows(folder) if "loss" in row]
    assert len({row["step"] for row in steps}) == len(steps)
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in steps}


def validation(folder: Path) -> dict[int, float]:
    """step -> validation loss."""
    return {
        row["step"]: value
        for row in rows(folder)
        for key, value in row.items()
        if key.startswith("validation") and key.endswith("/loss")
    }
