"""Bad steps of real runs, caused on one rank: all ranks skip, roll back or stop in the same step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bad_steps import nan_with
from runs import curve, rows, samples_of_a_run, train_run, train_until
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from titanlite.checkpoint.folders import RECORD, list_steps
from titanlite.checkpoint.manager import Checkpointer, Diverged
from titanlite.config.load import load_config
from titanlite.distributed import signals
from titanlite.tools.report.run_data import read_run

SAMPLE = 17  # of step 3, with samples 16 to 23
QUIET = ["--validation.freq=0", "--checkpoint.freq=2", "--checkpoint.keep=0"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_with_nan(
    arguments: list[str], victim: int, where: str, sample: int = SAMPLE
) -> tuple[list[int], list[int], str]:
    """The samples this rank has read, the updates (from 1) that changed nothing, and the error that
    ended the run.
    """
    unchanged: list[int] = []
    before: list[list[torch.Tensor]] = []

    def state(optimizer) -> list[torch.Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [local(t) for p in parameters for t in (p, *optimizer.state.get(p, {}).values())]

    def after(optimizer, *_) -> None:
        pairs = list(zip(before[-1], state(optimizer), strict=False))
        if all(torch.equal(a, b) for a, b in pairs):
            unchanged.append(len(before))

    hooks = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: before.append(state(optimizer))),
        register_optimizer_step_post_hook(after),
    ]
    error = ""
    with nan_with(sample, victim, where) as seen:
        try:
            train_run(arguments)
        except Diverged as raised:
            error = str(raised)
    for hook in hooks:
        hook.remove()
    return seen, unchanged, error


def ask_with_nan(arguments: list[str], folder: Path) -> str:
    """As `run_with_nan`, and the file SAVE appears in the bad step."""
    from titanlite.optim.stability import Guard

    judge = Guard.judge
    steps: list[int] = []

    def judged(guard, step, samples, loss, grad_norm, num_targets):
        steps.append(step)
        if steps == [1, 2, 3]:
            (folder / "SAVE").touch()
        judge(guard, step, samples, loss, grad_norm, num_targets)

    with (
        mock.patch.object(Guard, "judge", judged),
        mock.patch.object(signals, "LOOK_EVERY", 0.0),  # these steps take milliseconds
    ):
        return run_with_nan(arguments, 0, "loss")[2]


@pytest.mark.slow
def test_a_save_requested_in_a_step_that_is_rolled_back_is_done_in_the_next(
    pool, arguments, tmp_path
):
    """Step 3 is bad the first time, and was not due to be saved."""
    run = [*arguments, *QUIET, "--stability.action=rollback"]
    assert pool.run(1, ask_with_nan, run, tmp_path / "debug") == [""]
    assert list_steps(tmp_path / "debug/checkpoints") == [2, 3, 4, 6]


def stop_with_nan(step: int, arguments: list[str]) -> int:
    with nan_with(SAMPLE, 0, "loss"):
        return train_until(step, arguments)


CASES = [
    (["parallel.dp_shard=4"], 0, "loss"),
    (["parallel.pp=2", "parallel.dp_shard=2"], 2, "loss"),  # of the last stage
    # of the first stage
    pytest.param(["parallel.pp=2", "parallel.dp_shard=2"], 0, "gradient", marks=pytest.mark.slow),
    (["parallel.tp=2", "parallel.dp_shard=2"], 1, "gradient"),
    pytest.param(["parallel.tp=2", "parallel.dp_shard=2"], 0, "loss", marks=pytest.mark.slow),
    pytest.param(
        ["parallel.dp_replicate=2", "parallel.dp_shard=2"], 0, "gradient", marks=pytest.mark.slow
    ),
    pytest.param(["parallel.cp=2", "parallel.dp_shard=2"], 1, "gradient", marks=pytest.mark.slow),
    pytest.param(
        ["parallel.dp_shard=4", "optimizer.state_dtype=bfloat16"],
        0,
        "gradient",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        ["parallel.dp_shard=4", "parallel.cpu_offload"], 0, "gradient", marks=pytest.mark.slow
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "victim", "where"), CASES, ids=str)
def test_all_ranks_skip_the_step_of_one(pool, arguments, tmp_path, layout, victim, where):
    """Parameters, moments and step counts are the same bits after it on all ranks; the other steps
    train.
    """
    run = [*arguments, *QUIET, "--stability.action=skip", *(f"--{option}" for option in layout)]
    for seen, unchanged, error in pool.run(4, run_with_nan, run, victim, where):
        assert (unchanged, error) == ([3], "")
        assert max(seen) == 6 * 8 - 1 or len(seen) < 6 * 8
    found = [row for row in rows(tmp_path / "debug") if "lr" in row]
    assert [row["bad_steps"] for row in found] == [0, 0, 1, 1, 1, 1]
    assert found[2]["loss" if where == "loss" else "grad_norm"] is None
    assert "step 3 (samples 16 to 23): the loss is " in (tmp_path / "debug/log.txt").read_text()
    assert ("skip", 3) in [
        (event.name, event.step) for event in read_run(tmp_path / "debug").events
    ]


@pytest.mark.slow
def test_a_run_that_has_skipped_resumes_exactly(pool, arguments, tmp_path):
    """Also the window of the z-scores is that of an uninterrupted run."""
    run = [
        *arguments,
        *QUIET,
        "--stability.action=skip",
        "--stability.threshold=50",
        "--stability.warmup_steps=0",
    ]
    run += ["--stability.window=16", "--training.steps=16"]
    assert pool.run(2, stop_with_nan, 99, [*run, "--run.name=whole"]) == [0, 0]
    assert pool.run(2, stop_with_nan, 4, [*run, "--run.name=stopped"]) == [75, 75]
    assert pool.run(2, stop_with_nan, 99, [*run, "--run.name=stopped"]) == [0, 0]
    kept = [
        [
            {
                key: row[key]
                for key in ("step", "loss", "grad_norm", "loss_z", "grad_norm_z", "bad_steps")
            }
            for row in found
        ]
        for found in (rows(tmp_path / "whole"), rows(tmp_path / "stopped"))
    ]
    assert kept[0] == kept[1]
    # Until 12 of 16 values are there
    assert [row["loss_z"] is None for row in kept[0]] == [True] * 13 + [False] * 3


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        (["parallel.dp_shard=4"], 0),
        pytest.param(["parallel.pp=2", "parallel.dp_shard=2"], 2, marks=pytest.mark.slow),
        pytest.param(["parallel.tp=2", "parallel.dp_shard=2"], 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rolled_back_and_the_samples_are_not_seen_again(pool, arguments, tmp_path, layout, victim):
    """The run then is one that had excluded these samples from the beginning, bit by bit."""
    run = [*arguments, *QUIET, "--stability.action=rollback", *(f"--{option}" for option in layout)]
    results = pool.run(4, run_with_nan, run, victim, "loss")
    readers = 4 if "dp_shard=4" in layout[0] else 2
    for seen, unchanged, error in results:
        assert (unchanged, error) == ([3], "")
        assert sum(16 <= number < 24 for number in seen) == 8 // readers  # once, in the bad step
        assert sum(24 <= number < 56 for number in seen) == 4 * 8 // readers
    log = (tmp_path / "debug/log.txt").read_text()
    assert "step 3 (samples 16 to 23): the loss is nan" in log
    assert (
        "rolled back to step 2, and these samples are excluded in this epoch (rollback 1 of 3)"
        in log
    )
    assert ("rollback", 3) in [
        (event.name, event.step) for event in read_run(tmp_path / "debug").events
    ]
    found = [row for row in rows(tmp_path / "debug") if "lr" in row]
    assert [(row["step"], row["rollbacks"]) for row in found] == [
        (1, 0),
        (2, 0),
        (3, 1),
        (4, 1),
        (5, 1),
        (6, 1),
    ]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / RECORD).write_text((tmp_path / "debug" / RECORD).read_text())
    assert pool.run(4, train_run, [*run, "--run.name=other"]) == [0] * 4
    assert curve(tmp_path / "other") == curve(tmp_path / "debug")


@pytest.mark.slow
def test_a_branch_and_a_copied_checkpoint_exclude_the_same_samples(pool, arguments, tmp_path):
    """Also after the branch has saved and resumed itself: step 7 begins with position 48, which is
    sample 56.
    """
    run = [*arguments, *QUIET]
    pool.run(2, run_with_nan, [*run, "--stability.action=rollback"], 0, "loss")
    shutil.copytree(tmp_path / "debug/checkpoints", tmp_path / "copied/checkpoints")
    longer = [*run, "--training.steps=8"]
    branch = [
        *longer,
        "--run.name=branch",
        f"--checkpoint.initial_load={tmp_path}/debug",
        "--checkpoint.load_step=6",
    ]
    assert pool.run(1, samples_of_a_run, branch, 1) == [(list(range(56, 64)), [75])]
    (tmp_path / "moved/checkpoints").mkdir(parents=True)
    (tmp_path / "branch/checkpoints/step-7").rename(tmp_path / "moved/checkpoints/step-7")
    assert pool.run(1, samples_of_a_run, [*longer, "--run.name=moved"], 99) == [
        (list(range(64, 72)), [0])
    ]
    for name in ("debug", "copied"):
        results = pool.run(2, samples_of_a_run, [*longer, f"--run.name={name}"], 99)
        assert sorted(number for seen, _ in results for number in seen) == list(range(56, 72))
    assert curve(tmp_path / "copied") == {
        step: row for step, row in curve(tmp_path / "debug").items() if step > 6
    }


def measured(folder: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint has of the optional parts."""
    files = [*folder.glob("ema-*.safetensors"), *folder.glob("training-*.safetensors")]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(("ema", "noise_scale", "stability"))
    }


