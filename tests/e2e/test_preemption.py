"""The campaign, second part: signals at random moments, full disks, saves in a row, changes of
layout.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import resource
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoints import write_step
from model_builder import EIGHT_LAYOUTS
from runs import curve, train_run, train_until

from titanlite.checkpoint.async_save import AsyncSaver
from titanlite.checkpoint.folders import list_steps, step_folder
from titanlite.checkpoint.manifest import RunMetadata, read_manifest
from titanlite.checkpoint.step_files import verify_files
from titanlite.checkpoint.storage import SaveError
from titanlite.data.order import Samples
from titanlite.data.stream import TrainStream

pytestmark = pytest.mark.slow


def train_and_signal(arguments: list[str], seed: int) -> tuple[int, int]:
    """Exit code, and the step in which one rank, at a random moment, got SIGTERM."""
    chance = random.Random(seed)  # the same on all ranks
    victim, delay = chance.randrange(dist.get_world_size()), chance.uniform(0, 0.6)
    original, steps, at = TrainStream.next_step, [0], [0]

    def send() -> None:
        at[0] = steps[0]
        os.kill(os.getpid(), signal.SIGTERM)

    def next_step(stream):
        steps[0] = stream.samples // 8 + 1
        if not at[0] and victim == dist.get_rank() and not timer.is_alive():
            timer.start()
        return original(stream)

    timer = threading.Timer(delay, send)
    TrainStream.next_step = next_step
    return train_run(arguments), at[0]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_that_is_stopped_again_and_again_is_the_run(pool, arguments, tmp_path, mode):
    """25 times in each mode.

    Each time the step it was in, or the next, is committed; in the end no loss differs.
    """
    long = [
        *arguments,
        "--training.steps=100000",
        "--validation.freq=0",
        f"--checkpoint.async_mode={mode}",
    ]
    run = [*long, "--run.name=stopped", "--checkpoint.freq=3"]
    folder = tmp_path / "stopped/checkpoints"
    for seed in range(25) if mode == "disabled" else range(25, 50):
        outcomes = pool.run(2, train_and_signal, run, seed)
        assert [code for code, _ in outcomes] == [75, 75]
        newest, signalled = list_steps(folder)[-1], max(step for _, step in outcomes)
        assert newest in (signalled, signalled + 1)
        assert not verify_files(
            step_folder(folder, newest), read_manifest(step_folder(folder, newest))
        )
    last = curve(tmp_path / "stopped")
    assert list(last) == list(range(1, newest + 1))
    # Where the learning rate goes depends on training.steps: so the other run is stopped too, but
    # only there.
    assert pool.run(2, train_until, newest, [*long, "--run.name=whole"], timeout=120) == [75, 75]
    assert curve(tmp_path / "whole") == last


def as_parts(state: dict) -> dict:
    """Stateful objects that have this state."""

    def part(values: dict) -> SimpleNamespace:
        return SimpleNamespace(state_dict=lambda: values, load_state_dict=values.update)

    return {name: part(values) for name, values in state.items()}


def big_state(rank: int) -> dict:
    return {"model": {f"weight.{rank}": torch.ones(500_000)}}


def save_into(folder: Path, limit: int, mode: str) -> list[str]:
    """Two saves of 4 MB by two ranks; before the second one, files may not grow beyond `limit`
    bytes, if any.
    """
    saver = AsyncSaver(mode, 1, torch.device("cpu"))
    outcomes = []
    for step in (1, 2):
        if step == 2 and limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        def write(state, failure, step=step):
            write_step(folder, step, state, {}, RunMetadata({}, {}, ""), failure)

        try:
            saver.save(as_parts(big_state(dist.get_rank())), write)
            saver.wait_for_staging()
            saver.wait()
            outcomes.append("saved")
        except SaveError as error:
            outcomes.append(str(error))
    return outcomes


def check_full(outcomes: list[list[str]], folder: Path, reason: str) -> None:
    for first, second in outcomes:
        assert first == "saved"
        assert second.startswith(f"step 2 could not be saved in {folder}: ")
        assert reason in second
        assert "\n" not in second
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    assert not verify_files(folder / "step-1", read_manifest(folder / "step-1"))


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("limit", [100, 1_000_000])
def test_files_that_may_not_grow(pool, tmp_path, mode, limit):
    folder = tmp_path / "checkpoints"
    check_full(pool.run(2, save_into, folder, limit, mode), folder, "File too large")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk(pool, tmp_path, mode):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        check_full(
            pool.run(2, save_into, disk / "checkpoints", 0, mode),
            disk / "checkpoints",
            "No space left on device",
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def save_a_hundred_times(folder: Path) -> int:
    saver = AsyncSaver("async", 0, torch.device("cpu"))
    for step in range(1, 101):

        def write(state, failure, step=step):
            write_step(folder, step, state, {}, RunMetadata({}, {}, ""), failure)

        state = {"model": {f"weight.{dist.get_rank()}": torch.full((1000,), float(step))}}
        saver.save(as_parts(state), write)
        dist.all_reduce(torch.ones(1000))  # training's own messages meanwhile
        saver.wait_for_staging()
    saver.wait()
    return len(list_steps(folder))


def test_a_hundred_saves_in_a_row(pool, tmp_path):
    assert pool.run(2, save_a_hundred_times, tmp_path, timeout=120) == [100, 100]


def every_change() -> list[int]:
    """A walk over the layouts in which each follows each other one exactly once (an Euler circuit)."""
    left = {
        here: [there for there in range(len(EIGHT_LAYOUTS)) if there != here]
        for here in range(len(EIGHT_LAYOUTS))
    }
    stack, walk = [0], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk


def samples_of_one_step(arguments: list[str]) -> tuple[int, list[int]]:
    """Exit code, and the numbers of the samples that this rank reads in a run of one more step."""
    seen, original = [], Samples.pick

    def pick(samples, sample):
        seen.append(sample)
        return original(samples, sample)

    Samples.pick = pick
    return train_until(1, arguments), seen


def test_no_token_is_repeated_or_skipped_over_all_changes_of_layout(pool, arguments, tmp_path):
    walk = every_change()
    assert len(walk) == 57
    assert len(set(itertools.pairwise(walk))) == 56
    run = [*arguments, "--training.steps=100", "--validation.freq=0", "--checkpoint.keep=1"]
    for step, index in enumerate(walk, 1):
        layout = EIGHT_LAYOUTS[index]
        options = [f"--parallel.{axis}={degree}" for axis, degree in layout.items()]
        outcomes = pool.run(
            math.prod(layout.values()), samples_of_one_step, [*run, *options], timeout=120
        )
        assert {code for code, _ in outcomes} == {75}
        assert {sample for _, seen in outcomes for sample in seen} == set(
            range(8 * (step - 1), 8 * step)
        ), layout
    assert sorted(curve(tmp_path / "debug")) == list(range(1, 58))
