"""Runs whose batch grows: on any number of processes, through a resume at another size, and in
every count.
"""

from __future__ import annotations

import itertools

import pytest
from messages import assert_mentions, run_refused
from runs import curve, rows, samples_of_a_run, train_run, train_until

# Steps of 8, 8, 16, 16, 24 and 32 sequences of 64 tokens
RAMP = [
    "--training.batch_ramp=16 from step 3, 32 by 8 from 4_608 tokens",
    "--training.local_batch_size=2",
]
SIZES = [8, 8, 16, 16, 24, 32]


@pytest.fixture
def ramped(arguments):
    return [*arguments, *RAMP]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, []),
        (4, ["--parallel.dp_replicate=2"]),
        (4, ["--parallel.pp=2", "--parallel.dp_shard=2"]),
        pytest.param(4, [], marks=pytest.mark.slow),
        pytest.param(
            2,
            ["--training.local_batch_size=4", "--parallel.reduce_every_microbatch=false"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_losses_equal_one_process(pool, ramped, whole_run, tmp_path, processes, layout):
    assert pool.run(processes, train_run, [*ramped, *layout]) == [0] * processes
    one, many = curve(whole_run(*RAMP)), curve(tmp_path / "debug")
    assert sorted(one) == sorted(many) == [1, 2, 3, 4, 5, 6]
    for step in one:
        assert many[step] == pytest.approx(one[step], rel=1e-5)


def test_every_count_follows_the_sizes(whole_run):
    steps = [row for row in rows(whole_run(*RAMP)) if "loss" in row]
    assert [row["targets"] for row in steps] == [64 * size for size in SIZES]
    assert [row["tokens"] for row in steps] == [64 * sum(SIZES[:step]) for step in range(1, 7)]
    assert [row["data_percent"] for row in steps] == pytest.approx(
        [steps[0]["data_percent"] * sum(SIZES[: i + 1]) / 8 for i in range(6)]
    )
    for before, row in itertools.pairwise(steps):
        assert row["tps_global"] == pytest.approx(
            (row["tokens"] - before["tokens"]) / (row["seconds"] - before["seconds"])
        )


@pytest.mark.slow
def test_resume_in_the_middle_at_another_size(pool, ramped, whole_run, tmp_path):
    """4 processes, then 1, then 2: the samples of each step are those of a run that was never
    stopped.
    """
    seen: list[int] = []
    for processes, stop_after, code, steps in ((4, 3, 75, 3), (1, 1, 75, 1), (2, 99, 0, 2)):
        results = pool.run(processes, samples_of_a_run, ramped, stop_after)
        assert all(exit_code == [code] for _, exit_code in results)
        each = [iter(samples) for samples, _ in results]
        for size in SIZES[len(seen_steps(seen)) :][:steps]:
            step = sorted(next(samples) for samples in each for _ in range(size // processes))
            assert step == list(range(len(seen), len(seen) + size))
            seen += step
        assert [next(samples, None) for samples in each] == [None] * processes
    assert seen == list(range(sum(SIZES)))
    whole, parts = curve(whole_run(*RAMP)), curve(tmp_path / "debug")
    assert sorted(parts) == sorted(whole)
    for step in whole:
        assert parts[step] == pytest.approx(whole[step], rel=1e-5)


def seen_steps(seen: list[int]) -> list[int]:
    """The sizes of the steps that these samples are."""
    return [size for step, size in enumerate(SIZES) if sum(SIZES[: step + 1]) <= len(seen)]


def test_resume_in_the_middle_is_bit_identical(pool, ramped, whole_run, tmp_path):
    assert pool.run(1, train_until, 3, ramped) == [75]
    assert pool.run(1, train_run, ramped) == [0]
    assert curve(tmp_path / "debug") == curve(whole_run(*RAMP))


@pytest.mark.slow
def test_sizes_that_do_not_fit_the_processes_are_refused_at_each_start(pool, arguments, tmp_path):
    run = [
        *arguments,
        "--training.batch_ramp=10 from step 4",
        "--training.steps=2",
        "--training.local_batch_size=1",
    ]
    with run_refused(
        "training.batch_ramp: the size 10", "times 4 data-parallel processes (4)", "8 or 12"
    ):
        pool.run(4, train_run, run)
    assert pool.run(2, train_run, run) == [0, 0]
    with run_refused("training.batch_ramp: the size 10", "8 or 12"):
        pool.run(4, train_run, [*run, "--training.steps=3"])


@pytest.mark.slow
def test_a_ramp_may_begin_on_resuming_but_not_in_the_past(pool, arguments, tmp_path):
    run = [*arguments, "--validation.freq=0"]
    assert pool.run(1, train_run, [*run, "--training.steps=3"]) == [0]
    with run_refused(
        "training.batch_ramp: `from step`",
        "32 samples until step 3",
        "have 24 samples",
        "from N tokens",
    ):
        pool.run(1, train_run, [*run, "--training.batch_ramp=16 from step 3"])
    with run_refused(
        "training.batch_ramp", "= 16 and of", "48 samples until step 3", "have 24 samples"
    ):
        pool.run(
            1,
            train_run,
            [*run, "--training.global_batch_size=16", "--training.batch_ramp=32 from step 5"],
        )
    later = [
        *run,
        "--training.global_batch_size=16",
        f"--training.batch_ramp=32 from {(24 + 16) * 64} tokens",
    ]
    assert pool.run(1, train_run, later) == [0]
    assert [row["targets"] // 64 for row in rows(tmp_path / "debug") if "loss" in row] == [
        8,
        8,
        8,
        16,
        32,
        32,
    ]
    assert_mentions(
        (tmp_path / "debug/log.txt").read_text(), "training.batch_ramp  -> 32 from 2560 tokens"
    )