@pytest.mark.slow
def test_what_is_not_in_the_checkpoint_starts_anew_in_a_rollback(pool, arguments, tmp_path):
    """After it, the average has followed steps 5 to 8 only, as in a run that resumes from step 4
    with these samples.
    """
    run = [*arguments, "--validation.freq=0", "--checkpoint.freq=4", "--checkpoint.keep=0"]
    assert pool.run(1, train_run, [*run, "--training.steps=4"]) == [0]
    shutil.copytree(tmp_path / "debug/checkpoints", tmp_path / "other/checkpoints")
    run += [
        "--training.steps=8",
        "--ema.decay=0.9",
        "--metrics.noise_scale_freq=1",
        "--stability.action=rollback",
    ]
    assert pool.run(1, run_with_nan, run, 0, "loss", 41)[0][1:] == ([3], "")  # the first allocates
    shutil.copy(tmp_path / "debug" / RECORD, tmp_path / "other")
    assert pool.run(1, train_run, [*run, "--run.name=other"]) == [0]
    found, expected = (
        measured(tmp_path / name / "checkpoints/step-8") for name in ("debug", "other")
    )
    assert int(found["ema.steps"]) == 4
    assert {"noise_scale.averages", "stability-128.counts"} <= found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def read_late(arguments: list[str], delays: list[int]) -> tuple[list[int], list[int], str]:
    """As `run_with_nan` on a device: numbers arrive some steps later, on each rank after another
    number of steps.
    """
    from titanlite.optim.stability import Guard, Pending

    judged: list[int] = []

    class Copy:
        def __init__(self) -> None:
            self.begun = len(judged)

        def query(self) -> bool:
            return len(judged) >= self.begun + delays[dist.get_rank()]

        def synchronize(self) -> None:
            pass

    def send(guard, step, first, end, numbers):
        judged.append(step)
        guard.pending.append(Pending(step, first, end, numbers, Copy()))

    with mock.patch.object(Guard, "send", send):
        return run_with_nan(arguments, 0, "loss", 41)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delays", "withheld"),
    [([1, 3], [6, 7]), pytest.param([9, 9], [6, 7, 8], marks=pytest.mark.slow)],
)
def test_ranks_that_read_late_act_in_the_same_step(pool, arguments, tmp_path, delays, withheld):
    """Step 6 is bad. The first rank to read of it is followed by the other; a save waits for the
    numbers of all.

    No update follows the bad step, and the run is that of ranks which have read at once.
    """
    run = [
        *arguments,
        "--validation.freq=0",
        "--checkpoint.freq=4",
        "--training.steps=10",
        "--metrics.log_freq=100",
    ]
    run.append("--stability.action=rollback")
    for _, unchanged, error in pool.run(2, read_late, run, delays):
        assert (unchanged, error) == (withheld, "")
    assert "(samples 40 to 47): the loss is nan" in (tmp_path / "debug/log.txt").read_text()
    assert pool.run(2, run_with_nan, [*run, "--run.name=at_once"], 0, "loss", 41)[0][1] == [6]
    assert curve(tmp_path / "debug")[10] == curve(tmp_path / "at_once")[10]
    assert list_steps(tmp_path / "debug/checkpoints") == [4, 8, 10]


