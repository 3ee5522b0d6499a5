"""Every Stateful of every feature: what a run saves after 0, 1 and 3 steps is what the next process
loads.

The state of a process that has just started is the template into which a checkpoint is read, so it
must have the same names, shapes and dtypes as the state after any number of steps. A run that only
resumes from a later step would not show a difference between the two at the start.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import write_step
from runs import train_run

from titanlite.checkpoint.folders import list_steps
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.planner import LocalParts
from titanlite.checkpoint.state import State, state_of, switched_on
from titanlite.tools.verify.pool import Pool

SAVED = (0, 1, 3)  # after so many steps
STEPS = ["--training.steps=3", "--checkpoint.freq=1", "--checkpoint.keep=0", "--validation.freq=0"]

FEATURES = {
    "adamw": [],
    "float16": ["--training.compute_dtype=float16"],
    "float16, overflow": ["--training.compute_dtype=float16", "--training.loss_scale=16777216"],
    "ema": ["--ema.decay=0.9"],
    "muon": ["--optimizer.name=muon"],
    "muon, adaptive clipping": [
        "--optimizer.name=muon",
        "--optimizer.clip=agc",
        "--loss.z_loss=1e-3",
    ],
    "skip": ["--stability.action=skip"],
    "rollback, spikes": [
        "--stability.action=rollback",
        "--stability.threshold=50",
        "--stability.window=16",
    ],
    "ramp": ["--training.batch_ramp=16 from step 2"],
    "noise scale": ["--metrics.noise_scale_freq=1", "--parallel.reduce_every_microbatch"],
    "optimizer offload": ["--parallel.optimizer_offload"],
    "cpu offload": ["--parallel.cpu_offload"],
    "bfloat16 moments": ["--optimizer.state_dtype=bfloat16"],
    "bfloat16 weights": ["--training.param_dtype=bfloat16"],
    "chunked loss": ["--loss.num_chunks=2"],
    "packing": ["--data.packing=best_fit"],
}
ALL = ["float16", "ema", "muon", "rollback, spikes", "ramp", "noise scale"]  # in one run


# Dtype, whole shape, offsets, hash
Fingerprint = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], str]


def fingerprints(state: State) -> dict[str, Fingerprint]:
    """Fingerprints of this rank's part of each tensor, by name.

    The clock advances between two looks, so only its kind is in its fingerprint.
    """
    found = {}
    flat = {f"{section}.{key}": value for section in state for key, value in state[section].items()}
    for part in LocalParts().of(flat):
        content = part.local.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        digest = "" if part.name == "progress.seconds" else hashlib.sha256(content).hexdigest()
        found[part.name] = (part.local.dtype, part.value.shape, part.chunk.offsets, digest)
    return found


def state_of_run(run: Checkpointer) -> State:
    """The state of the run as it would be saved now."""
    return state_of(switched_on(run.states))


def save_and_note(arguments: list[str]) -> dict[int, dict[str, Fingerprint]]:
    """A run of three steps, which saves before the first step and after each: its state at those
    moments.
    """
    noted: dict[int, dict[str, Fingerprint]] = {}
    load = Checkpointer.load
    save = Checkpointer.save

    def load_and_save(run: Checkpointer) -> bool:
        loaded = load(run)
        write_step(run.folder, 0, state_of_run(run), run.files(), run.facts.metadata(None))
        noted[0] = fingerprints(state_of_run(run))
        return loaded

    def note_and_save(run: Checkpointer, step: int, *rest: Any, **options: Any) -> None:
        noted[step] = fingerprints(state_of_run(run))
        save(run, step, *rest, **options)

    with (
        mock.patch.object(Checkpointer, "load", load_and_save),
        mock.patch.object(Checkpointer, "save", note_and_save),
    ):
        assert train_run(arguments) == 0
    return noted


class Loaded(Exception):
    """Ends a run once its checkpoint is loaded."""


def load_and_note(arguments: list[str]) -> dict[str, Fingerprint]:
    """The state of a new process that has resumed from the newest step, as its next save would
    write it.
    """
    noted = {}
    load = Checkpointer.load

    def load_and_end(run: Checkpointer) -> bool:
        assert load(run)
        noted.update(fingerprints(state_of_run(run)))
        raise Loaded

    with mock.patch.object(Checkpointer, "load", load_and_end), pytest.raises(Loaded):
        train_run(arguments)
    return noted


def check(pool: Pool, processes: int, folder: Path, options: list[str], keys: list[str]) -> None:
    run = [*options, f"--run.folder={folder}", *STEPS, *keys]
    saved = pool.run(processes, save_and_note, run)
    assert list_steps(folder / "debug/checkpoints") == [0, 1, 2, 3]
    for step in reversed(SAVED):
        for later in range(step + 1, 4):
            shutil.rmtree(folder / f"debug/checkpoints/step-{later}", ignore_errors=True)
        loaded = pool.run(processes, load_and_note, run)
        for before, after in zip(saved, loaded, strict=True):
            assert after == before[step], f"step {step}"
    for before in saved:
        kinds = [{name: entry[:3] for name, entry in before[step].items()} for step in SAVED]
        assert kinds[0] == kinds[1] == kinds[2], (
            "names, dtypes and shapes are the same after any number of steps"
        )


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_with_all_features_loads_what_it_saved(pool, options, tmp_path, processes):
    check(pool, processes, tmp_path, options, [key for name in ALL for key in FEATURES[name]])


@pytest.mark.slow  # the features one by one
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_loads_what_it_saved(pool, options, tmp_path, processes, feature):
    check(pool, processes, tmp_path, options, FEATURES[feature])
