"""A run that goes on from a step of another run, with its optimizer and its place in the data: the
decay of WSD.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from messages import assert_mentions, run_refused
from runs import curve, rows, train_run, train_until

from titanlite.checkpoint.folders import list_steps

DOCUMENT = (Path(__file__).parents[2] / "docs/schedules.md").read_text()
STABLE = [
    "--run.name=stable",
    "--schedule.name=wsd",
    "--schedule.decay_steps=2",
    "--validation.freq=0",
]


@pytest.fixture
def branch(arguments, tmp_path):
    """The command of the documents, for a run of 6 steps that decays over 2 from step 4."""
    (command,) = re.findall(
        r"^(./run_train.sh debug --run.name=decayed .*?[^\\])$", DOCUMENT, re.MULTILINE | re.DOTALL
    )
    words = shlex.split(command.replace("\\\n", " "))[2:]
    values = dict(word[2:].split("=") for word in words)
    steps, decay = int(values["training.steps"]), int(values["schedule.decay_steps"])
    assert int(values["checkpoint.load_step"]) == steps - decay
    values |= {"training.steps": "6", "schedule.decay_steps": "2", "checkpoint.load_step": "4"}
    values["checkpoint.initial_load"] = str(tmp_path / "stable")
    return [
        *arguments,
        "--validation.freq=0",
        *(f"--{name}={value}" for name, value in values.items()),
    ]


@pytest.mark.slow
def test_a_decay_from_a_stable_run_equals_a_run_that_had_it_from_the_start(
    pool, arguments, branch, tmp_path
):
    """The stable run is longer and keeps its peak rate; its branch is, bit by bit, the short run
    with a decay.
    """
    longer = [
        *arguments,
        *STABLE,
        "--training.steps=9",
        "--checkpoint.freq=2",
        "--checkpoint.keep=0",
    ]
    assert pool.run(1, train_run, longer) == [0]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "stable").rglob("*")}
    assert pool.run(1, train_until, 1, branch) == [75]  # after step 5
    assert list_steps(tmp_path / "decayed/checkpoints") == [5]
    assert pool.run(1, train_run, branch) == [0]
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "stable").rglob("*")}
    whole = [*arguments, *STABLE, "--run.name=whole", "--training.steps=6"]
    assert pool.run(1, train_run, whole) == [0]
    expected = {step: row for step, row in curve(tmp_path / "whole").items() if step > 4}
    assert curve(tmp_path / "decayed") == expected
    stable, decayed = (
        {
            row["step"]: (row["lr"], row["tokens"], row["data_percent"])
            for row in rows(tmp_path / name)
        }
        for name in ("stable", "decayed")
    )
    assert [stable[step][0] for step in (4, 5, 6)] == pytest.approx([3e-3] * 3)
    assert [decayed[step][0] for step in (5, 6)] == pytest.approx([3e-3 * 0.55, 3e-4])
    assert [decayed[step][1:] for step in (5, 6)] == [stable[step][1:] for step in (5, 6)]
    assert_mentions(
        (tmp_path / "decayed/log.txt").read_text(), "resumed from", "stable/checkpoints/step-4"
    )


@pytest.mark.slow
def test_a_branch_may_have_another_layout_but_not_another_model(pool, arguments, branch, tmp_path):
    assert pool.run(1, train_run, [*arguments, *STABLE, "--training.steps=4"]) == [0]
    assert pool.run(2, train_run, branch) == [0, 0]
    assert list(curve(tmp_path / "decayed")) == [5, 6]
    other = [*branch, "--run.name=other"]
    with run_refused("model.dim was 32 and is 16"):
        pool.run(1, train_run, [*other, "--model.dim=16"])
    with run_refused(
        "checkpoint.load_step = 3", "stable/checkpoints", "initial_load", "allowed: 4"
    ):
        pool.run(1, train_run, [*other, "--checkpoint.load_step=3"])
    (tmp_path / "stable/checkpoints/step-4/data.json").unlink()
    with run_refused("step-4", "data.json"):
        pool.run(1, train_run, other)
    assert list_steps(tmp_path / "stable/checkpoints") == [4]  # not renamed


def test_a_run_with_checkpoints_of_its_own_goes_back_to_these(pool, arguments, tmp_path):
    """`initial_load` gave its first weights; `load_step` is then a step of the run itself."""
    run = [*arguments, "--validation.freq=0", "--checkpoint.freq=2", "--checkpoint.keep=0"]
    assert pool.run(1, train_run, [*run, "--run.name=first"]) == [0]
    tuned = [*run, "--run.name=tuned", f"--checkpoint.initial_load={tmp_path}/first"]
    assert pool.run(1, train_run, tuned) == [0]
    before = curve(tmp_path / "tuned")
    assert pool.run(1, train_run, [*tuned, "--checkpoint.load_step=2"]) == [0]
    assert curve(tmp_path / "tuned") == before
    with run_refused("checkpoint.load_step = 3", "tuned/checkpoints"):
        pool.run(1, train_run, [*tuned, "--checkpoint.load_step=3"])