@pytest.mark.slow
def test_all_ranks_stop_at_the_step_of_one(pool, arguments, tmp_path):
    run = [*arguments, *QUIET, "--stability.threshold=1e9"]
    errors = {
        error for _, _, error in pool.run(4, run_with_nan, [*run, "--parallel.tp=2"], 1, "gradient")
    }
    (error,) = errors
    assert error.startswith("step 3 (samples 16 to 23): the loss is ")
    assert (
        "the gradient norm is inf: training has diverged; the same command resumes from step 2"
        in error
    )
    assert list_steps(tmp_path / "debug/checkpoints") == [2]


def killed_in_the_rollback(arguments: list[str]) -> str:
    """A run that ends after the record was written and before anything else has happened."""

    def exclude(checkpointer, ranges):
        if ranges:
            raise RuntimeError("killed")

    with mock.patch.object(Checkpointer, "exclude_samples", exclude):
        try:
            return str(run_with_nan(arguments, 0, "loss"))
        except RuntimeError as error:
            return str(error)


@pytest.mark.slow
def test_a_rollback_survives_a_kill(pool, arguments, tmp_path):
    run = [*arguments, *QUIET, "--stability.action=rollback"]
    assert pool.run(2, run_with_nan, [*run, "--run.name=whole"], 0, "loss")[0][2] == ""
    assert pool.run(2, killed_in_the_rollback, run) == ["killed", "killed"]
    assert len(json.loads((tmp_path / "debug" / RECORD).read_text())["rollbacks"]) == 1
    seen, unchanged, error = pool.run(2, run_with_nan, run, 0, "loss")[0]
    assert (unchanged, error, SAMPLE in seen) == ([], "", False)
    assert curve(tmp_path / "debug") == curve(tmp_path / "whole")
    assert rows(tmp_path / "debug")[-1]["rollbacks"] == 1


