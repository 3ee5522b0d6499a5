"""Which checkpoints stay: the newest, every n-th, the best; only whole and finite ones count, or
go.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from checkpoints import write_step
from fuzz_samples import Reader, given
from runs import train_run

from titanlite.checkpoint.folders import list_steps
from titanlite.checkpoint.manifest import Manifest, RunMetadata
from titanlite.checkpoint.retention import (
    PROVEN,
    Proof,
    Retention,
    judge,
    read_proof,
    steps_to_delete,
)


def manifest(step: int, loss: float | None = None) -> Manifest:
    return Manifest(step, True, "", "", {}, {}, "", loss, {}, {})


def left(steps: dict[int, float | None], *rule: int) -> list[int]:
    gone = steps_to_delete([manifest(step, loss) for step, loss in steps.items()], *rule)
    return [step for step in steps if step not in gone]


LOSSES = {10: 3.0, 20: 1.0, 30: None, 40: 1.0, 50: 2.0, 60: None}


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        ((0, 0, 0), [10, 20, 30, 40, 50, 60]),
        ((1, 0, 0), [60]),
        ((2, 0, 0), [50, 60]),
        ((9, 0, 0), [10, 20, 30, 40, 50, 60]),
        ((1, 20, 0), [20, 40, 60]),
        ((1, 0, 1), [40, 60]),  # of equals the newer
        ((1, 0, 3), [20, 40, 50, 60]),
        ((1, 30, 2), [20, 30, 40, 60]),
    ],
)
def test_the_rule(rule, steps):
    assert left(LOSSES, *rule) == steps


def test_there_is_always_one():
    assert left({5: None}, 1, 0, 0) == [5]
    assert steps_to_delete([], 1, 0, 0) == []


def test_the_last_plausible_one_stays():
    assert left({5: None, 6: None, 7: None}, 1, 0, 0, 5) == [5, 7]
    assert left({5: None, 6: None}, 1, 0, 0, 4) == [6]  # deleted by somebody


UNIFORM = 8.3  # ln V


def test_what_is_far_above_the_lowest_plausible_loss_is_not_plausible(caplog):
    record = Proof()
    history = [  # step, training loss, validation loss, the plausible step afterwards
        (10, 8.0, None, 10),
        (20, 8.9, None, 20),
        (30, 3.0, 3.2, 30),
        (40, 3.1, 9.5, 30),  # a validation loss counts rather than a training loss
        (50, 9.0, None, 30),
        (60, math.nan, None, 30),
        (70, 9.0, 3.3, 70),  # has come down
        (80, 3.9, 4.1, 80),
        (90, 4.1, 4.5, 80),  # 0.4 above the one before it, and 1.3 above the lowest
    ]
    for step, loss, validation_loss, plausible in history:
        record = judge(record, step, loss, validation_loss, UNIFORM)
        assert (record.step, record.plausible) == (step, plausible)
    assert (record.loss, record.validation_loss) == (3.0, 3.2)
    assert caplog.messages == [
        "the checkpoint of step 40 may be useless: its validation loss is 9.5; "
        "expected at most 4.2. Step 30 is kept until a newer one is plausible",
        "the checkpoint of step 90 may be useless: its validation loss is 4.5; "
        "expected at most 4.2. Step 80 is kept until a newer one is plausible",
    ]


def test_the_first_checkpoint_is_compared_with_equal_probabilities(caplog):
    record = judge(Proof(), 10, 436.0, 430.0, UNIFORM)
    assert record == judge(record, 10, 436.0, 430.0, UNIFORM) == Proof(10, 0)
    assert judge(record, 20, 9.0, 9.1, UNIFORM) == Proof(20, 20, 9.0, 9.1)
    assert "None is better" in caplog.messages[0]


def test_a_plausible_checkpoint_is_not_judged_by_a_process_that_resumes_from_it(caplog):
    """Its data may be others now."""
    assert judge(Proof(100, 100, 2.0), 100, 3.5, None, UNIFORM) == Proof(100, 100, 3.5)
    assert not caplog.messages


def test_the_record_is_read_as_it_was_written(tmp_path):
    folder = Retention(tmp_path / "checkpoints")
    assert read_proof(tmp_path) == Proof()
    folder.write(Proof(20, 10, 2.5, 2.75))
    assert read_proof(tmp_path) == Proof(20, 10, 2.5, 2.75)
    folder.go_back(15)
    assert read_proof(tmp_path) == Proof(15, 10, 2.5, 2.75)
    folder.go_back(5)  # the user may know better
    assert read_proof(tmp_path) == Proof(5, 5)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "x",
        "-3",
        "[1]",
        '{"step": -1}',
        '{"steps": 1}',
        '{"step": 1.5}',
        '{"loss": "2"}',
        "[" * 900,
    ],
)
def test_a_damaged_record_counts_as_none(tmp_path, content):
    (tmp_path / PROVEN).write_text(content)
    assert read_proof(tmp_path) == Proof()


def write_some(folder: Path) -> list[int]:
    """Steps 1 to 4, of which 3 holds a NaN and 2 loses a byte afterwards; returns what counts."""
    for step in range(1, 5):
        weight = torch.tensor([1.0, float("nan") if step == 3 else 2.0])
        write_step(folder, step, {"model": {"weight": weight}}, {}, RunMetadata({}, {}, ""))
    shard = folder / "step-2/model-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    return [found.step for found in Retention(folder).good()]


def test_only_whole_and_finite_ones_count(pool, tmp_path):
    assert pool.run(1, write_some, tmp_path) == [[1, 4]]
    assert list_steps(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_number_that_is_not_finite_is_found(dtype, value):
    from titanlite.checkpoint.shard_file import is_finite

    tensor = torch.linspace(-60000, 60000, 1001).to(dtype)
    assert is_finite(tensor)
    tensor[500] = value
    assert not is_finite(tensor)
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.tensor([1, 2]))


@pytest.mark.slow
def test_a_run_keeps_the_newest_every_nth_and_the_best(pool, arguments, tmp_path):
    keeping = [
        "--checkpoint.freq=1",
        "--checkpoint.keep=1",
        "--checkpoint.keep_every=4",
        "--checkpoint.keep_best=1",
    ]
    run = [
        *arguments,
        *keeping,
        "--validation.freq=1",
        "--training.steps=9",
        "--schedule.warmup_steps=1",
    ]
    assert pool.run(2, train_run, run) == [0, 0]
    from runs import validation

    losses = validation(tmp_path / "debug")
    best = min((loss, -step) for step, loss in losses.items() if step > 0)
    assert list_steps(tmp_path / "debug/checkpoints") == sorted({4, 8, 9, -best[1]})


def read_proven(folder: Path, data: bytes) -> None:
    (folder / PROVEN).write_bytes(data)
    proof = read_proof(folder)
    assert 0 <= proof.step < 1 << 62
    assert 0 <= proof.plausible < 1 << 62
    assert proof.loss is None or math.isfinite(proof.loss)


PROOF = b'{"step": 120, "plausible": 110, "loss": 2.5, "validation_loss": null}'
FUZZED = {PROVEN: Reader("bytes", given(PROOF), read_proven)}
