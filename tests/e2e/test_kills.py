"""The campaign, third part: processes are killed at random moments, with every feature that adds to
the state.

    ALL_KILLS=1 ./run_tests.sh -m slow -s tests/e2e/test_kills.py     210 kills; without ALL_KILLS a sample of 20

`test_faults.py` kills at named points of a save. Here a kill comes at any moment: while a
checkpoint is loaded, in a step, during a validation, a save, a rollback or a deletion. It hits one
rank or all.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from bad_steps import nan_with
from runs import rows, train_run

from titanlite.checkpoint.folders import list_steps, step_folder
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import read_manifest
from titanlite.checkpoint.step_files import verify_files
from titanlite.data.stream import TrainStream
from titanlite.tools.verify.pool import Pool, WorkerError

pytestmark = pytest.mark.slow

KILLS = 5  # of each run
BAD = 35  # this sample gives a NaN, in step 5
FEATURES = {
    "adamw": [],
    "ema": ["--ema.decay=0.9"],
    "muon": ["--optimizer.name=muon"],
    "float16": [
        "--training.compute_dtype=float16",
        "--training.loss_scale=16777216",
        "--training.seq_len=16",
    ],
    "skip": ["--stability.action=skip", "--stability.threshold=50", "--stability.window=16"],
    "rollback": ["--stability.action=rollback"],
    "all": [
        "--ema.decay=0.9",
        "--optimizer.name=muon",
        "--stability.action=rollback",
        "--metrics.noise_scale_freq=3",
        # So that a step has two local batches on each of four ranks
        "--training.local_batch_size=1",
    ],
}
CASES = [
    (feature, processes, mode)
    for feature in FEATURES
    for processes in (1, 2, 4)
    for mode in ("disabled", "async")
]
SAMPLE = [
    ("all", 2, "async"),
    ("rollback", 1, "disabled"),
    ("float16", 2, "disabled"),
    ("skip", 1, "async"),
]
LASTING = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "loss_scale",
    "skipped_steps",
    "bad_steps",
    "rollbacks",
)


def run_arguments(options: list[str], folder: Path, feature: str, mode: str) -> list[str]:
    steps = [
        "--training.steps=16",
        "--checkpoint.freq=2",
        "--checkpoint.keep=1",
        "--validation.freq=4",
    ]
    reduce = ["--parallel.reduce_every_microbatch"]  # the noise scale needs it
    return [
        *options,
        f"--run.folder={folder}",
        *steps,
        *reduce,
        f"--checkpoint.async_mode={mode}",
        *FEATURES[feature],
    ]


def train_with_nan(arguments: list[str]) -> int:
    """A run to its end. With [stability] one step is not finite."""
    if not any("stability" in argument for argument in arguments):
        return train_run(arguments)
    with nan_with(BAD, 0, "loss"):
        return train_run(arguments)


def train_and_die(arguments: list[str], seed: int) -> int:
    """The same, until SIGKILL at a random moment of loading, or of one of the first steps of this
    process.
    """
    chance = random.Random(seed)  # the same on all ranks
    victim = chance.choice([None, *range(dist.get_world_size())])  # None: all
    after, delay = chance.randrange(6), chance.uniform(0, 0.03 * dist.get_world_size())
    steps = [0]
    load, next_step = Checkpointer.load, TrainStream.next_step

    def count() -> None:
        if steps[0] == after and victim in (None, dist.get_rank()):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        steps[0] += 1

    def counted_load(checkpointer: Checkpointer) -> bool:
        count()
        return load(checkpointer)

    def counted_step(stream: TrainStream) -> Any:
        count()
        return next_step(stream)

    Checkpointer.load, TrainStream.next_step = counted_load, counted_step
    return train_with_nan(arguments)


def lasting(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock or the machine."""
    return [
        {
            key: value
            for key, value in row.items()
            if key in LASTING or key.startswith("validation/")
        }
        for row in rows(folder)
    ]


@pytest.fixture(scope="module")
def undisturbed(pool, options, tmp_path_factory):
    """(feature, processes) -> the rows of a run that nothing happens to."""
    known: dict[tuple[str, int], list[dict]] = {}

    def find(feature: str, processes: int) -> list[dict]:
        if (feature, processes) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            run = run_arguments(options, folder, feature, "disabled")
            assert pool.run(processes, train_with_nan, run, timeout=120) == [0] * processes
            known[feature, processes] = lasting(folder / "debug")
        return known[feature, processes]

    return find


def end_of(pool: Pool, processes: int, run: list[str], seed: int) -> str:
    """How `train_and_die` ends: "finished", before the kill, or the error of the ranks."""
    try:
        assert pool.run(processes, train_and_die, run, seed, timeout=120) == [0] * processes
    except WorkerError as error:
        return str(error)
    return "finished"


@pytest.mark.parametrize(
    ("feature", "processes", "mode"), CASES if os.environ.get("ALL_KILLS") else SAMPLE
)
def test_a_run_that_is_killed_again_and_again_is_the_run(
    pool, options, tmp_path, undisturbed, feature, processes, mode
):
    run, folder = run_arguments(options, tmp_path, feature, mode), tmp_path / "debug/checkpoints"
    expected = undisturbed(feature, processes)
    assert len(expected) > 16
    seed = CASES.index((feature, processes, mode)) * 1000
    kills, newest = 0, []
    while kills < KILLS:
        ending = end_of(pool, processes, run, seed)
        if ending == "finished":
            break
        assert re.search(r"died|[Cc]onnection|closed|gloo", ending), ending
        kills += 1
        seed += 1
        newest.append(list_steps(folder)[-1:])
        for step in list_steps(folder):
            assert not verify_files(
                step_folder(folder, step), read_manifest(step_folder(folder, step))
            )
    print(
        f"{feature}, {processes} processes, {mode}: {kills} kills; newest step after each: {newest}"
    )
    assert kills >= 3
    assert pool.run(processes, train_with_nan, run, timeout=120) == [0] * processes
    assert lasting(tmp_path / "debug") == expected