def always_bad(arguments: list[str], step: int) -> str:
    """The error of a run whose step `step` is bad with any samples."""
    from titanlite.optim.stability import Guard

    original = Guard.judge

    def judge(guard, number, samples, loss, grad_norm, num_targets):
        if number == step:
            loss = loss * float("nan")
        original(guard, number, samples, loss, grad_norm, num_targets)

    with mock.patch.object(Guard, "judge", judge):
        try:
            return str(train_run(arguments))
        except (Diverged, AssertionError) as error:
            return str(error)


def test_rollbacks_are_limited_and_a_checkpoint_that_is_the_cause_is_renamed(
    pool, arguments, tmp_path
):
    """The first rollback goes to step 4; since step 5 is bad again at once, the second goes to step
    2.
    """
    run = [*arguments, *QUIET, "--stability.action=rollback", "--stability.max_rollbacks=2"]
    (error,) = pool.run(1, always_bad, run, 5)
    assert "step 5 (samples 48 to 55)" in error
    assert (
        "2 rollbacks were done already (stability.max_rollbacks = 2): training has diverged"
        in error
    )
    record = json.loads((tmp_path / "debug" / RECORD).read_text())["rollbacks"]
    assert [(entry["step"], entry["first"], entry["end"]) for entry in record] == [
        (5, 32, 40),
        (5, 40, 48),
    ]
    assert (tmp_path / "debug/checkpoints/step-4.diverged").is_dir()
    assert list_steps(tmp_path / "debug/checkpoints") == [2, 4]


def test_there_is_nothing_to_roll_back_to(pool, arguments):
    run = [
        *arguments,
        "--validation.freq=0",
        "--checkpoint.freq=100",
        "--stability.action=rollback",
    ]
    (error,) = pool.run(1, always_bad, run, 2)
    assert "there is nothing to roll back to, since no checkpoint was saved" in error


def test_skipping_for_ever_ends_the_run(pool, arguments, tmp_path):
    run = [
        *arguments,
        *QUIET,
        "--stability.action=skip",
        "--stability.max_skips=2",
        "--optimizer.lr=1e30",
    ]
    with pytest.raises(
        AssertionError,
        match=r"2 steps in a row were not finite \(stability.max_skips\): training has",
    ):
        pool.run(2, train_run, [*run, "--training.max_norm=0"])


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("optimizer.implementation=foreach", "optimizer.implementation = foreach"),
        ("checkpoint.freq=0", "checkpoint.freq"),
    ],
)
def test_what_does_not_fit_is_refused(pool, arguments, option, expected):
    from titanlite.model.flavors import resolve_flavor
    from titanlite.rules.check import check_layout
    from titanlite.runtime.errors import ConfigError

    config = load_config([*arguments, *QUIET, "--stability.action=rollback", f"--{option}"])
    with pytest.raises(ConfigError, match=expected):
        check_layout(config, resolve_flavor(config.model, 4112), 1)


def test_the_default_imports_nothing_and_records_nothing(whole_run):
    folder: Path = whole_run()
    assert not (folder / RECORD).exists()
    assert "bad_steps" not in rows(folder)[-1]
